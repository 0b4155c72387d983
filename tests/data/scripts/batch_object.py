"""A batch is an object of the script's own, of which no tensor's first dimension is the samples."""

from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader


@dataclass
class Graphs:
    x: torch.Tensor
    graph: torch.Tensor
    y: torch.Tensor

    def __len__(self):
        return len(self.y)


def graph(i):
    g = torch.Generator().manual_seed(i)
    n = int(torch.randint(8, 28, (1,), generator=g))
    return torch.randn(n, 32, generator=g), i % 2


def together(items):
    sizes = torch.tensor([len(x) for x, _ in items])
    return Graphs(
        torch.cat([x for x, _ in items]),
        torch.repeat_interleave(sizes),
        torch.tensor([y for _, y in items]),
    )


torch.manual_seed(0)
body, head = torch.nn.Linear(32, 64), torch.nn.Linear(64, 2)
optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=1e-3)
for _ in range(10):
    for b in DataLoader([graph(i) for i in range(512)], batch_size=32, collate_fn=together):
        pooled = torch.zeros(len(b), 64).index_add(0, b.graph, body(b.x).relu())
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(head(pooled), b.y).backward()
        optimizer.step()
