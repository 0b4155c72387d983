"""A small network of repeated blocks; it says what torch has found compiled."""

import json
import os
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(64)
        self.wide = torch.nn.Linear(64, 128)
        self.narrow = torch.nn.Linear(128, 64)

    def forward(self, x):
        return x + self.narrow(torch.nn.functional.gelu(self.wide(self.norm(x))))


torch.manual_seed(0)
net = torch.nn.Sequential(Block(), Block(), Block(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in DataLoader(
    TensorDataset(torch.randn(16384, 64), torch.randint(0, 10, (16384,))), batch_size=16
):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None and "SAY_COUNTERS" in os.environ:
        with open(os.environ["SAY_COUNTERS"], "w") as file:
            json.dump(dict(dynamo.counters["inductor"]), file)
