"""Fully connected layers on random vectors: the smallest job that has many gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

from perfsearch.workloads.base import Job
from perfsearch.workloads.data import VectorDataset
from perfsearch.workloads.spec import WorkloadSpec

SIZES = {
    "tiny": {"layers": 4, "width": 256, "inputs": 64},
    "small": {"layers": 8, "width": 2048, "inputs": 1024},
}


class MLP(nn.Module):  # type: ignore[misc]
    """``layers`` hidden layers of ``width``, one output."""

    def __init__(self, layers: int, width: int, inputs: int) -> None:
        super().__init__()
        self.enter = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.leave = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, inputs) to (batch, 1)."""
        x = functional.relu(self.enter(x))
        for block in self.blocks:
            x = functional.relu(block(x))
        out: torch.Tensor = self.leave(x)
        return out


def squared_error(model: nn.Module, batch: Any) -> torch.Tensor:
    """Mean squared error of a batch of vectors and targets."""
    vectors, targets = batch
    return functional.mse_loss(model(vectors).float(), targets)


def build(spec: WorkloadSpec, seed: int) -> Job:
    """The job; weights come from torch's generator as it stands, data from ``seed``."""
    shape = {**SIZES[spec.size], **spec.chosen}
    model = MLP(**shape)
    return Job(
        model=model,
        data=VectorDataset(shape["inputs"], seed),
        loss=squared_error,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        flops_per_sample=6.0 * sum(p.numel() for p in model.parameters()),
        autocast_dtype={"cuda": torch.bfloat16},
        blocks=list(model.blocks),
    )
