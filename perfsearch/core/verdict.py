"""What repeated measurements in pairs say about a difference of speed, and when to stop repeating.

Arms are measured in blocks, each arm once a block, in orders drawn for each block such that load
that comes and goes falls on all arms alike (``block_orders``). The data are differences between two
arms of a block: logs of the baseline's cost over the other's, positive where the other is faster.

The differences are read several times, and the error probability is spent over these looks, most
of it late. A bound on Student's t belongs to each look. Without a true difference the values of t
at all looks have a distribution of their own, whatever the noise's size, so that the bounds are
found by drawing from it; they are exact for normal differences. All intervals hold together:
whichever look ends a comparison, and for whatever reason, its interval covers the truth in 95%
(repeated confidence intervals; Jennison and Turnbull, Group Sequential Methods, 2000, chapter 9).
Where time ends early, the look at that moment takes what is left of the error. statsmodels and
scipy have no such bounds for t.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95

_ERROR = 0.9 * (1 - CONFIDENCE)
"""Error that bounds are found for: a tenth less than is stated, since load that comes and goes adds
about as much (see ``block_orders``)."""

_LEAST_SPREAD = 2e-3
"""Relative standard deviation below which repeated timings are not believed to agree."""

_SAYS_NOTHING = math.log(10.0)
"""Half-width of an interval that reaches tenfold to both sides: what a few wild pairs give."""

_FUTILE = 0.05
"""Chance of showing a difference at the last look below which repeating ends."""

POWER = 0.9
"""Share of comparisons in which a difference is shown that "could have been shown"."""

_SPENT_LATE = 2.0
"""The error spent until a look is that share of the pairs to this power. Of 1, 2 and 3, 2 shows 3%
between starts that vary by 1% after fewest starts at nearly the power of 3."""

_DRAWS = 200_000
"""Sequences of t from which bounds are found: a bound's own error is a few percent of its level."""

_ORDERS = 32
"""Sequences of orders of which the best is taken: few enough that it is still a draw."""

_CHOSEN_TOGETHER = 8
"""How many blocks such a sequence has: as many as a comparison of starts may take."""

_PERIODS = np.geomspace(1, 12, 32)
"""Periods of load against which orders are chosen, in blocks."""

_PHASES = 2 * np.pi * np.arange(16) / 16

_LOADS = (4.0, 12.0)
"""Sizes of that load, as multiples of a reading's own noise."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A speed-up over the baseline: a ratio of throughputs, 1 being no change.

    Attributes:
        ratio: geometric mean over pairs of processes.
        low: lower end of the 95% confidence interval.
        high: upper end.
        pairs: number of pairs of processes.

    """

    ratio: float
    low: float
    high: float
    pairs: int

    @property
    def is_gain(self) -> bool:
        """Whether the whole interval lies above 1."""
        return self.low > 1.0

    @property
    def half_width(self) -> float:
        """Half the interval's width on a log scale, about its relative error."""
        return math.log(self.high / self.low) / 2

    @property
    def is_told(self) -> bool:
        """Whether the interval is narrow enough to say anything."""
        return self.half_width <= _SAYS_NOTHING

    @property
    def gain(self) -> str:
        """As a relative change, for a place that says what the interval is: ``+4.1% (+3.2% to
        +5.0%)``.
        """
        if not self.is_told:
            return f"{self.ratio - 1:+.1%} (inconclusive, {self.pairs} pairs)"
        digits = 1  # or more, where an end would read as no change
        ends = (self.low - 1, self.high - 1)
        while digits < 4 and 0.0 in (round(100 * end, digits) for end in ends):
            digits += 1
        low, high = (f"{end:+.{digits}%}" for end in ends)
        return f"{self.ratio - 1:+.{digits}%} ({low} to {high})"

    def __str__(self) -> str:
        return self.gain.replace("(", "(95% interval ", 1) if self.is_told else self.gain


# -----------------------------------------------------------------------------
# The plan of a comparison, and its bounds.


class Unit(StrEnum):
    """What is measured in pairs."""

    STARTS = "starts"
    """A process of its own for each reading."""
    STEPS = "steps"
    """A block of steps for each reading, inside one start that is switched between them."""


@dataclass(frozen=True)
class Plan:
    """When the pairs of a comparison are read, and what would end it.

    Attributes:
        looks: numbers of pairs after which they are read, the last being the most there are.
        unit: what a pair consists of.
        comparisons: how many arms are compared with the same baseline; their intervals hold
            together.
        min_gain: relative difference that matters: a comparison ends once the difference is known
            to be smaller. 0: none is too small.
        either_way: whether a slower arm is an answer like a faster one; if not, a comparison ends
            as soon as a gain is out of reach.
        sharpness: half-width of the interval, as a share of the difference, at which a difference
            that is shown ends the comparison. 1 ends it as soon as one is shown; 0.5 when at least
            half of what is estimated is sure.

    """

    looks: tuple[int, ...]
    unit: Unit = Unit.STARTS
    comparisons: int = 1
    min_gain: float = 0.0
    either_way: bool = True
    sharpness: float = 1.0

    def __post_init__(self) -> None:
        if not self.looks or self.looks[0] < 2 or list(self.looks) != sorted(set(self.looks)):
            raise ValueError(
                f"looks={self.looks}: needs rising numbers of pairs from 2 (one has no spread)"
            )

    @property
    def most(self) -> int:
        """Most pairs that are measured."""
        return self.looks[-1]

    def bound(self, pairs: int, last: bool = False) -> float:
        """What t of the first ``pairs`` has to exceed for a difference to be shown.

        Args:
            pairs: one of ``looks``; any number from 2 where ``last``.
            last: nothing is measured after it, so that it may spend all that is left. Pairs that
                were read already may be read again so: the one reading is inside the other.

        """
        if pairs > self.most or (not last and pairs not in self.looks):
            raise ValueError(f"pairs={pairs} is not one of the planned looks {self.looks}")
        before = tuple(n for n in self.looks if n < pairs)
        shares = tuple((n / self.most) ** _SPENT_LATE for n in (*before, pairs))
        if last:
            shares = (*shares[:-1], 1.0)
        return _bounds((*before, pairs), shares, _ERROR / self.comparisons)[-1]


def plan_of_starts(most: int, **more: Any) -> Plan:
    """A plan for processes: read after three pairs and after each further one.

    Raises:
        ValueError: ``most`` is less than two.

    """
    if most < 2:
        raise ValueError(
            f"{most} pair has no spread, so that nothing can be decided: use 4 or more"
        )
    return Plan(tuple(range(min(3, most), most + 1)), Unit.STARTS, **more)


def plan_of_steps(most: int = 100, **more: Any) -> Plan:
    """A plan for blocks of steps inside one start: looks are the further apart the later."""
    looks, at = [], 6.0
    while at < most * 0.9:
        looks.append(round(at))
        at *= math.sqrt(2)
    return Plan((*looks, most), Unit.STEPS, **more)


def block_orders(seed: int, blocks: int, arms: int = 2) -> list[list[int]]:
    """In which order the arms of each block are measured, the baseline being arm 0.

    Drawn, and for every eight blocks, of 32 draws the one that periodic load can least make a
    difference of. Of orders that are only drawn, one arm may come first just when the load is low,
    three or four times in a row: load with a period of two blocks then passes for a difference in a
    seventh of all comparisons. Reversing every other order, against drift, makes such load the
    worst case.
    """
    generator = np.random.default_rng([seed, 7])
    orders: list[list[int]] = []
    while len(orders) < blocks:
        places = np.argsort(generator.random((_ORDERS, _CHOSEN_TOGETHER, arms)), axis=2)
        best = places[int(np.argmin(_share_of_phases(places)))]
        orders += [[int(arm) for arm in np.argsort(block)] for block in best]
    return orders[:blocks]


def _share_of_phases(places: NDArray[np.int64]) -> Floats:
    """Share of the phases, at the worst period, at which load alone would exceed a bound.

    Args:
        places: of each arm in each block: (draw, block, arm).

    """
    _, blocks, arms = places.shape
    plan = plan_of_starts(blocks)
    places = places + arms * np.arange(blocks)[:, None]
    load = np.sin(2 * np.pi * places[..., None, None] / (arms * _PERIODS[:, None]) + _PHASES)
    pairs = load[:, :, :1] - load[:, :, 1:]  # (draw, block, arm, period, phase)
    worst = np.zeros(len(places))
    for size in _LOADS:
        exceeded = np.zeros_like(pairs[:, 0])
        for look in plan.looks:
            mean = np.abs(pairs[:, :look].mean(axis=1))
            error = np.sqrt((pairs[:, :look].var(axis=1, ddof=1) + 2 / size**2) / look)
            exceeded = np.maximum(exceeded, mean / error / plan.bound(look))
        share = 1 / (1 + np.exp(6 * (1 - exceeded)))  # readings have noise: a soft threshold
        worst = np.maximum(worst, share.mean(axis=-1).max(axis=(1, 2)))
    return worst


@functools.lru_cache(maxsize=256)
def _bounds(looks: tuple[int, ...], shares: tuple[float, ...], alpha: float) -> tuple[float, ...]:
    """Bounds on ``|t|`` at each look, of which all are kept by ``1 - alpha`` of equal arms.

    Args:
        looks: numbers of pairs.
        shares: of alpha, spent until each look.
        alpha: probability that any bound is exceeded at all.

    """
    from scipy.special import stdtrit  # all of scipy.stats takes half a second

    generator = np.random.default_rng(0)
    inside = np.ones(_DRAWS, dtype=bool)
    total, squares, pairs, spent = np.zeros(_DRAWS), np.zeros(_DRAWS), 0, 0.0
    bounds: list[float] = []
    for look, share in zip(looks, shares, strict=True):
        # Sum and squared deviations of the pairs since the last look, joined to those before.
        new = look - pairs
        added = math.sqrt(new) * generator.standard_normal(_DRAWS)
        if new > 1:
            squares = squares + generator.chisquare(new - 1, _DRAWS)
        if pairs:
            squares = squares + (added / new - total / pairs) ** 2 * pairs * new / look
        total, pairs = total + added, look
        t = np.abs(total) / np.sqrt(look * squares / (look - 1))
        if not bounds:
            bounds.append(float(stdtrit(look - 1, 1 - alpha * share / 2)))
        else:
            exceed = max(1, round(alpha * (share - spent) * _DRAWS))
            bounds.append(float(np.partition(t[inside], -exceed - 1)[-exceed - 1]))
        spent, inside = share, inside & (t <= bounds[-1])
    return tuple(bounds)


# -----------------------------------------------------------------------------
# A reading of the pairs so far. All of it works on many comparisons at once, the pairs along the
# last axis: expectations and error rates are found by the code that decides.


class Answer(StrEnum):
    """What a comparison has come to."""

    OPEN = "open"
    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    """Any difference (or any gain) is smaller than the one that matters."""
    FUTILE = "futile"
    """Nothing is shown, and hardly anything could be by the planned number of pairs."""


@dataclass(frozen=True)
class Reading:
    """What the pairs so far say.

    Attributes:
        plan: of the comparison.
        pairs: how many there are.
        last: whether no more are measured.
        mean: log of the speed-up.
        deviation: standard deviation of a pair's log, larger where pairs follow one another.
        half_width: of the interval on the log scale.

    """

    plan: Plan
    pairs: int
    last: bool
    mean: Floats
    deviation: Floats
    half_width: Floats

    @property
    def answers(self) -> NDArray[np.str_]:
        """The ``Answer`` of each comparison."""
        low, high = self.mean - self.half_width, self.mean + self.half_width
        enough = self.half_width <= self.plan.sharpness * np.abs(self.mean)
        if self.last:
            enough = np.ones_like(enough)
        matters = math.log1p(self.plan.min_gain)
        same = high < matters
        if self.plan.either_way:
            same &= low > -matters
        shown = (low > 0) | (high < 0)
        return np.select(
            [(low > 0) & enough, (high < 0) & enough, same, ~shown & (self.chance < _FUTILE)],
            [Answer.FASTER.value, Answer.SLOWER.value, Answer.SAME.value, Answer.FUTILE.value],
            Answer.OPEN.value,
        )

    @property
    def answer(self) -> Answer:
        """The answer of a single comparison."""
        return Answer(str(self.answers))

    @property
    def chance(self) -> Floats:
        """Chance that the last look shows a gain (or any difference), by the pairs so far."""
        if self.last or self.pairs >= self.plan.most:
            return np.ones_like(self.mean)
        from scipy.special import stdtr

        needed = self.plan.bound(self.plan.most) / math.sqrt(self.plan.most)
        spread = self.deviation * math.sqrt(1 / self.pairs - 1 / self.plan.most)
        degrees = self.pairs - 1
        gain = stdtr(degrees, (self.mean - needed * self.deviation) / spread)
        if not self.plan.either_way:
            return np.asarray(gain)
        loss = stdtr(degrees, (-self.mean - needed * self.deviation) / spread)
        return np.asarray(gain + loss)

    @property
    def interval(self) -> Interval:
        """The interval of a single comparison."""
        low, high = self.mean - self.half_width, self.mean + self.half_width
        return Interval(math.exp(self.mean), math.exp(low), math.exp(high), self.pairs)

    @property
    def could_have_shown(self) -> float:
        """Smallest relative gain that a single comparison like this one shows in 90%."""
        bound = float(self.half_width / self.deviation) * math.sqrt(self.pairs)
        return _shown(float(self.deviation), self.pairs, bound)


def read(logs: Floats | Sequence[float], plan: Plan, last: bool = False) -> Reading:
    """What the pairs so far say.

    Args:
        logs: of the baseline's cost over the other's, pairs along the last axis.
        plan: of the comparison.
        last: no more will be measured; always so at the plan's last look.

    """
    logs = np.asarray(logs, dtype=float)
    pairs = logs.shape[-1]
    if pairs < 2:
        raise ValueError("an interval needs at least two pairs")
    last = last or pairs >= plan.most
    deviation = np.maximum(logs.std(axis=-1, ddof=1), _LEAST_SPREAD)
    if plan.unit is Unit.STEPS:
        deviation = deviation * np.sqrt(_inflation(logs))
    half_width = plan.bound(pairs, last) * deviation / math.sqrt(pairs)
    return Reading(plan, pairs, last, np.asarray(logs.mean(axis=-1)), deviation, half_width)


def _inflation(logs: Floats) -> Floats:
    """By how much the variance of the mean is larger than that of independent pairs.

    That of a first-order autoregressive sequence, where neighbours seem to go together. Orders that
    are drawn make neighbours independent where the noise is the arms' own; what is left is a
    difference that itself comes and goes.
    """
    pairs = logs.shape[-1]
    off = logs - logs.mean(axis=-1, keepdims=True)
    squares = np.maximum((off**2).sum(axis=-1), 1e-300)
    seen = (off[..., 1:] * off[..., :-1]).sum(axis=-1) / squares
    unbiased = np.clip((seen * pairs + 1) / max(pairs - 4, 1), 0.0, 0.95)
    together = np.where(seen > 0.5 / math.sqrt(pairs), unbiased, 0.0)
    return np.asarray((1 + together) / (1 - together))


def _shown(deviation: float, pairs: int, bound: float) -> float:
    """Smallest relative gain that exceeds ``bound`` in 90% (noncentral t)."""
    from scipy.special import nctdtrinc

    shift = float(nctdtrinc(pairs - 1, 1 - POWER, bound))
    return math.expm1(shift * deviation / math.sqrt(pairs))


# -----------------------------------------------------------------------------
# Before it starts: what a plan will come to.


@dataclass(frozen=True)
class Course:
    """How comparisons went; arrays with an entry for each.

    Attributes:
        answers: the ``Answer`` of each.
        pairs: that each took.
        mean: log of the speed-up.
        half_width: of the interval on the log scale.

    """

    answers: NDArray[np.str_]
    pairs: NDArray[np.int64]
    mean: Floats
    half_width: Floats


def follow(logs: Floats, plan: Plan) -> Course:
    """Read many comparisons at each look until each has an answer.

    Args:
        logs: a row for each comparison, with as many pairs as the plan has at most.
        plan: of all of them.

    """
    count = len(logs)
    course = Course(
        np.full(count, Answer.OPEN.value, dtype="<U8"),
        np.zeros(count, dtype=np.int64),
        np.zeros(count),
        np.zeros(count),
    )
    going = np.arange(count)
    for pairs in plan.looks:
        reading = read(logs[going, :pairs], plan)
        answers = reading.answers
        course.answers[going], course.pairs[going] = answers, pairs
        course.mean[going], course.half_width[going] = reading.mean, reading.half_width
        going = going[answers == Answer.OPEN.value]
        if not going.size:
            break
    return course


@dataclass(frozen=True)
class Expectation:
    """What is to be expected of a comparison before it starts.

    Attributes:
        gain: true relative gain that is hoped for.
        power: share of comparisons that show it.
        pairs: that half of the comparisons need at most.
        mean_pairs: that they need on average.

    """

    gain: float
    power: float
    pairs: int
    mean_pairs: float

    def seconds(self, start_s: float, arms: int = 2) -> float:
        """Time for it where a start (or a block of steps) takes ``start_s``."""
        return self.mean_pairs * arms * start_s

    def __str__(self) -> str:
        return (
            f"a gain of {self.gain:.1%} is shown in {self.power:.0%}, "
            f"half of the time within {self.pairs} pairs"
        )


def expect(plan: Plan, noise: float, gain: float) -> Expectation:
    """What ``plan`` will come to, where readings of one arm vary by ``noise`` (relative).

    The noise is known only roughly before: of search readings in warm ranks it lacks what differs
    from process to process, so that it bounds the real one from below.
    """
    generator = np.random.default_rng(1)
    draws = math.sqrt(2) * noise * generator.standard_normal((2000, plan.most))
    course = follow(math.log1p(gain) + draws, plan)
    return Expectation(
        gain,
        float(np.mean(course.answers == Answer.FASTER.value)),
        int(np.median(course.pairs)),
        float(course.pairs.mean()),
    )


def smallest_gain(plan: Plan, noise: float) -> float:
    """Smallest relative gain that the last look shows in 90%, where readings vary by ``noise``."""
    return _shown(math.sqrt(2) * noise, plan.most, plan.bound(plan.most))


def too_few(most: int, noise: float = 0.01) -> str | None:
    """Why ``most`` pairs of starts cannot decide anything; ``None`` where they can.

    Args:
        most: as many pairs as are allowed.
        noise: of a start; 1% is a quiet machine's.

    """
    if most < 2:
        return "one pair has no spread, so that no gain can be shown; 4 or more can show one"
    if most > 2:
        return None
    gain = smallest_gain(plan_of_starts(most), noise)
    return (
        f"{most} pairs show only a gain of {gain:.0%} or more, even where starts vary by "
        f"{noise:.0%} only; 4 show one of {smallest_gain(plan_of_starts(4), noise):.0%}"
    )


# -----------------------------------------------------------------------------
# After it has ended: words.


def told(reading: Reading, reference: str = "") -> str:
    """One line for people on a single comparison: what is sure first, then what is estimated.

    The estimate is too large on average where a difference was just shown, since a smaller one
    would not have been; the end of the interval is not.

    Args:
        reading: of the pairs.
        reference: what it is compared with; by default it is not named.

    """
    interval, answer = reading.interval, reading.answer
    unit = "starts" if reading.plan.unit is Unit.STARTS else "blocks of steps"
    pairs = f"{reading.pairs} pairs of {unit}"
    if not interval.is_told:
        return f"nothing shown: {pairs} are too few at this noise"
    seen = f"95% interval {interval.low - 1:+.1%} to {interval.high - 1:+.1%}; {pairs}"
    about = f"about {_size(interval.ratio)}; {seen}"
    what = "difference" if reading.plan.either_way else "gain"
    than = f" than {reference}" if reference else ""
    if answer is Answer.FASTER:
        return f"at least {_size(interval.low)} faster{than} ({about})"
    if answer is Answer.SLOWER:
        return f"at least {_size(interval.high)} slower{than} ({about})"
    if answer is Answer.SAME:
        least = reading.plan.min_gain
        return f"no {what}{f' of {least:.1%} or more' if least else ''} ({seen})"
    return (
        f"no {what} shown ({seen}); a {what} of {reading.could_have_shown:.1%} would have been "
        f"shown in {POWER:.0%}"
    )


def _size(ratio: float) -> str:
    """The change that ``ratio`` is, with as many digits as keep it from reading as none."""
    change = abs(ratio - 1)
    digits = 1
    while digits < 4 and round(change * 100, digits) == 0:
        digits += 1
    return f"{change * 100:.{digits}f}%"


@dataclass(frozen=True)
class TwoKinds:
    """Readings of one arm that fall into two kinds.

    Attributes:
        slow: how many of them are slow.
        count: how many there are.
        apart: by how much the slow ones are slower, relative.

    """

    slow: int
    count: int
    apart: float

    def __str__(self) -> str:
        return (
            f"{self.slow} of {self.count} starts are {self.apart:.0%} slower than the others: they "
            "are of two kinds, and a few starts do not tell how often each comes"
        )


def two_kinds(costs: Sequence[float]) -> TwoKinds | None:
    """Whether the starts of one arm fall into two kinds; ``None`` where they do not.

    They do where splitting them in two leaves far less spread than it does of normal readings (in
    1% of these), where each kind has two at least, and where they do not part in time: all of the
    second after all of the first is drift. Hartigan's dip test has no power at so few.

    Args:
        costs: of an arm's processes in the order in which they ran.

    """
    count = len(costs)
    if count < 5:
        return None
    logs = np.log(np.asarray(costs, dtype=float))
    if _left_by_splits(logs[None])[0] > _least_left(count):
        return None
    order = np.argsort(logs)
    ordered = logs[order]
    at = _best_split(ordered[None])[0]
    slow = np.sort(order[at:])
    parts_in_time = slow[-1] == len(slow) - 1 or slow[0] == count - len(slow)
    apart = math.expm1(ordered[at:].mean() - ordered[:at].mean())
    if parts_in_time or apart < 2 * _LEAST_SPREAD:
        return None
    return TwoKinds(len(slow), count, apart)


def _split_squares(ordered: Floats) -> Floats:
    """Squared deviations that each split of ordered rows leaves, two at least on each side."""
    count = ordered.shape[1]
    return np.stack(
        [
            ordered[:, :k].var(axis=1) * k + ordered[:, k:].var(axis=1) * (count - k)
            for k in range(2, count - 1)
        ],
        axis=1,
    )


def _best_split(ordered: Floats) -> NDArray[np.int64]:
    return np.asarray(np.argmin(_split_squares(ordered), axis=1) + 2)


def _left_by_splits(rows: Floats) -> Floats:
    """Share of the squared deviations that the best split leaves."""
    ordered = np.sort(rows, axis=1)
    whole = np.maximum(ordered.var(axis=1) * rows.shape[1], 1e-300)
    return np.asarray(_split_squares(ordered).min(axis=1) / whole)


@functools.cache
def _least_left(count: int) -> float:
    """What splits leave of normal readings in all but 1%."""
    rows = np.random.default_rng(2).standard_normal((20_000, count))
    return float(np.quantile(_left_by_splits(rows), 0.01))


# -----------------------------------------------------------------------------
# Of several arms.


def leader(intervals: Mapping[int, Interval]) -> int:
    """The finalist with the largest mean speed-up among those with a gain beyond the noise, and
    among all where there is none.

    The intervals hold together (see ``Plan.comparisons``), so that one may be chosen by them.
    """
    gains = [finalist for finalist, interval in intervals.items() if interval.is_gain]
    return max(gains or intervals, key=lambda finalist: intervals[finalist].ratio)
