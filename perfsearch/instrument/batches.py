"""What is in a batch, and a tape of batches that can be played again."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from perfsearch.instrument.copies import copy_structure, give, keep
from perfsearch.instrument.generators import RandomState

_LENGTH_MASKS = ("attention_mask", "mask", "padding_mask")
_TOKENS = ("input_ids", "tokens", "input")


def count(batch: Any) -> tuple[int, int]:
    """Samples and tokens of a batch; 0 tokens where it holds no sequences of whole numbers.

    Tokens are those that an attention mask counts, where there is one; else all of them.
    """
    first = _first_tensor(batch)
    if first is None:
        return 0, 0
    samples = first.shape[0] if first.dim() else 1
    if not isinstance(batch, torch.Tensor) and isinstance(batch, Mapping):
        return samples, _tokens(batch)
    return samples, first.numel() if _is_text(first) else 0


def _tokens(batch: Mapping[Any, Any]) -> int:
    for name in _LENGTH_MASKS:
        mask = batch.get(name)
        if isinstance(mask, torch.Tensor) and mask.dim() == 2 and not mask.is_floating_point():
            return int(mask.count_nonzero())
    for name in _TOKENS:
        if _is_text(batch.get(name)):
            return int(batch[name].numel())
    return 0


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


def bytes_of(batch: Any) -> int:
    """Bytes of the tensors in a batch."""
    if isinstance(batch, torch.Tensor):
        return int(batch.numel() * batch.element_size())
    if isinstance(batch, Mapping):
        return sum(bytes_of(part) for part in batch.values())
    if isinstance(batch, list | tuple):
        return sum(bytes_of(part) for part in batch)
    return 0


def _kind(dataset: Any) -> tuple[type, int | None]:
    """What a dataset shares with the one that takes its place in a later epoch."""
    try:
        return type(dataset), len(dataset)
    except TypeError:  # one that is only iterated over
        return type(dataset), None


@dataclass(frozen=True)
class _Record:
    """A batch of a tape.

    Attributes:
        batch: as the script was given it.
        dataset: identity of what it was loaded from.
        kind: type and length of that.
        still_there: refers to that; ``None`` where its type allows no such reference.
        random: what the process drew from next; ``None``: not kept.

    """

    batch: Any
    dataset: int
    kind: tuple[type, int | None]
    still_there: weakref.ref[Any] | None
    random: RandomState | None

    def is_of(self, dataset: Any) -> bool:
        """Whether it stands for a batch of ``dataset``, or of one that this has replaced."""
        if self.still_there is None or self.still_there() is not None:
            return self.dataset == id(dataset)
        return self.kind == _kind(dataset)


class BatchTape:
    """Keeps the first batches; once rewound, gives them again in place of what the loader gives.

    The loader goes on working, so that its cost stays in what is measured. What lies between two
    batches depends on where an epoch ends, which the second time is another place: a loader that
    begins anew draws random numbers, so that those that followed a batch are kept with it; and a
    round of validation takes batches of its own, so that each dataset gets back its own only.

    Args:
        most: batches to keep.
        most_bytes: bytes to keep.

    Attributes:
        keeps_random: whether random numbers are kept with the batches to come. It takes a tenth of
            a millisecond, so that it is for the steps that are compared.

    """

    def __init__(self, most: int = 64, most_bytes: int = 256 * 2**20) -> None:
        self.keeps_random = True
        self._most = most
        self._left = most_bytes
        self._kept: list[_Record] = []
        self._full = False
        self._to_give: list[_Record] | None = None
        self._to_skip = 0

    @property
    def kept(self) -> int:
        """How many batches it holds."""
        return len(self._kept)

    def rewind(self, place: int) -> None:
        """Go on with the batch number ``place``, the first one being 0."""
        self._to_give = self._kept[max(0, place) :]
        self._to_skip = max(0, -place)

    def pass_on(self, batch: Any, dataset: Any) -> Any:
        """Keep what a loader gave, or put a batch of the tape in its place.

        Args:
            batch: what the loader gave.
            dataset: what it loads from.

        """
        if self._to_give is None:
            self._keep(batch, dataset)
            return batch
        if self._to_skip:
            self._to_skip -= 1
            return batch
        for place, record in enumerate(self._to_give):
            if record.is_of(dataset):
                del self._to_give[place]
                if record.random is not None:
                    record.random.restore()
                return copy_structure(record.batch, give)
        return batch

    def _keep(self, batch: Any, dataset: Any) -> None:
        size = bytes_of(batch)
        if self._full or len(self._kept) >= self._most or size > self._left:
            self._full = True
            return
        self._left -= size
        try:
            still_there = weakref.ref(dataset)
        except TypeError:  # a list, say
            still_there = None
        random = RandomState.now() if self.keeps_random else None
        self._kept.append(
            _Record(
                copy_structure(batch, keep),
                id(dataset),
                _kind(dataset),
                still_there,
                random,
            )
        )
