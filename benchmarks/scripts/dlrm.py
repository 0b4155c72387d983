"""A DLRM: embedding tables and two MLPs, on clicks that a DataLoader collates one by one.

python dlrm.py --steps 200
python dlrm.py --steps 200 --workers 8 --pin-memory --optimizer fused
"""

import argparse
import contextlib
import itertools
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Clicks(Dataset):
    def __init__(self, count, numbers, tables, rows):
        self.numbers = torch.rand(count, numbers)
        self.categories = torch.randint(rows, (count, tables))
        self.clicked = torch.randint(2, (count,)).float()

    def __len__(self):
        return len(self.clicked)

    def __getitem__(self, index):
        return self.numbers[index], self.categories[index], self.clicked[index]


def mlp(*widths):
    layers = []
    for inside, outside in itertools.pairwise(widths):
        layers += [nn.Linear(inside, outside), nn.ReLU()]
    return nn.Sequential(*layers)


class DLRM(nn.Module):
    def __init__(self, numbers, tables, rows, width):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = mlp(numbers, 512, 256, width)
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(mlp(width + pairs, 1024, 1024, 512, 256), nn.Linear(256, 1))
        self.register_buffer("pairs", torch.triu_indices(tables + 1, tables + 1, 1))

    def forward(self, numbers, categories):
        dense = self.bottom(numbers)
        rows = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        both = torch.stack([dense, *(row.to(dense.dtype) for row in rows)], 1)
        products = torch.bmm(both, both.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([dense, products], 1)).squeeze(1)


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--clicks", type=int, default=500_000)
    parser.add_argument("--numbers", type=int, default=13)
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pin-memory", action="store_true")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--compile", metavar="MODE", help="default, max-autotune, reduce-overhead")
    parser.add_argument("--optimizer", choices=("default", "foreach", "fused"), default="default")
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bf16 = torch.autocast(device.type, torch.bfloat16)
    autocast = bf16 if args.bf16 else contextlib.nullcontext()
    if args.tf32:
        torch.set_float32_matmul_precision("high")

    data = Clicks(args.clicks, args.numbers, args.tables, args.rows)
    loader = DataLoader(
        data, args.batch_size, shuffle=True, num_workers=args.workers, drop_last=True,
        pin_memory=args.pin_memory,
    )  # fmt: skip
    model = DLRM(args.numbers, args.tables, args.rows, args.width).to(device)
    if args.compile:
        model = torch.compile(model, mode=args.compile)
    walk = {} if args.optimizer == "default" else {args.optimizer: True}
    optimizer = torch.optim.Adam(model.parameters(), args.lr, **walk)

    step, half, begin = 0, args.steps // 2, 0.0
    while step < args.steps:
        for batch in loader:
            if step == half:
                synchronize(device)
                begin = time.perf_counter()
            numbers, categories, clicked = (x.to(device, non_blocking=True) for x in batch)
            with autocast:
                scores = model(numbers, categories)
            loss = F.binary_cross_entropy_with_logits(scores.float(), clicked)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 50 == 0:
                print(f"step {step}: loss {loss.item():.4f}", flush=True)
            if step == args.steps:
                synchronize(device)
                seconds = time.perf_counter() - begin
                break
    rate = (args.steps - half) * args.batch_size / seconds
    print(f"throughput: {rate:.2f} samples/s over the last {args.steps - half} steps")


if __name__ == "__main__":
    main()
