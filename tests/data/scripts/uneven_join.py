"""Ranks with uneven inputs, in ``model.join()``; it needs the variables that torchrun sets."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
size = 480 + 64 * dist.get_rank()
data = TensorDataset(torch.randn(size, 32), torch.randn(size, 1))
model = DistributedDataParallel(torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(60):
    with model.join():
        for x, y in DataLoader(data, batch_size=16):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
dist.destroy_process_group()
