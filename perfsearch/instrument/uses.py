"""Which batches are trained on, and in which steps others were taken: rounds of validation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch


@dataclass(eq=False)
class _Source:
    """A loader, and whether what it gives was seen to be trained on.

    Attributes:
        trained: it was.
        may_be: an iterator of it goes on from step to step, and only where no gradients are kept.

    """

    trained: bool = False
    may_be: bool = False


@dataclass(eq=False)
class Iteration:
    """What an iterator goes over, and the step in which it gave its last batch."""

    source: _Source
    given_in: int | None = None


@dataclass
class Used:
    """What was taken in a window.

    Attributes:
        samples: that are trained on.
        tokens: in them.
        aside: steps in which others were taken as well, the window's first one being 0.

    """

    samples: int = 0
    tokens: int = 0
    aside: list[int] = field(default_factory=list)


class Uses:
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
        self._taken: dict[tuple[int, _Source], list[int]] = {}

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

    def take(self, iteration: Iteration, samples: int, tokens: int) -> None:
        """Note that a batch was given."""
        source = iteration.source
        iteration.given_in = self._step
        self._last = source if torch.is_grad_enabled() else None
        counts = self._taken.setdefault((self._step, source), [0, 0])
        counts[0] += samples
        counts[1] += tokens

    def _of_iterator(self, iterator: Any) -> Iteration:
        found = self._of.get(iterator)
        if found is None:  # begun before anybody looked
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

    def read(self) -> Used:
        """What was taken since the window began; all is trained on where nothing is known."""
        sources = {source for _, source in self._taken}
        trained = {source for source in sources if source.trained}
        trained = trained or {source for source in sources if source.may_be} or sources
        used = Used()
        for (step, source), (samples, tokens) in self._taken.items():
            if source in trained:
                used.samples += samples
                used.tokens += tokens
            elif step - self._begin not in used.aside:
                used.aside.append(step - self._begin)
        return used
