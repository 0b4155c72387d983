"""A Lightning module under DDP; Lightning finds the ranks that torchrun has started.

torchrun --nproc-per-node 2 examples/scripts/lightning_train.py --devices 2 --steps 50
perfsearch-run --search --nproc-per-node 2 examples/scripts/lightning_train.py \
        --devices 2 --steps 1000000
"""

# ruff: noqa: D101, D102, D103

import argparse

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, width),
            torch.nn.ReLU(), torch.nn.Linear(width, 1),
        )  # fmt: skip

    def training_step(self, batch, number):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.net(inputs), targets)
        self.last_loss = loss.detach()
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--width", type=int, default=256)
    args = parser.parse_args()

    lightning.seed_everything(0)
    data = TensorDataset(torch.randn(4096, 64), torch.randn(4096, 1))
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=args.devices,
        strategy="ddp",
        max_steps=args.steps,
        accumulate_grad_batches=args.accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Regression(args.width)
    trainer.fit(module, DataLoader(data, args.batch_size, shuffle=True))
    if trainer.is_global_zero:
        print(f"loss {module.last_loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
