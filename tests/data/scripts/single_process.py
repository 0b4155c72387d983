"""A script for one process: no process group, no wrapper."""

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in DataLoader(
    TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,))), batch_size=16
):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
