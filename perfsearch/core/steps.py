"""What a window of steps says of the time of a step: slow steps, what recurs of them, the rate.

A training job pays for every step, slow ones included, so that its rate is steps over seconds. In a
window of some tens of steps that is right only for what recurs in it: what was met once may come
again in the next step or never. And a window rarely ends where a period does: of steps that are
slow in every eighth of them, sixty hold seven or eight.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

ALIKE = 0.03
"""Relative difference of mean and median up to which steps count as even."""

TIMES_SEEN = 3
"""How often slow steps are to be met in a window: then it covers two of their periods."""

_SLOW = 1.5
"""A slow step takes at least so many times a usual one."""

_ONE_STALL = 0.2
"""Share of a window up to which slow steps in a row are one stall; longer, steps have changed."""

_FEWEST_CAPPED = 4
"""Steps of which the largest may count as the second: of fewer that would be too much of them."""

_UNLIKE = 1.5
"""Ratio of the longest to the shortest distance up to which slow steps come at even distances."""

_MOST_STRETCHES, _STRETCHES_DIFFER = 8, 0.1
"""Into how many stretches a window is parted at most, and by how much they may differ."""

_MOST_DEPENDENT = 0.9
"""Correlation of a step and the next above which it is not believed."""


class Statistic(StrEnum):
    """What the step time of a measurement can be."""

    RATE = "rate"
    MEDIAN = "median"


@dataclass(frozen=True)
class SlowSteps:
    """Slow steps of one kind: of about the same size.

    Attributes:
        places: which steps of the window, the first one being 0.
        times: how often they were met; those in a row are met once.
        period_steps: steps from one time to the next; ``None`` where they were met once.
        extra_s: what such a step takes longer than a usual one.
        share: part of the window's seconds that this is.
        scored: whether they are in the rate.
        is_periodic: whether they come at even distances.

    """

    places: tuple[int, ...]
    times: int
    period_steps: float | None
    extra_s: float
    share: float
    scored: bool
    is_periodic: bool = True


@dataclass(frozen=True)
class Reading:
    """What a window says.

    Attributes:
        step_s: seconds of a step as the rate has them.
        log_error: standard error of its logarithm; ``None`` for fewer than three steps.
        slow: kinds of slow steps, the slowest first; empty where steps are even.

    """

    step_s: float
    log_error: float | None
    slow: tuple[SlowSteps, ...] = ()


def read_window(seconds: Sequence[float]) -> Reading:
    """Read the rate of a window, and its slow steps.

    The single largest step counts as the second largest: one stall that is not the job's must not
    decide. Slow steps that were met once are left out. Where those met more often come at even
    distances, whole periods are scored: from after the first to the last.

    Args:
        seconds: of each step, in order, all positive.

    """
    kinds = _kinds(seconds)
    once = {place for kind in kinds if not kind.scored for place in kind.places}
    kept = [place for place in range(len(seconds)) if place not in once]
    ordered = sorted(seconds[place] for place in kept)
    cap = ordered[-2 if len(kept) >= _FEWEST_CAPPED else -1]
    recurring = next((kind for kind in kinds if kind.scored), None)
    strata: list[list[int]] = [kept]
    if recurring is not None:
        runs = _runs(recurring.places)
        if _is_periodic(runs, len(seconds)):
            kept = [place for place in kept if runs[0][-1] < place <= runs[-1][-1]]
            slow = set(recurring.places)
            strata = [[p for p in kept if p in slow], [p for p in kept if p not in slow]]
    scored = {place: min(seconds[place], cap) for place in kept}
    means: dict[int, float] = {}
    for stratum in strata:
        if stratum:
            means |= dict.fromkeys(stratum, statistics.fmean(scored[p] for p in stratum))
    step_s = statistics.fmean(scored.values())
    deviations = [seconds - means[place] for place, seconds in scored.items()]
    return Reading(step_s, _log_error(deviations, step_s), tuple(kinds))


def whole_periods(seconds: Sequence[float]) -> list[float]:
    """The steps of whole periods, where slow ones come at even distances; else all.

    They can be gone through again and again without a period that is too short or too long.
    """
    recurring = next((kind for kind in _kinds(seconds) if kind.scored), None)
    runs = [] if recurring is None else _runs(recurring.places)
    if not _is_periodic(runs, len(seconds)):
        return list(seconds)
    return list(seconds[runs[0][-1] + 1 : runs[-1][-1] + 1])


def steps_alike(seconds: Sequence[float]) -> int:
    """After how many steps slow ones were met about as often as in all of the window.

    What comes at no even distance may come in clusters, as a plan for each new shape does: most of
    them soon, few later. A window that is shorter than that is of the one or the other.

    Args:
        seconds: of each step, in order, all positive.

    Returns:
        The length of the shortest stretches that are equally long, one after another, whose means
        differ by ``_STRETCHES_DIFFER`` at most; all steps, if the halves already differ by more.

    """
    count = len(seconds)
    for parts in range(min(_MOST_STRETCHES, count), 1, -1):
        ends = [count * part // parts for part in range(parts + 1)]
        means = [statistics.fmean(seconds[a:b]) for a, b in itertools.pairwise(ends)]
        if max(means) <= (1 + _STRETCHES_DIFFER) * min(means):
            return math.ceil(count / parts)
    return count


def step_time_s(seconds: Sequence[float], statistic: str) -> float:
    """Seconds of a step by one of ``Statistic``."""
    if statistic == Statistic.MEDIAN:
        return statistics.median(seconds)
    return read_window(seconds).step_s


def are_even(seconds: Sequence[float]) -> bool:
    """Whether mean and median are about the same."""
    middle = statistics.median(seconds)
    return abs(statistics.fmean(seconds) - middle) <= ALIKE * middle


# -----------------------------------------------------------------------------
# Kinds of slow steps.


def _kinds(seconds: Sequence[float]) -> list[SlowSteps]:
    """Kinds of slow steps, the slowest first, until the steps that are left are even."""
    found: list[SlowSteps] = []
    left = list(range(len(seconds)))
    while left:
        even = are_even([seconds[place] for place in left])
        slow = [] if even and found else _slowest_kind(seconds, left)
        runs = _runs(slow)
        if not slow or (even and not _is_periodic(runs, len(seconds))):
            break
        if len(runs) == 1 and len(slow) > max(1, _ONE_STALL * len(seconds)):
            break
        slow_ones = set(slow)
        left = [place for place in left if place not in slow_ones]
        usual_s = statistics.median([seconds[place] for place in left] or seconds)
        extra_s = statistics.fmean(seconds[place] for place in slow) - usual_s
        found.append(
            SlowSteps(
                places=tuple(slow),
                times=len(runs),
                period_steps=_period_steps(runs, len(seconds)),
                extra_s=extra_s,
                share=extra_s * len(slow) / sum(seconds),
                scored=len(runs) > 1,
                is_periodic=_is_periodic(runs, len(seconds)),
            )
        )
    return found


def _slowest_kind(seconds: Sequence[float], left: Sequence[int]) -> list[int]:
    """Places of the largest steps: they exceed a quick one by over half of what the largest does.

    A quick one is the lower quartile, as with a slow loader every other step is slow.
    """
    ordered = sorted(seconds[place] for place in left)
    quick_s, largest_s = ordered[(len(ordered) - 1) // 4], ordered[-1]
    least_s = max(_SLOW * quick_s, (quick_s + largest_s) / 2)
    return [place for place in left if seconds[place] > least_s]


def _runs(places: Iterable[int]) -> list[list[int]]:
    """Places that follow one another, together."""
    runs: list[list[int]] = []
    for place in places:
        if runs and place == runs[-1][-1] + 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs


def _period_steps(runs: Sequence[Sequence[int]], count: int) -> float | None:
    if len(runs) < 2:
        return None
    if not _is_periodic(runs, count):
        return count / len(runs)
    return (runs[-1][-1] - runs[0][-1]) / (len(runs) - 1)


def _is_periodic(runs: Sequence[Sequence[int]], count: int) -> bool:
    """Whether they come at even distances in all of the window, give or take a step."""
    apart = [b[-1] - a[-1] for a, b in itertools.pairwise(runs)]
    if not apart or max(apart) > _UNLIKE * min(apart) + 1:
        return False
    return max(runs[0][0], count - 1 - runs[-1][-1]) <= max(apart) + 1


# -----------------------------------------------------------------------------
# The error of a rate.


def _log_error(deviations: Sequence[float], mean: float) -> float | None:
    """Standard error of the logarithm of a mean.

    Where whole periods are scored there are as many slow steps as there have to be, so that steps
    deviate from those of their own kind only. Steps in a row are not independent: the machine is as
    fast as a moment ago. That is taken for an autoregression of first order.
    """
    count = len(deviations)
    if count < 3:
        return None
    power = sum(d * d for d in deviations)
    if power <= 0:
        return 0.0
    together = sum(a * b for a, b in itertools.pairwise(deviations)) / power
    # the mean was taken of the same few steps, which makes the correlation look smaller
    together += (1 + 3 * max(0.0, together)) / count
    together = min(max(0.0, together), _MOST_DEPENDENT)
    independent = math.sqrt(power / (count - 1) / count) / mean
    return independent * math.sqrt((1 + together) / (1 - together))
