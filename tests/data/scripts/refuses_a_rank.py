"""Trains in one process; where it has a rank it wants GPUs, which there are not."""

import os
import sys

import torch

if "RANK" in os.environ:
    sys.exit(f"rank {os.environ['RANK']} has no GPU")
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    net(torch.randn(8, 4)).sum().backward()
    optimizer.step()
print("trained", *sys.argv[1:])
