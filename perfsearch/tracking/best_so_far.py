"""The best reading after each trial of a search: the curve by which searches are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from perfsearch.core.trial import Purpose, Status, Trial

WITHIN = 0.02
"""A search has found the best once it is within that of it."""


@dataclass(frozen=True)
class Point:
    """The best so far.

    Attributes:
        trial: number of the latest trial that ended.
        cost: the lowest until then.
        objective: the same in its own unit.

    """

    trial: int
    cost: float
    objective: float


@dataclass
class BestSoFar:
    """The curve of one search, trial by trial.

    Only readings of the baseline and of trials that the strategy asked for count: the others
    measure again what is known.

    Attributes:
        baseline_cost: of the first baseline; ``None`` before it has ended well.

    """

    baseline_cost: float | None = None
    _counted: dict[int, tuple[float, float] | None] = field(default_factory=dict)

    def add(self, trial: Trial) -> Point | None:
        """The point that a trial adds; ``None`` where it does not count, or nothing ended well.

        Once more under its number, a trial replaces what was known of it.
        """
        if trial.purpose not in (Purpose.BASELINE, Purpose.SEARCH):
            return None
        reading = None
        if trial.status is Status.OK and trial.cost and trial.objective is not None:
            reading = (trial.cost, trial.objective)
            if trial.purpose is Purpose.BASELINE:
                self.baseline_cost = trial.cost
        self._counted[trial.number] = reading
        ended = [known for known in self._counted.values() if known is not None]
        return Point(max(self._counted), *min(ended)) if ended else None

    def speed_up(self, cost: float | None) -> float | None:
        """A cost against the first reading of the baseline; ``None`` where one is not known."""
        return self.baseline_cost / cost if cost and self.baseline_cost else None


@dataclass(frozen=True)
class Reached:
    """How far a search had come after one of its trials.

    Attributes:
        trials: that the strategy had asked for.
        seconds: that these took, and the baseline before them.
        cost: the lowest until then, the baseline's among them where that was given.

    """

    trials: int
    seconds: float
    cost: float


def course(trials: Sequence[Trial]) -> list[Reached]:
    """The best after each trial, from the first one that ended well on."""
    count, seconds, best, found = 0, 0.0, None, []
    for trial in trials:
        if trial.purpose not in (Purpose.BASELINE, Purpose.SEARCH):
            continue
        count += trial.purpose is Purpose.SEARCH
        seconds += trial.seconds
        if trial.status is Status.OK and trial.cost is not None:
            best = trial.cost if best is None else min(best, trial.cost)
        if best is not None:
            found.append(Reached(count, seconds, best))
    return found


def first_within(reached: Sequence[Reached], cost: float, fraction: float) -> Reached | None:
    """Where a search first was within a fraction of a cost; ``None`` where it never was."""
    return next((one for one in reached if one.cost <= cost * (1 + fraction)), None)
