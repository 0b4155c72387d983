"""The best reading after each trial of a search: the curve by which searches are compared."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from perfsearch.core.figures import decimals, show_number
from perfsearch.core.trial import Purpose, Status, Trial

WITHIN = 0.02
"""A search has found the best once it is within that of it."""

_NOISE_UNKNOWN = 0.1
"""By how much two searches' baselines may differ, relative, where none was read twice."""


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


# -----------------------------------------------------------------------------
# What readings of several searches are compared with.


@dataclass(frozen=True)
class References:
    """What each search's readings are compared with, among searches of one job.

    Attributes:
        costs: of the baseline, for each search: the median of all their readings, or of its own
            where they ran under different load; ``None`` where there is no reading.
        different_load: one line for people; empty where they are comparable.

    """

    costs: Sequence[float | None]
    different_load: str = ""


def references(searches: Sequence[Sequence[Trial]], unit: str) -> References:
    """What the readings of some searches are compared with.

    Two of them ran under different load where the gap between their baselines' readings is larger
    than the range of any one search's.

    Args:
        searches: the trials of each, all of one job.
        unit: of their objective.

    """
    readings = [baseline_readings(trials) for trials in searches]
    costs = [[trial.cost for trial in found if trial.cost] for found in readings]
    known = [sorted(own) for own in costs if own]
    if not known:
        return References([None] * len(searches))
    widths = [math.log(own[-1] / own[0]) for own in known if len(own) > 1]
    noise = max(widths, default=math.log1p(_NOISE_UNKNOWN))
    gap = math.log(max(own[0] for own in known) / min(own[-1] for own in known))
    if gap <= max(noise, math.log1p(WITHIN)):
        common = statistics.median([cost for own in known for cost in own])
        return References([common] * len(searches))
    places = [place for place, own in enumerate(costs) if own]
    two = (
        max(places, key=lambda place: min(costs[place])),
        min(places, key=lambda place: max(costs[place])),
    )
    objectives = [
        sorted(t.objective for t in readings[place] if t.objective is not None) for place in two
    ]
    told = " and ".join(_range(found) for found in sorted(objectives) if found)
    whose = "their baselines" if len(known) == 2 else "the baselines of two of them"
    return References(
        [statistics.median(own) if own else None for own in costs],
        f"these searches ran under different load: {whose} read {told} {unit}; compare the "
        "confirmed gains alone",
    )


def baseline_readings(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that measured the baseline before the confirmation."""
    purposes = (Purpose.BASELINE, Purpose.SENTINEL)
    return [t for t in trials if t.purpose in purposes and t.status is Status.OK and t.cost]


def _range(values: Sequence[float]) -> str:
    """``346 to 421``, of values in order."""
    ends = list(
        dict.fromkeys(
            show_number(end, decimals(values[-1])) for end in values[:: max(1, len(values) - 1)]
        )
    )
    return " to ".join(ends)
