"""The same batches and random numbers once more: what lets the same steps be trained again."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

_COPIED = "_perfsearch_copied"

_WATCHED = 4
"""Forward passes that are watched; each takes a tenth of a millisecond more."""


def pinned_bytes_of(batch: Any) -> list[int]:
    """Bytes of each tensor of a batch that lies in pinned memory of the host."""
    if not torch.cuda.is_initialized():
        return []
    sizes: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_pinned():
            sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    copy_structure(batch, note)
    return sizes


def reserve_pinned(sizes: Sequence[int]) -> None:
    """Have torch's allocator of pinned memory hold free blocks of these sizes in bytes.

    A block that a script lets go is used for a later batch; one that is kept is not, and a new one
    comes from the driver (``cudaHostAlloc``): 20 ms for 32 MiB on an H200, in the thread that pins,
    during which the driver launches no kernels of the step either. So what is going to be kept is
    replaced at once, before any step is scored.
    """
    held = []
    with contextlib.suppress(RuntimeError):  # no more can be pinned: as without this
        for size in sizes:
            held.append(torch.empty(size, dtype=torch.uint8, pin_memory=True))


class BatchTape:
    """Keeps the first batches; once rewound, gives them again in place of what the loader gives.

    The loader goes on working, so that its cost stays in what is measured. What lies between two
    batches depends on where an epoch ends, which the second time is another place: a loader that
    begins anew draws random numbers, so that those that followed a batch are kept with it; and a
    round of validation takes batches of its own, so that each dataset gets back its own only.

    Args:
        most: batches to keep.
        most_bytes: bytes to keep.
        most_compared_bytes: bytes to keep while steps are compared, which all need their batches.
        pinned: sizes in bytes of a batch's tensors that lie in pinned memory.
        reserve: has pinned blocks of these sizes in bytes ready.

    Attributes:
        compares: whether losses of the steps to come are compared. Random numbers are kept with
            their batches, which takes a tenth of a millisecond.

    """

    def __init__(
        self,
        most: int = 64,
        most_bytes: int = 256 * 2**20,
        most_compared_bytes: int = 2 * 2**30,
        pinned: Callable[[Any], list[int]] = pinned_bytes_of,
        reserve: Callable[[list[int]], None] = reserve_pinned,
    ) -> None:
        self.compares = True
        self._pinned = pinned
        self._reserve = reserve
        self._most = most
        self._most_bytes = most_bytes
        self._most_compared_bytes = most_compared_bytes
        self._bytes = 0
        self._kept: list[_Record] = []
        self._full = False
        self._to_give: list[_Record] | None = None
        self._to_skip = 0

    @property
    def kept(self) -> int:
        """How many batches it holds."""
        return len(self._kept)

    def shapes(self) -> int:
        """How many shapes the batches have that it holds."""
        found: set[tuple[torch.Size, ...]] = set()
        for record in self._kept:
            shapes: list[torch.Size] = []
            copy_structure(record.batch, partial(_note_shape, shapes))
            found.add(tuple(shapes))
        return len(found)

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
                return copy_structure(record.batch, give_tensor)
        return batch

    def _keep(self, batch: Any, dataset: Any) -> None:
        most_bytes = self._most_compared_bytes if self.compares else self._most_bytes
        size = bytes_of(batch)
        if self._full or len(self._kept) >= self._most or self._bytes + size > most_bytes:
            self._full = True
            return
        if not self._kept:
            to_come = min(self._most, self._most_bytes // max(1, size))
            self._reserve(self._pinned(batch) * to_come)
        self._bytes += size
        try:
            still_there = weakref.ref(dataset)
        except TypeError:  # a list, say
            still_there = None
        random = RandomState.now() if self.compares else None
        self._kept.append(
            _Record(
                copy_structure(batch, keep_tensor),
                id(dataset),
                _kind(dataset),
                still_there,
                random,
            )
        )


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


def _note_shape(shapes: list[torch.Size], tensor: torch.Tensor) -> torch.Tensor:
    shapes.append(tensor.shape)
    return tensor


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
class RandomState:
    """Where every global generator of a process stands.

    Attributes:
        host: torch's on the CPU.
        device: torch's on the current GPU; ``None`` where none is in use.
        python: that of ``random``.
        of_numpy: numpy's global one; ``None`` where numpy is not imported.

    """

    host: torch.Tensor
    device: torch.Tensor | None
    python: tuple[Any, ...]
    of_numpy: tuple[Any, ...] | None

    @classmethod
    def now(cls) -> RandomState:
        """Where they stand now; nothing is drawn."""
        numpy = sys.modules.get("numpy")
        return cls(
            torch.get_rng_state(),
            torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
            random.getstate(),
            numpy.random.get_state() if numpy is not None else None,
        )

    def restore(self) -> None:
        """Have the process draw from here on what it drew from here before."""
        torch.set_rng_state(self.host)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device)
        random.setstate(self.python)
        if self.of_numpy is not None:
            sys.modules["numpy"].random.set_state(self.of_numpy)

    def torch_drew(self, later: RandomState) -> bool:
        """Whether one of torch's generators has moved on until a later point."""
        both = self.device is not None and later.device is not None
        on_device = both and not torch.equal(self.device, later.device)  # type: ignore[arg-type]
        return on_device or not torch.equal(self.host, later.host)

    def is_same(self, other: RandomState) -> bool:
        """Whether nothing was drawn between the two, a GPU's generator apart."""
        return (
            torch.equal(self.host, other.host)
            and self.python == other.python
            and repr(self.of_numpy) == repr(other.of_numpy)
        )


class ForwardDraws:
    """Whether forward passes draw random numbers of torch, as dropout does; seen in the first ones.

    Attributes:
        draws: what was seen; ``None``: no forward pass yet.

    """

    def __init__(self) -> None:
        self.draws: bool | None = None
        self._left = _WATCHED
        self._before: RandomState | None = None

    def begin(self) -> None:
        """Note that what is drawn from here on belongs to the forward pass."""
        if self._left:
            self._before = RandomState.now()

    def end(self) -> None:
        """Note that it has ended, if one had begun."""
        before, self._before = self._before, None
        if before is not None:
            self._left -= 1
            self.draws = bool(self.draws) or before.torch_drew(RandomState.now())


# -----------------------------------------------------------------------------
# Copies of a batch: the containers always, its tensors where they do not last.


def keep_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What to keep of a tensor: a copy, if it lies in memory that is shared with a worker."""
    if tensor.is_cuda or not tensor.is_shared():
        return tensor
    copied = tensor.clone()
    setattr(copied, _COPIED, True)
    return copied


def give_tensor(kept: torch.Tensor) -> torch.Tensor:
    """What to give of a kept tensor: again a copy of one that was copied, as from a worker.

    So a script that changes its batches in place does not change what is kept.
    """
    return kept.clone() if hasattr(kept, _COPIED) else kept


def copy_structure(batch: Any, of_tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """New containers around what ``of_tensor`` makes of each tensor."""
    if isinstance(batch, torch.Tensor):
        return of_tensor(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(copy_structure(part, of_tensor) for part in batch))
    if type(batch) in (list, tuple):
        return type(batch)(copy_structure(part, of_tensor) for part in batch)
    if isinstance(batch, list | MutableMapping):
        return _filled_copy(batch, of_tensor)
    return batch


def _filled_copy(batch: Any, of_tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of a container whose constructor may want other arguments, as ``defaultdict``'s.

    One that cannot be copied so, as it is locked, stays what it is.
    """
    parts = list(batch.items()) if isinstance(batch, MutableMapping) else list(enumerate(batch))
    try:
        copied = copy.copy(batch)
        for place, part in parts:
            copied[place] = copy_structure(part, of_tensor)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return batch
    return copied
