"""A plain DistributedDataParallel script, as one finds many: nothing here knows of perfsearch.

torchrun --nproc-per-node 2 examples/scripts/ddp_train.py --epochs 2
perfsearch-run --search --nproc-per-node 2 examples/scripts/ddp_train.py --epochs 1000
"""

# ruff: noqa: D103

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(4096, 128), torch.randn(4096, 1))
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    layers = [torch.nn.Linear(128, args.width), torch.nn.ReLU()]
    for _ in range(args.layers):
        layers += [torch.nn.Linear(args.width, args.width), torch.nn.ReLU()]
    model = DDP(
        torch.nn.Sequential(*layers, torch.nn.Linear(args.width, 1)).to(device),
        device_ids=[device.index] if on_gpu else None,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=20)

    for epoch in range(args.epochs):
        begin = time.time()
        sampler.set_epoch(epoch)
        for number, (inputs, targets) in enumerate(loader):
            inputs, targets = inputs.to(device), targets.to(device)
            loss = torch.nn.functional.mse_loss(model(inputs), targets) / args.accumulate
            loss.backward()
            if (number + 1) % args.accumulate == 0:
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        if dist.get_rank() == 0:
            rate = len(loader) * args.batch_size * dist.get_world_size() / (time.time() - begin)
            told = f"epoch {epoch}: loss {loss.item() * args.accumulate:.4f}"
            print(f"{told}, {rate:.0f} samples/s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
