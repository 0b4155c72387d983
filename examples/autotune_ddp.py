"""A training loop that is tuned while it trains: one line differs from plain DDP.

torchrun --standalone --nproc-per-node 2 examples/autotune_ddp.py --log-file tuning.csv
torchrun --standalone --nproc-per-node 2 examples/autotune_ddp.py --freeze tuning.csv
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

import perfsearch


def main() -> None:
    """Train a small network to add numbers up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--log-file", help="CSV of what was tried")
    parser.add_argument("--freeze", help="log of an earlier run: use its best, tune nothing")
    arguments = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(256, 1)).to(device)
    # in place of: model = DistributedDataParallel(model)
    model = perfsearch.autotune(model, log_file=arguments.log_file, freeze=arguments.freeze)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(arguments.steps):
        x = torch.rand(64, 256, generator=generator).to(device)
        loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
