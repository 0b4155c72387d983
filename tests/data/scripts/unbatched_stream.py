"""Batches by hand what a stream gives sample by sample: the loader has no batch size."""

import torch
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        for _ in range(4000):
            yield torch.randn(32, generator=generator), torch.randn(1, generator=generator)


torch.manual_seed(0)
net = torch.nn.Linear(32, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
held = []
for _ in range(5):
    for sample in DataLoader(Stream(), batch_size=None):
        held.append(sample)
        if len(held) == 16:
            x, y = (torch.stack(part) for part in zip(*held, strict=True))
            held = []
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
