"""DataLoader in a script: its constructor, what it yields, and the same batches once more."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import dataloader as _module

from perfsearch.core.knob import Value
from perfsearch.instrument.batches import BatchTape, count
from perfsearch.instrument.generators import RandomState
from perfsearch.instrument.patches import wrap
from perfsearch.instrument.phases import OTHER
from perfsearch.instrument.switch_names import LOADER_KNOBS
from perfsearch.instrument.uses import Uses

DEFAULT_PREFETCH = 2


class Loaders:
    """Every ``DataLoader`` that the script makes from now on, and the batches it takes from them.

    Args:
        knobs: values for their constructors; those that are ``None`` or absent are left alone.

    Attributes:
        pulls: batches that were taken so far, over all loaders.
        began: when the first was asked for, by ``time.perf_counter``; ``None``: not yet.
        uses: samples and tokens (padding apart) in those that are trained on.
        counting: whether samples, tokens and random draws are looked at.
        mark: told ``dataloader_next`` whenever a batch has been taken, an iterator made (which
            starts worker processes) or one come to its end; ``other`` before.
        tape: keeps the batches, to give the same ones again.
        made: how many there were so far.
        shared_out: whether one was iterated over that loads from an ``IterableDataset``.
        draws: whether taking a batch drew random numbers in this process; ``None``: not known.

    """

    def __init__(self, knobs: Mapping[str, Value]) -> None:
        self.knobs = {n: knobs[n] for n in LOADER_KNOBS if knobs.get(n) is not None}
        self.pulls = 0
        self.began: float | None = None
        self.uses = Uses()
        self.counting = True
        self.shared_out = False
        self.draws: bool | None = None
        self.mark: Callable[[str], None] | None = None
        self.tape: BatchTape | None = None
        self.ignored: dict[str, str] = {}
        self.made = 0
        self._last: dict[str, Value] = {}
        self._iterators: weakref.WeakSet[Any] = weakref.WeakSet()
        base = _module._BaseDataLoaderIter
        self._undo = (
            wrap(DataLoader, "__init__", self._construct),
            wrap(DataLoader, "__iter__", self._begin),
            wrap(base, "__init__", self._start),
            wrap(base, "__next__", self._next),
        )

    def _construct(
        self, original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        loader, *positional = args
        given = dict(zip(_POSITIONAL, positional, strict=False))
        given.update(kwargs)
        original(loader, **arguments(given, self.knobs))
        self.made += 1

    def _begin(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self.counting or self.mark is None:
            return original(*args, **kwargs)
        self.mark(OTHER)
        iterator = original(*args, **kwargs)
        self.mark("dataloader_next")
        return iterator

    def _start(
        self, original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        original(*args, **kwargs)
        iterator, loader = args[0], args[1] if len(args) > 1 else kwargs["loader"]
        self._iterators.add(iterator)
        self.uses.start(iterator, loader)
        self.shared_out |= isinstance(loader.dataset, IterableDataset)
        self._last = values_of(loader)  # of the loader itself often nothing is left

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
        iteration = self.uses.ask(iterator, iterator._num_yielded > 0)
        # the first batch starts samplers and workers, which draw; the second tells
        looks = self.draws is None and iterator._num_workers == 0 and iterator._num_yielded == 1
        before = RandomState.now() if looks else None
        try:
            batch = original(*args, **kwargs)
        except StopIteration:
            if self.mark is not None:  # worker processes were ended
                self.mark("dataloader_next")
            raise
        if before is not None:
            self.draws = not RandomState.now().is_same(before)
        if self.tape is not None:
            batch = self.tape.pass_on(batch, iterator._dataset)
        self.pulls += 1
        self.uses.take(iteration, *count(batch))
        if self.mark is not None:
            self.mark("dataloader_next")
        return batch

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


def values_of(loader: Any) -> dict[str, Value]:
    """The knobs' values as a loader itself has them."""
    found: dict[str, Value] = {
        "dataloader_workers": loader.num_workers,
        "persistent_workers": bool(loader.persistent_workers),
        "pin_memory": bool(loader.pin_memory),
    }
    if loader.num_workers:
        found["prefetch_factor"] = loader.prefetch_factor
    return found


def arguments(own: Mapping[str, Any], knobs: Mapping[str, Value]) -> dict[str, Any]:
    """The script's own arguments with the knobs' in their place, and consistent."""
    merged = dict(own)
    names = {"dataloader_workers": "num_workers"}
    for knob, value in knobs.items():
        merged[names.get(knob, knob)] = value
    if not merged.get("num_workers"):
        # torch refuses these without worker processes
        for name, nothing in (("prefetch_factor", None), ("persistent_workers", False)):
            if merged.get(name):
                merged[name] = nothing
        merged["timeout"] = 0
        merged.pop("multiprocessing_context", None)
    return merged
