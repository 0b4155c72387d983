"""Accelerate with FSDP where there are GPUs, and with DDP on the CPU.

torchrun --nproc-per-node 2 examples/scripts/accelerate_fsdp.py --steps 50
perfsearch-run --search --preset accelerate --nproc-per-node 2 \
        examples/scripts/accelerate_fsdp.py --steps 1000000
"""

# ruff: noqa: D103

import argparse

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--width", type=int, default=256)
    args = parser.parse_args()

    plugin, on_gpu = None, torch.cuda.is_available()
    if on_gpu:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True)
    accelerator = Accelerator(
        cpu=not on_gpu,
        fsdp_plugin=plugin,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
    )
    set_seed(0)
    data = TensorDataset(torch.randint(512, (4096, 64)))
    loader = DataLoader(data, args.per_device_train_batch_size, shuffle=True, drop_last=True)
    layer = torch.nn.TransformerEncoderLayer(
        args.width, 4, 4 * args.width, dropout=0.0, batch_first=True
    )
    model = torch.nn.Sequential(
        torch.nn.Embedding(512, args.width),
        torch.nn.TransformerEncoder(layer, 2),
        torch.nn.Linear(args.width, 512),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    step = 0
    while step < args.steps:
        for (tokens,) in loader:
            with accelerator.accumulate(model):
                logits = model(tokens)
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            step += accelerator.sync_gradients
            if step == args.steps:
                break
    accelerator.print(f"loss {loss.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
