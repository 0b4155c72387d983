"""Saves a checkpoint every five steps to where the real training keeps its own."""

import os

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
os.makedirs("out", exist_ok=True)
data = TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
for step, (x, y) in enumerate(DataLoader(data, batch_size=16)):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
    if step % 5 == 0:
        torch.save({"step": step, "model": net.state_dict()}, "out/ckpt.pt")
