"""Cuts its batches out of one long array, accumulates, and evaluates before its first step."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

p = argparse.ArgumentParser()
p.add_argument("--batch_size", type=int, default=4)
p.add_argument("--accumulate", type=int, default=4)
p.add_argument("--steps", type=int, default=100000)
a = p.parse_args()
ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    dist.init_process_group("gloo")
torch.manual_seed(1337 + (dist.get_rank() if ddp else 0))
data = torch.randint(0, 500, (1 << 18,))
net = torch.nn.Sequential(
    torch.nn.Embedding(500, 64),
    torch.nn.Linear(64, 256),
    torch.nn.GELU(),
    torch.nn.Linear(256, 500),
)
model = DistributedDataParallel(net) if ddp else net
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch():
    at = torch.randint(len(data) - 65, (a.batch_size,))
    return torch.stack([data[i : i + 64] for i in at]), torch.stack(
        [data[i + 1 : i + 65] for i in at]
    )


@torch.no_grad()
def evaluate():
    return (
        sum(
            torch.nn.functional.cross_entropy(net(x).flatten(0, 1), y.flatten())
            for x, y in (batch() for _ in range(5))
        )
        / 5
    )


for step in range(a.steps):
    if step % 50 == 0:
        evaluate()
    for micro in range(a.accumulate):
        if ddp:
            model.require_backward_grad_sync = micro == a.accumulate - 1
        x, y = batch()
        (
            torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) / a.accumulate
        ).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
if ddp:
    dist.destroy_process_group()
