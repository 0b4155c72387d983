"""DataLoader in a script: its constructor, the batches it yields, and which are trained on."""

from __future__ import annotations

import mmap
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from perfsearch.core.knob import Value
from perfsearch.instrument.parts import Parts
from perfsearch.instrument.patching import wrap
from perfsearch.instrument.phases import OTHER
from perfsearch.instrument.tape import BatchTape, ForwardDraws, RandomState
from perfsearch.knobs.base import Use
from perfsearch.knobs.loader import arguments_given, values_of
from perfsearch.metrics.slow_steps import Cause

DEFAULT_PREFETCH = 2


class Loaders:
    """Every ``DataLoader`` that the script makes from now on, and the batches it takes from them.

    Args:
        knobs: values for their constructors; those that are ``None`` or absent are left alone.

    Attributes:
        pulls: batches that were taken so far, over all loaders.
        began: when the first was asked for, by ``time.perf_counter``; ``None``: not yet.
        accounting: samples and tokens (padding apart) in those that are trained on.
        counting: whether samples, tokens and random draws are noted.
        forward: whether random numbers are drawn between a batch and the backward pass.
        mark: told ``dataloader_next`` whenever a batch has been taken, an iterator made (which
            starts worker processes) or one come to its end; ``other`` before.
        tape: keeps the batches, to give the same ones again.
        made: how many there were so far.
        parts: told how long the script waits for batches, where steps are scored.
        shared_out: whether one was iterated over that loads from an ``IterableDataset``.
        draws: whether loading drew random numbers, here or in worker processes; ``None``: unknown.

    """

    def __init__(self, knobs: Mapping[str, Value]) -> None:
        self.knobs = dict(knobs)
        self.pulls = 0
        self.began: float | None = None
        self.accounting = BatchAccounting()
        self.counting = True
        self.shared_out = False
        self.draws: bool | None = None
        self.forward = ForwardDraws()
        self.mark: Callable[[str], None] | None = None
        self.parts: Parts | None = None
        self.tape: BatchTape | None = None
        self.ignored: dict[str, str] = {}
        self.made = 0
        self._last: dict[str, Value] = {}
        self._named = NamedSamples()
        self._in_workers = WorkerDraws()
        self._iterators: weakref.WeakSet[Any] = weakref.WeakSet()
        self._undo = (
            wrap(DataLoader, "__init__", self._construct),
            wrap(DataLoader, "__iter__", self._begin),
            wrap(_BaseDataLoaderIter, "__init__", self._start),
            wrap(_BaseDataLoaderIter, "_reset", self._begin_again),
            wrap(_BaseDataLoaderIter, "_next_index", self._name),
            wrap(_BaseDataLoaderIter, "__next__", self._next),
            wrap(_MapDatasetFetcher, "fetch", self._in_workers.fetch),
            wrap(_IterableDatasetFetcher, "fetch", self._in_workers.fetch),
        )

    def _construct(
        self, original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        loader, *positional = args
        given = dict(zip(_POSITIONAL, positional, strict=False))
        given.update(kwargs)
        original(loader, **arguments_given(given, self.knobs))
        self.made += 1

    def _begin(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self.counting:
            return original(*args, **kwargs)
        if self.mark is None:
            return self._timed(original, args, kwargs)
        self.mark(OTHER)
        iterator = self._timed(original, args, kwargs)
        self.mark("dataloader_next")
        return iterator

    def _start(
        self, original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        original(*args, **kwargs)
        iterator, loader = args[0], args[1] if len(args) > 1 else kwargs["loader"]
        self._iterators.add(iterator)
        self.accounting.start(iterator, loader)
        self.shared_out |= isinstance(loader.dataset, IterableDataset)
        self._last = values_of(loader, Use.SCRIPT)  # of the loader itself often nothing is left

    def _begin_again(
        self, original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._named.forget(args[0])  # worker processes are given their first indices in it
        original(*args, **kwargs)

    def _name(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        named = original(*args, **kwargs)
        if self.counting:
            self._named.note(args[0], named)
        return named

    def _next(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self.counting:
            return original(*args, **kwargs)
        if self.mark is not None:
            self.mark(OTHER)
        if self.began is None:
            self.began = time.perf_counter()
        iterator = args[0]
        iteration = self.accounting.ask(iterator, iterator._num_yielded > 0)
        # the first batch starts samplers and workers, which draw; the second tells
        tells = self.draws is None and iterator._num_workers == 0 and iterator._num_yielded == 1
        before = RandomState.now() if tells else None
        try:
            batch = self._timed(original, args, kwargs)
        except StopIteration:
            if self.mark is not None:  # worker processes were ended
                self.mark("dataloader_next")
            raise
        if before is not None:
            self.draws = not RandomState.now().is_same(before)
        elif self.draws is None and iterator._num_workers:
            self.draws = self._in_workers.seen
        samples = self._named.samples_of(iterator, batch)
        if self.tape is not None:
            batch = self.tape.pass_on(batch, iterator._dataset)
        self.forward.begin()
        self.pulls += 1
        self.accounting.take(iteration, samples, count_tokens(batch))
        if self.mark is not None:
            self.mark("dataloader_next")
        return batch

    def _timed(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.parts is None:
            return original(*args, **kwargs)
        return self.parts.called(Cause.LOADING, original, *args, **kwargs)

    def values(self) -> dict[str, Value]:
        """What is in force in the loader that was iterated last."""
        return dict(self._last)

    def close(self) -> None:
        """End the worker processes of every iterator, and their threads."""
        for iterator in list(self._iterators):
            shutdown = getattr(iterator, "_shutdown_workers", None)
            if shutdown is not None:
                shutdown()

    def undo(self) -> None:
        """Take the wrapping away."""
        for undo in self._undo:
            undo()


_POSITIONAL = (
    "dataset",
    "batch_size",
    "shuffle",
    "sampler",
    "batch_sampler",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "drop_last",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
)


# -----------------------------------------------------------------------------
# Whether worker processes draw random numbers for the samples that they load.


class WorkerDraws:
    """Looks at the first batch of each worker process, and tells of it in memory that is shared.

    It is shared with processes that are forked; of others nothing is known.
    """

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 1)
        self._looked = False

    @property
    def seen(self) -> bool | None:
        """Whether one drew; ``None``: none has loaded a batch."""
        return (None, False, True)[self._shared[0]]

    def fetch(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Load a batch; called in whichever process does."""
        if self._looked or get_worker_info() is None:
            return original(*args, **kwargs)
        self._looked = True
        before = RandomState.now()
        batch = original(*args, **kwargs)
        drew = not RandomState.now().is_same(before)
        self._shared[0] = max(self._shared[0], 1 + drew)
        return batch


# -----------------------------------------------------------------------------
# Which batches are trained on, and in which steps others were taken: rounds of validation.


class BatchAccounting:
    """Tells loaders whose batches are trained on from those of validation.

    A batch says nothing of what it is for; what happens after it does. Trained on is a loader where
    a backward pass comes right after one of its batches, or where an iterator of it goes on from
    one step to the next: a round of validation begins and ends between two steps. A batch that was
    taken where no gradients are kept speaks only by the latter, and only where no loader is known
    to be trained on: else it is one of an endless iterator for validation.
    """

    def __init__(self) -> None:
        self._step = 0
        self._begin = 0
        self._sources: WeakKeyDictionary[Any, _Source] = WeakKeyDictionary()
        self._of: WeakKeyDictionary[Any, Iteration] = WeakKeyDictionary()
        self._last: _Source | None = None
        self._taken: dict[tuple[int, _Source], BatchCounts] = {}

    def start(self, iterator: Any, loader: Any) -> None:
        """Note that a loader is iterated over."""
        self._of[iterator] = Iteration(self._sources.setdefault(loader, _Source()))

    def ask(self, iterator: Any, underway: bool) -> Iteration:
        """Note that a batch is asked for, which there need not be; for ``take`` if there is.

        Args:
            iterator: over a loader.
            underway: whether it has given a batch since it began, or began again.

        """
        iteration = self._of_iterator(iterator)
        if underway and iteration.given_in == self._step - 1:
            if torch.is_grad_enabled():
                iteration.source.trained = True
            else:
                iteration.source.may_be = True
        return iteration

    def take(self, iteration: Iteration, samples: int | None, tokens: int) -> None:
        """Note that a batch was given, of so many samples; ``None``: nobody knows."""
        source = iteration.source
        iteration.given_in = self._step
        self._last = source if torch.is_grad_enabled() else None
        self._taken.setdefault((self._step, source), BatchCounts()).add(samples, tokens)

    def _of_iterator(self, iterator: Any) -> Iteration:
        found = self._of.get(iterator)
        if found is None:  # begun before loaders were instrumented
            found = self._of[iterator] = Iteration(_Source())
        return found

    def backward(self) -> None:
        """Note that a backward pass begins."""
        if self._last is not None:
            self._last.trained, self._last = True, None

    def end_step(self) -> None:
        """Note that a step has ended."""
        self._step += 1

    def begin(self) -> None:
        """Begin a window with the next step."""
        self._begin = self._step
        self._taken.clear()

    def read(self) -> BatchCounts:
        """What was taken since the window began; all is trained on where nothing is known."""
        sources = {source for _, source in self._taken}
        trained = {source for source in sources if source.trained}
        trained = trained or {source for source in sources if source.may_be} or sources
        used = BatchCounts()
        for (step, source), counts in self._taken.items():
            if source in trained:
                used.add(counts.samples, counts.tokens)
            elif step - self._begin not in used.aside:
                used.aside.append(step - self._begin)
        return used


@dataclass
class BatchCounts:
    """What was taken in a window.

    Attributes:
        samples: that are trained on; ``None``: what is one in some batch, nobody knows.
        tokens: in them.
        aside: steps in which others were taken as well, the window's first one being 0.

    """

    samples: int | None = 0
    tokens: int = 0
    aside: list[int] = field(default_factory=list)

    def add(self, samples: int | None, tokens: int) -> None:
        """Count others as well."""
        known = samples is not None and self.samples is not None
        self.samples = (self.samples or 0) + (samples or 0) if known else None
        self.tokens += tokens


@dataclass(eq=False)
class Iteration:
    """What an iterator goes over, and the step in which it gave its last batch."""

    source: _Source
    given_in: int | None = None


@dataclass(eq=False)
class _Source:
    """A loader, and whether what it gives was seen to be trained on.

    Attributes:
        trained: it was.
        may_be: an iterator of it goes on from step to step, and only where no gradients are kept.

    """

    trained: bool = False
    may_be: bool = False


# -----------------------------------------------------------------------------
# How many samples a batch is of: as many as the loader was told to fetch for it.


class NamedSamples:
    """Samples of each batch that is on its way, by what the sampler named for it.

    A batch itself does not tell: it may be an object of the script's own, such as a graph, and its
    first tensor may have anything as its first dimension.
    """

    def __init__(self) -> None:
        self._on_the_way: WeakKeyDictionary[Any, deque[int | None]] = WeakKeyDictionary()
        self._first_is_samples: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()

    def forget(self, iterator: Any) -> None:
        """Expect nothing of what was named so far: the iterator begins anew."""
        self._on_the_way.pop(iterator, None)

    def note(self, iterator: Any, named: Any) -> None:
        """Note what a sampler named for one more batch; batches come in this order."""
        self._on_the_way.setdefault(iterator, deque()).append(_count(iterator, named))

    def samples_of(self, iterator: Any, batch: Any) -> int | None:
        """How many samples the batch is of that has come; ``None``: nobody knows."""
        on_the_way = self._on_the_way.get(iterator)
        named = on_the_way.popleft() if on_the_way else None
        if _may_be_a_batch(iterator, batch):
            return None
        if not _is_stream(iterator):
            return named
        if not iterator._auto_collation:
            return None  # an item of a stream is whatever the script makes it
        most = int(iterator._index_sampler.batch_size)  # asked for; a worker's last has fewer
        size = _first_dimension(batch)
        known = self._first_is_samples.setdefault(iterator, size == most)
        return size if known and size is not None and size <= most else most


def _is_stream(iterator: Any) -> bool:
    return bool(iterator._dataset_kind == _DatasetKind.Iterable)


def _count(iterator: Any, named: Any) -> int | None:
    """How many samples a sampler's word names; ``None`` where that is one item of any content."""
    if iterator._auto_collation:
        return len(named) if isinstance(named, Sized) else None
    # without a batch size only a list is one of several: other things may be a single key
    return len(named) if isinstance(named, list) else None


def _may_be_a_batch(iterator: Any, batch: Any) -> bool:
    """Whether the one item that each batch is of may be a batch itself: no tensor has one row."""
    if not iterator._auto_collation or getattr(iterator._index_sampler, "batch_size", None) != 1:
        return False
    rows = {tensor.shape[0] for tensor in _tensors(batch) if tensor.dim()}
    return bool(rows) and 1 not in rows


def _first_dimension(batch: Any) -> int | None:
    first = _first_tensor(batch)
    return first.shape[0] if first is not None and first.dim() else None


# -----------------------------------------------------------------------------
# What is in a batch.

_LENGTH_MASKS = ("attention_mask", "mask", "padding_mask")
_TOKENS = ("input_ids", "tokens", "input")


def count_tokens(batch: Any) -> int:
    """Tokens of a batch; 0 where it holds no sequences of whole numbers.

    They are those that an attention mask counts, where there is one; else all of them.
    """
    if not isinstance(batch, torch.Tensor) and isinstance(batch, Mapping):
        return _tokens(batch)
    first = _first_tensor(batch)
    return first.numel() if first is not None and _is_text(first) else 0


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
    return next(_tensors(batch), None)


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors in it, in order; those of a class of the script's own are not seen."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        yield from _tensors(list(batch.values()))
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from _tensors(part)
