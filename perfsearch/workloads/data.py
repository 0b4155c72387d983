"""Datasets that are made on the spot: the same samples for the same seed, on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

SAMPLES = 4096


class TokenDataset(Dataset[torch.Tensor]):  # type: ignore[misc]
    """Sequences of random tokens, one longer than the model reads, so that targets are inside.

    Args:
        sequence_length: tokens that the model reads.
        vocabulary: number of different tokens.
        seed: of the tokens.
        samples: number of sequences.

    """

    def __init__(
        self, sequence_length: int, vocabulary: int, seed: int, samples: int = SAMPLES
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._length = sequence_length
        self._samples = samples
        self._tokens = torch.randint(
            vocabulary, (samples * sequence_length + 1,), generator=generator, dtype=torch.int32
        )

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * self._length
        return self._tokens[start : start + self._length + 1].long()


class ImageDataset(Dataset[tuple[torch.Tensor, int]]):  # type: ignore[misc]
    """Random images of three channels with a class each; a sample depends on its index alone."""

    def __init__(self, image_size: int, classes: int, seed: int, samples: int = SAMPLES) -> None:
        self._shape = (3, image_size, image_size)
        self._classes = classes
        self._seed = seed
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(self._seed * SAMPLES + index)
        return torch.randn(self._shape, generator=generator), index % self._classes


class VectorDataset(Dataset[tuple[torch.Tensor, torch.Tensor]]):  # type: ignore[misc]
    """Random vectors and a number each that a random linear map gives them."""

    def __init__(self, inputs: int, seed: int, samples: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._vectors = torch.randn(samples, inputs, generator=generator)
        weights = torch.randn(inputs, 1, generator=generator)
        self._targets = self._vectors @ weights / inputs**0.5

    def __len__(self) -> int:
        return len(self._vectors)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._vectors[index], self._targets[index]


class ClickDataset(Dataset[Any]):  # type: ignore[misc]
    """Dense features, one row number for each table, and whether it was clicked."""

    def __init__(
        self, dense: int, tables: int, rows: int, seed: int, samples: int = 4 * SAMPLES
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._dense = torch.randn(samples, dense, generator=generator)
        self._rows = torch.randint(rows, (samples, tables), generator=generator)
        self._clicks = torch.randint(2, (samples,), generator=generator).float()

    def __len__(self) -> int:
        return len(self._clicks)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._dense[index], self._rows[index], self._clicks[index]
