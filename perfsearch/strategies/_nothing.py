"""The strategy where somebody else says what is measured."""

from __future__ import annotations

from perfsearch.core.hints import Hints
from perfsearch.core.knob import Value
from perfsearch.core.space import Space
from perfsearch.core.trial import Trial
from perfsearch.strategies.base import Strategy


class Nothing(Strategy):
    """Has nothing to propose."""

    def __init__(self, space: Space, hints: Hints) -> None:
        super().__init__(space, hints, seed=0)

    def ask(self) -> dict[str, Value] | None:
        """Nothing."""
        return None

    def tell(self, trial: Trial) -> None:
        """Take no note."""
