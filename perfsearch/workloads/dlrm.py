"""A recommendation model: embedding tables, pairwise interactions (Naumov et al. 2019)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

from perfsearch.workloads.base import Job
from perfsearch.workloads.data import ClickDataset
from perfsearch.workloads.spec import WorkloadSpec

DENSE_FEATURES = 13

SIZES = {
    "tiny": {"tables": 8, "rows": 1000, "embedding_width": 16},
    "small": {"tables": 26, "rows": 100_000, "embedding_width": 64},
}


class DLRM(nn.Module):  # type: ignore[misc]
    """Dense features and table rows of one width, all pairs multiplied, one logit."""

    def __init__(self, tables: int, rows: int, embedding_width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, embedding_width) for _ in range(tables))
        self.bottom = _layers(DENSE_FEATURES, 8 * embedding_width, embedding_width)
        pairs = (tables + 1) * tables // 2
        self.top = _layers(embedding_width + pairs, 16 * embedding_width, 1)
        lower = torch.tril_indices(tables + 1, tables + 1, offset=-1)
        self.register_buffer("pairs", lower, persistent=False)

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Map (batch, features) and (batch, tables) to logits (batch,)."""
        bottom = self.bottom(dense)
        vectors = [bottom] + [table(rows[:, i]) for i, table in enumerate(self.tables)]
        stacked = torch.stack([v.to(bottom.dtype) for v in vectors], dim=1)
        products = stacked @ stacked.transpose(1, 2)
        crossed = products[:, self.pairs[0], self.pairs[1]]
        logits: torch.Tensor = self.top(torch.cat([bottom, crossed], dim=1)).squeeze(1)
        return logits


def _layers(inputs: int, width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, outputs),
    )


def click_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Binary cross-entropy of whether it was clicked."""
    dense, rows, clicks = batch
    return functional.binary_cross_entropy_with_logits(model(dense, rows).float(), clicks)


def build(spec: WorkloadSpec, seed: int) -> Job:
    """The job; weights come from torch's generator as it stands, data from ``seed``."""
    shape = {**SIZES[spec.size], **spec.chosen}
    model = DLRM(**shape)
    return Job(
        model=model,
        data=ClickDataset(DENSE_FEATURES, shape["tables"], shape["rows"], seed),
        loss=click_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        autocast_dtype={"cuda": torch.bfloat16},
        blocks=[*model.tables, model.bottom, model.top],
    )
