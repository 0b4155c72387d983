"""What is in a batch, and a tape of batches that can be played again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_LENGTH_MASKS = ("attention_mask", "mask", "padding_mask")
_TOKENS = ("input_ids", "tokens", "input")


def count(batch: Any) -> tuple[int, int]:
    """Samples and tokens of a batch; 0 tokens where it holds no sequences of whole numbers.

    Tokens are those that an attention mask counts, where there is one; else all of them.
    """
    first = _first_tensor(batch)
    samples = 0 if first is None else (int(first.shape[0]) if first.dim() else 1)
    return samples, _tokens(batch)


def _tokens(batch: Any) -> int:
    if isinstance(batch, Mapping):
        for name in _LENGTH_MASKS:
            mask = batch.get(name)
            if isinstance(mask, torch.Tensor) and mask.dim() == 2 and not mask.is_floating_point():
                return int(mask.count_nonzero())
        for name in _TOKENS:
            if _is_text(batch.get(name)):
                return int(batch[name].numel())
        return 0
    first = _first_tensor(batch)
    return int(first.numel()) if first is not None and _is_text(first) else 0


def _is_text(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.dim() == 2
        and value.dtype in (torch.int64, torch.int32)
    )


def _first_tensor(batch: Any) -> torch.Tensor | None:
    if isinstance(batch, torch.Tensor):
        return batch
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        for part in batch:
            found = _first_tensor(part)
            if found is not None:
                return found
    return None


def copy_structure(batch: Any) -> Any:
    """New containers around the same tensors; those in memory shared with a worker are copied."""
    if isinstance(batch, torch.Tensor):
        return batch.clone() if batch.is_shared() and not batch.is_cuda else batch
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(copy_structure(part) for part in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(copy_structure(part) for part in batch)
    if isinstance(batch, dict):
        return type(batch)({key: copy_structure(part) for key, part in batch.items()})
    return batch


def bytes_of(batch: Any) -> int:
    """Bytes of the tensors in a batch."""
    if isinstance(batch, torch.Tensor):
        return int(batch.numel() * batch.element_size())
    if isinstance(batch, Mapping):
        return sum(bytes_of(part) for part in batch.values())
    if isinstance(batch, list | tuple):
        return sum(bytes_of(part) for part in batch)
    return 0


class BatchTape:
    """Keeps the first batches; once rewound, gives them again in place of what the loader gives.

    The loader goes on working, so that its cost stays in what is measured.

    Args:
        most: batches to keep.
        most_bytes: bytes to keep.

    """

    def __init__(self, most: int = 64, most_bytes: int = 256 * 2**20) -> None:
        self._most = most
        self._left = most_bytes
        self._kept: list[Any] = []
        self._full = False
        self._place: int | None = None

    @property
    def kept(self) -> int:
        """How many batches it holds."""
        return len(self._kept)

    def rewind(self, place: int) -> None:
        """Go on with the batch number ``place``, the first one being 0."""
        self._place = place

    def pass_on(self, batch: Any) -> Any:
        """Keep what the loader gave, or put a batch of the tape in its place."""
        if self._place is None:
            self._keep(batch)
            return batch
        place = self._place
        self._place += 1
        return copy_structure(self._kept[place]) if 0 <= place < len(self._kept) else batch

    def _keep(self, batch: Any) -> None:
        size = bytes_of(batch)
        if self._full or len(self._kept) >= self._most or size > self._left:
            self._full = True
            return
        self._left -= size
        self._kept.append(copy_structure(batch))
