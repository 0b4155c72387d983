"""Jobs of the SOAP benchmark, as factories: ``workload=custom workload.factory=_soap_jobs:NAME``.

``SOAP_BENCH_SCALE=small`` makes them small enough for CPUs, to try the benchmark out.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, default_collate

from perfsearch.workloads.base import Job

SMALL = os.environ.get("SOAP_BENCH_SCALE") == "small"
SAMPLES = 1 << 15
ROWS = 1000 if SMALL else 1_000_000
WIDE = 256 if SMALL else 8192
NARROW = 64 if SMALL else 256


class Drawn(Dataset[Any]):
    """Samples drawn beforehand; a whole batch is cut out at once, which costs almost nothing."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)

    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, ...]:
        chosen = torch.as_tensor(indices)
        return tuple(tensor[chosen] for tensor in self.tensors)


def collate(samples: Any) -> Any:
    """Batches are cut out whole; single samples are put together."""
    return samples if isinstance(samples, tuple) else default_collate(samples)


def layers(sizes: Sequence[int]) -> nn.Sequential:
    made: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        made += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*made[:-1])


class Dlrm(nn.Module):
    """FlexFlow's: 8 tables of 1,000,000 x 64, bottom 64-512-512-64, top 576-1024-1024-1024-1."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, 64, sparse=sparse) for _ in range(8))
        self.bottom = layers([64, 512, 512, 64])
        self.top = layers([576, 1024, 1024, 1024, 1])

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Map (batch, 64) and (batch, 8) to (batch, 1)."""
        vectors = [self.bottom(dense), *(t(rows[:, i]) for i, t in enumerate(self.tables))]
        return self.top(torch.cat(vectors, 1))


def mse(model: nn.Module, batch: Any) -> torch.Tensor:
    *inputs, wanted = batch
    return functional.mse_loss(model(*inputs), wanted)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def _dlrm(sparse: bool) -> Job:
    generator = torch.Generator().manual_seed(1)
    data = Drawn(
        torch.randn(SAMPLES, 64, generator=generator),
        torch.randint(0, ROWS, (SAMPLES, 8), generator=generator),
        torch.rand(SAMPLES, 1, generator=generator),
    )
    return Job(Dlrm(sparse), data, mse, sgd, collate=collate)


def dlrm() -> Job:
    """With dense gradients of the tables, as FlexFlow has them."""
    return _dlrm(False)


def dlrm_sparse() -> Job:
    """The same with sparse gradients."""
    return _dlrm(True)


def wide() -> Job:
    """Fully connected layers whose weights outweigh their activations by far."""
    generator = torch.Generator().manual_seed(1)
    model = layers([WIDE] * 5 + [16])
    data = Drawn(
        torch.randn(4096, WIDE, generator=generator), torch.rand(4096, 16, generator=generator)
    )
    return Job(model, data, mse, sgd, collate=collate)


class Convolutions(nn.Module):
    """Few weights, many activations: what data parallelism is for."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [3, NARROW // 4, NARROW // 2, NARROW // 2, NARROW]
        self.body = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU())
                for a, b in itertools.pairwise(sizes)
            )
        )
        self.head = nn.Linear(sizes[-1], 16)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map (batch, 3, height, width) to (batch, 16)."""
        return self.head(self.body(images).mean((2, 3)))


def convolutions() -> Job:
    """Images of 32 x 32."""
    generator = torch.Generator().manual_seed(1)
    side = 8 if SMALL else 32
    data = Drawn(
        torch.randn(4096, 3, side, side, generator=generator),
        torch.rand(4096, 16, generator=generator),
    )
    return Job(Convolutions(), data, mse, sgd, collate=collate)


class Vit(nn.Module):
    """A small vision transformer, with a class token: each layer a pair of Megatron's kind."""

    def __init__(self) -> None:
        super().__init__()
        width, depth = (128, 2) if SMALL else (768, 6)
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.blocks = nn.ModuleList(_Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 16)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map (batch, 3, height, width) to (batch, 16)."""
        value = self.patches(images).flatten(2).transpose(1, 2)
        value = torch.cat([self.token.expand(len(value), -1, -1), value], 1)
        for block in self.blocks:
            value = block(value)
        return self.head(value[:, 0])


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Of (batch, positions, width)."""
        batch, count, width = value.shape
        heads = self.heads(self.first(value)).view(batch, count, 3, -1, 64 if width > 128 else 32)
        query, key, values = (part.transpose(1, 2) for part in heads.unbind(2))
        mixed = functional.scaled_dot_product_attention(query, key, values)
        value = value + self.join(mixed.transpose(1, 2).reshape(batch, count, width))
        return value + self.narrow(functional.gelu(self.wide(self.second(value))))


def vit() -> Job:
    """Images of 64 x 64, in 64 patches."""
    generator = torch.Generator().manual_seed(1)
    data = Drawn(
        torch.randn(1024, 3, 64, 64, generator=generator), torch.rand(1024, 16, generator=generator)
    )
    return Job(Vit(), data, mse, sgd, collate=collate)
