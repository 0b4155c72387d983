"""Trains where torchrun starts it; fails after that in the way that it is asked for."""

import os
import sys

import torch

print("begins")
at_once, *_ = sys.argv[1:] or ["at once"]
rank = os.environ["RANK"] if at_once == "at once" else ""
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net(torch.randn(8, 4)).sum().backward()
optimizer.step()
print("trained as rank", rank or os.environ["RANK"])
