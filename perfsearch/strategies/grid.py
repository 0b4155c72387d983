"""Every configuration in turn."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from perfsearch.core.hints import Hints
from perfsearch.core.knob import Knob, Value
from perfsearch.core.option import option
from perfsearch.core.space import Space, key_of
from perfsearch.core.trial import Trial
from perfsearch.strategies._history import EXHAUSTED, History
from perfsearch.strategies.base import Strategy

_CHECKS_PER_ASK = 200_000


class Grid(Strategy):
    """Proposes the configurations of a finite space in its order; of an endless one, a lattice."""

    @dataclass(frozen=True)
    class Options:
        """Options of ``strategy=grid``.

        Attributes:
            points_per_knob: values of a knob without a finite number of them, evenly spaced on
                its own scale, ends included; also used for long ranges of a space that is too
                large to list.

        """

        points_per_knob: int = option(5, low=2)

    def __init__(self, space: Space, hints: Hints, seed: int, options: Any = None) -> None:
        super().__init__(space, hints, seed, options)
        self._history = History(space, seed)
        self._points = self._lattice()

    def ask(self) -> dict[str, Value] | None:
        """Return the next configuration in order, ``None`` after the last."""
        for point in self._points:
            if point is None:
                self.stop_reason = (
                    f"none of {_CHECKS_PER_ASK} grid points in a row satisfied the constraints"
                )
                return None
            if not self._history.taken(point):
                return self._history.propose(point)
        self.stop_reason = EXHAUSTED if self.space.listed() is not None else "grid exhausted"
        return None

    def tell(self, trial: Trial) -> None:
        """Note that the configuration was tried."""
        self._history.tell(trial)

    def describe(self) -> str:
        """One line for people."""
        return "every configuration in turn, the last knob fastest"

    def _lattice(self) -> Iterator[dict[str, Value] | None]:
        """Feasible points in order; ``None`` after too many infeasible ones in a row."""
        listed = self.space.listed()
        if listed is not None:
            yield from listed
            return
        names = [knob.name for knob in self.space.knobs]
        seen: set[str] = set()
        refused = 0
        for values in itertools.product(*(self._values(k) for k in self.space.knobs)):
            point = self.space.canonical(dict(zip(names, values, strict=True)))
            key = key_of(point)
            if key not in seen and self.space.feasible(point):
                seen.add(key)
                refused = 0
                yield point
            else:
                refused += 1
                if refused % _CHECKS_PER_ASK == 0:
                    yield None

    def _values(self, knob: Knob) -> list[Value]:
        limit = self.options.points_per_knob
        if not knob.is_range or (knob.count is not None and knob.count <= limit):
            return list(knob.choices() or ())
        values = [knob.from_unit(i / (limit - 1)) for i in range(limit)]
        return list(dict.fromkeys(values))
