"""A second model for memory predictions: gated feed-forwards, RMS norms, fewer keys than queries.

After Llama (Touvron et al. 2023), on the built-in tokens; nothing is tied. About 0.7 billion
parameters on a GPU; a small one on a CPU, to try the benchmark itself.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import nn

from perfsearch.workloads.base import Job
from perfsearch.workloads.data import TokenDataset
from perfsearch.workloads.gpt import next_token_loss

SEQUENCE = 1024


class Block(nn.Module):
    """Attention with grouped keys, then a gated feed-forward, each behind a norm."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        size = width // heads
        self.norm_attention = nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, groups * size, bias=False)
        self.value = nn.Linear(width, groups * size, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.norm_feedforward = nn.RMSNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.expand = nn.Linear(width, hidden, bias=False)
        self.contract = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, sequence, width) to the same shape."""
        batch, length, width = x.shape
        normed = self.norm_attention(x)
        query = self.query(normed).view(batch, length, self.heads, -1).transpose(1, 2)
        repeat = self.heads // self.groups
        key, value = (
            layer(normed)
            .view(batch, length, self.groups, -1)
            .transpose(1, 2)
            .repeat_interleave(repeat, dim=1)
            for layer in (self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        normed = self.norm_feedforward(x)
        return x + self.contract(functional.silu(self.gate(normed)) * self.expand(normed))


class Model(nn.Module):
    """Embedding, blocks, and a head of its own."""

    def __init__(
        self, layers: int, width: int, heads: int, groups: int, hidden: int, vocabulary: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, groups, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map token numbers (batch, sequence) to logits (batch, sequence, vocabulary)."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _job(model: Model, sequence: int, vocabulary: int) -> Job:
    return Job(
        model=model,
        data=TokenDataset(sequence, vocabulary, 0),
        loss=next_token_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4, weight_decay=0.1),
        tokens_per_sample=sequence,
        autocast_dtype={"cuda": torch.bfloat16},
        blocks=list(model.blocks),
    )


def build() -> Job:
    """The model that is measured."""
    return _job(Model(24, 1536, 16, 4, 4096, 32_000), SEQUENCE, 32_000)


def build_tiny() -> Job:
    """A small one of the same kind."""
    return _job(Model(2, 64, 4, 2, 128, 256), 32, 256)
