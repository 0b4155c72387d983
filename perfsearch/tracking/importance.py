"""What each knob's values did to the speed, as far as the trials of a search can tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, nan

import numpy as np

from perfsearch.core.knob import Configuration, Value
from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.tracking.names import plain

RESAMPLES = 200
MOST_LEVELS = 6
"""A knob with more values than this is shown in quarters of its range."""

FEWEST_TRIALS = 6

_RIDGE = 0.1
"""Weight of the prior that a level does nothing, in trials."""


@dataclass(frozen=True)
class Level:
    """A value, or a range of values, of a knob.

    Attributes:
        label: the value.
        speed_up: against the mean over the trials in which the knob matters, all other knobs equal;
            1 is no effect.
        low: lower end of a 95% bootstrap interval.
        high: upper end.
        trials: number of trials with it.

    """

    label: str
    speed_up: float
    low: float
    high: float
    trials: int

    @property
    def has_interval(self) -> bool:
        """Whether the interval means anything: one trial does not tell how such trials vary."""
        return self.trials > 1

    @property
    def is_sure(self) -> bool:
        """Whether the interval excludes that the value does nothing."""
        return self.has_interval and (self.low > 1 or self.high < 1)


@dataclass(frozen=True)
class KnobImportance:
    """Levels of one knob in the order of its values."""

    knob: str
    levels: tuple[Level, ...]

    @property
    def spread(self) -> float:
        """Ratio of the fastest level to the slowest."""
        return max(v.speed_up for v in self.levels) / min(v.speed_up for v in self.levels)


def knob_importance(
    trials: Sequence[Trial],
    knobs: Sequence[str],
    generator: np.random.Generator,
    when: Mapping[str, Mapping[str, tuple[Value, ...]]] | None = None,
) -> list[KnobImportance]:
    """Main effects of the knobs, the largest spread first.

    An additive model of log speed over the knobs' levels, fitted by ridge regression; intervals
    from resampling the trials. A search chooses what it measures, so this tells what went together,
    and interactions are not in it.

    Args:
        trials: of which those that ended well count.
        knobs: names of the searched knobs.
        generator: draws the resamples.
        when: for knobs that matter under other knobs' values only, which these are. Elsewhere such
            a knob stands at its default, and what the others do there is not its effect.

    Returns:
        Effects of the knobs that took several values; none of fewer than ``FEWEST_TRIALS``.

    """
    purposes = (Purpose.BASELINE, Purpose.SEARCH)
    good = [t for t in trials if t.status is Status.OK and t.cost and t.purpose in purposes]
    if len(good) < FEWEST_TRIALS:
        return []
    columns: list[tuple[str, list[str], np.ndarray]] = []
    for knob in knobs:
        conditions = (when or {}).get(knob, {})
        matters = np.array([_matters(t.configuration, conditions) for t in good])
        labels, places = _levels(
            [t.configuration.get(knob) for t, here in zip(good, matters, strict=True) if here]
        )
        if len(labels) > 1:
            columns.append((knob, labels, _indicators(labels, places, matters)))
    if not columns:
        return []
    design = np.hstack([indicators for _, _, indicators in columns])
    speed = -np.log([t.cost or nan for t in good])
    estimate = _fit(design, speed)
    draws = generator.integers(len(good), size=(RESAMPLES, len(good)))
    resampled = np.array([_fit(design[rows], speed[rows]) for rows in draws])
    found, begin = [], 0
    for knob, labels, indicators in columns:
        part = slice(begin, begin + len(labels))
        begin += len(labels)
        counts = (indicators > 0).sum(axis=0)
        share = counts / counts.sum()
        middle = estimate[part] - estimate[part] @ share
        around = resampled[:, part] - (resampled[:, part] @ share)[:, None]
        low, high = np.quantile(around, [0.025, 0.975], axis=0)
        levels = tuple(
            Level(label, exp(middle[i]), exp(low[i]), exp(high[i]), int(counts[i]))
            for i, label in enumerate(labels)
        )
        found.append(KnobImportance(knob, levels))
    return sorted(found, key=lambda knob: knob.spread, reverse=True)


def _matters(configuration: Configuration, when: Mapping[str, tuple[Value, ...]]) -> bool:
    return all(configuration.get(n, allowed[0]) in allowed for n, allowed in when.items())


def _indicators(labels: Sequence[str], places: np.ndarray, matters: np.ndarray) -> np.ndarray:
    """A column for each level: 1 in its trials; nothing where the knob does not matter.

    Where there are such trials, a column's mean over the others is taken off: what all levels have
    in common against these trials is the effect of the knobs on which it hangs.
    """
    within: np.ndarray = np.eye(len(labels))[places]
    if matters.all():
        return within
    columns = np.zeros((len(matters), len(labels)))
    columns[matters] = within - within.mean(axis=0)
    return columns


def _fit(design: np.ndarray, target: np.ndarray) -> np.ndarray:
    centred = target - target.mean()
    normal = design.T @ design + _RIDGE * np.eye(design.shape[1])
    return np.asarray(np.linalg.solve(normal, design.T @ centred))


def _levels(values: Sequence[Value]) -> tuple[list[str], np.ndarray]:
    """Labels of a knob's levels in order, and each trial's level."""
    if not values:
        return [], np.array([], dtype=int)
    distinct = sorted({plain(v): v for v in values}.values(), key=_order)
    numbers = [v for v in distinct if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(distinct) <= MOST_LEVELS or len(numbers) != len(distinct):
        labels = [plain(v) for v in distinct]
        return labels, np.array([labels.index(plain(v)) for v in values])
    given = np.array([float(v) for v in values if v is not None])
    edges = np.unique(np.quantile(given, [0.25, 0.5, 0.75]))
    places = np.searchsorted(edges, given, side="left")
    used, places = np.unique(places, return_inverse=True)
    labels = []
    for place in range(len(used)):
        inside = given[places == place]
        low, high = f"{inside.min():.3g}", f"{inside.max():.3g}"
        labels.append(low if low == high else f"{low} to {high}")
    return labels, places


def _order(value: Value) -> tuple[int, float, str]:
    if value is None:
        return 0, 0.0, ""
    if isinstance(value, str):
        return 2, 0.0, value
    return 1, float(value), ""
