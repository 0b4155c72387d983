"""Trains in processes that it forks, and makes no step itself."""

import multiprocessing

import torch


def train():
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(100_000):
        optimizer.zero_grad()
        net(torch.randn(8, 4)).sum().backward()
        optimizer.step()


children = [multiprocessing.get_context("fork").Process(target=train) for _ in range(2)]
for child in children:
    child.start()
for child in children:
    child.join()
