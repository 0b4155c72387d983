"""Uniform random search without repeats."""

from __future__ import annotations

from typing import Any

from perfsearch.core.hints import Hints
from perfsearch.core.knob import Value
from perfsearch.core.space import Space
from perfsearch.core.trial import Trial
from perfsearch.strategies._history import History
from perfsearch.strategies.base import Strategy


class Random(Strategy):
    """Proposes feasible configurations uniformly, each at most once."""

    def __init__(self, space: Space, hints: Hints, seed: int, options: Any = None) -> None:
        super().__init__(space, hints, seed, options)
        self._history = History(space, seed)

    def ask(self) -> dict[str, Value] | None:
        """Return an untried configuration, ``None`` when there is none."""
        point = self._history.draw(self._history.generator())
        if point is None:
            self.stop_reason = self._history.why_none()
            return None
        return self._history.propose(point)

    def tell(self, trial: Trial) -> None:
        """Note that the configuration was tried."""
        self._history.tell(trial)

    def describe(self) -> str:
        """One line for people."""
        size = self.space.size
        many = (
            "more configurations than can be listed" if size is None else f"{size} configurations"
        )
        return f"random search over {many}"
