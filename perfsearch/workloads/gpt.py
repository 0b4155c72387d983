"""A decoder-only language model in the sizes of GPT-2 (Radford et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as functional
from torch import nn

from perfsearch.workloads.base import Job
from perfsearch.workloads.data import TokenDataset
from perfsearch.workloads.spec import WorkloadSpec


@dataclass(frozen=True)
class Shape:
    """Dimensions of the model."""

    layers: int
    width: int
    heads: int
    vocabulary: int = 50_257
    sequence_length: int = 1024


SIZES = {
    "tiny": Shape(2, 128, 4, vocabulary=512, sequence_length=64),
    "small": Shape(12, 768, 12),
    "medium": Shape(24, 1024, 16),
    "large": Shape(36, 1280, 20),
}


class Linear(nn.Linear):  # type: ignore[misc]
    """Without torch's own initial values, which would only be drawn to be drawn anew."""

    def reset_parameters(self) -> None:
        """Leave the values to ``GPT``."""


class Embedding(nn.Embedding):  # type: ignore[misc]
    """The same for embeddings."""

    def reset_parameters(self) -> None:
        """Leave the values to ``GPT``."""


class Block(nn.Module):  # type: ignore[misc]
    """Attention and feed-forward, each behind a layer norm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = Linear(width, 3 * width)
        self.project = Linear(width, width)
        self.norm_feedforward = nn.LayerNorm(width)
        self.expand = Linear(width, 4 * width)
        self.contract = Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, sequence, width) to the same shape."""
        batch, length, width = x.shape
        heads = self.query_key_value(self.norm_attention(x))
        heads = heads.view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        hidden = functional.gelu(self.expand(self.norm_feedforward(x)), approximate="tanh")
        return x + self.contract(hidden)


class GPT(nn.Module):  # type: ignore[misc]
    """Token and position embeddings, blocks, and a head tied to the token embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = Embedding(shape.vocabulary, shape.width)
        self.positions = Embedding(shape.sequence_length, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, module in self.named_modules():  # each weight is drawn once
            if isinstance(module, nn.Linear | nn.Embedding) and module is not self.head:
                # residual branches add up over the depth
                added = name.endswith((".project", ".contract"))
                nn.init.normal_(module.weight, std=0.02 / (2 * shape.layers if added else 1) ** 0.5)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map token numbers (batch, sequence) to logits (batch, sequence, vocabulary)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def next_token_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each token given those before it, in float32."""
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def shape_of(spec: WorkloadSpec) -> Shape:
    """The size's dimensions, with those that the user set."""
    shape = replace(SIZES[spec.size], **spec.chosen)
    if shape.width % shape.heads:
        raise ValueError(
            f"workload.width={shape.width}: must be a multiple of workload.heads={shape.heads}"
        )
    return shape


def build(spec: WorkloadSpec, seed: int) -> Job:
    """The job; weights come from torch's generator as it stands, data from ``seed``."""
    shape = shape_of(spec)
    model = GPT(shape)
    parameters = sum(p.numel() for p in model.parameters())
    # 6 operations a parameter and token, and attention's products (Chowdhery et al. 2022, app. B)
    per_token = 6 * parameters + 12 * shape.layers * shape.width * shape.sequence_length
    return Job(
        model=model,
        data=TokenDataset(shape.sequence_length, shape.vocabulary, seed),
        loss=next_token_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4, weight_decay=0.1),
        tokens_per_sample=shape.sequence_length,
        flops_per_sample=float(per_token * shape.sequence_length),
        autocast_dtype={"cuda": torch.bfloat16},
        blocks=list(model.blocks),
    )
