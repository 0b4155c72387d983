"""Jobs of which the truth is known, as factories for ``workload=custom``."""

from __future__ import annotations

import os
import time

import torch
from torch import nn

from perfsearch.workloads.base import Job


class Vectors(torch.utils.data.Dataset[torch.Tensor]):  # type: ignore[misc]
    """Random vectors, drawn once."""

    def __init__(self, width: int) -> None:
        self._rows = torch.randn(256, width, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._rows[index]


def _square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def _sgd(parameters):  # type: ignore[no-untyped-def]
    return torch.optim.SGD(parameters, lr=1e-4)


def sleeping() -> Job:
    """A loader that sleeps ``BENCHMARK_SLEEP_MS`` for each batch."""
    seconds = float(os.environ["BENCHMARK_SLEEP_MS"]) / 1e3

    def collate(rows: list[torch.Tensor]) -> torch.Tensor:
        time.sleep(seconds)
        return torch.stack(rows)

    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    return Job(model, Vectors(256), _square, _sgd, collate=collate)


def wide() -> Job:
    """4 MiB of gradients, and computing that takes 100 ms however busy the machine is."""

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(0.1)
        return _square(model, batch)

    layers = [nn.Linear(512, 512, bias=False) for _ in range(4)]
    return Job(nn.Sequential(*layers), Vectors(512), loss, _sgd)


def asking() -> Job:
    """A loss whose value is asked for in every step."""

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        value = _square(model, batch)
        value.item()
        return value

    layers = [nn.Linear(4096, 4096, bias=False) for _ in range(8)]
    return Job(nn.Sequential(*layers), Vectors(4096), loss, _sgd)
