"""Reads its rank, and yet each rank trains alone."""

import os

import torch

torch.manual_seed(int(os.environ["RANK"]))
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(100_000):
    optimizer.zero_grad()
    net(torch.randn(8, 4)).sum().backward()
    optimizer.step()
