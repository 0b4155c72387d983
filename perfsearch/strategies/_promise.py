"""What untried configurations promise: expected improvement, times the probability of running."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from perfsearch.core.hints import Hints
from perfsearch.core.knob import Configuration, Value
from perfsearch.core.space import Space
from perfsearch.strategies._candidates import with_nulls_apart
from perfsearch.strategies._earlier import Belief
from perfsearch.strategies._feasibility import Feasibility
from perfsearch.strategies._gp import Prior, fit
from perfsearch.strategies._predicted import log_predicted
from perfsearch.strategies._record import Record, cost_of
from perfsearch.strategies._trees import Forest

_LEAST_LIKELY = 0.4
"""What is less likely to run than this is left for when nothing else is left, or for a last look
before the end."""

_NOISE = 0.02
"""Relative noise between two trials of a configuration, as expected before any was seen."""

_NOISE_SPREAD = 0.7
"""Standard deviation of the logarithm of its variance: what the model does not explain is rarely
noise, as each trial's own is known."""

_BOUND_ERROR = 0.1
"""Error of the logarithm of a cost that is known as a lower bound only."""

_HOPE = 2.0
"""They go where the cost could be lowest, so many standard deviations below the mean."""


@dataclass(frozen=True)
class Scores:
    """What configurations promise, relative to the best cost so far.

    Attributes:
        gain: expected improvement, times the probability of running.
        hope: improvement if the cost is far below the mean, times the same.
        noise: what was learned of the relative noise between trials.
        surprise: how far the best trial lies below what all the others let expect of it, in
            standard deviations.
        second: makes the expected improvement by a forest of trees, times the same; for when the
            process promises nothing.
        largest: the largest expected improvement, whatever the probability of running.

    """

    gain: np.ndarray
    hope: np.ndarray
    noise: float = 0.0
    surprise: float = 0.0
    second: Callable[[], np.ndarray] | None = None
    largest: float = math.inf


class Promise:
    """Scores configurations by the trials so far.

    Args:
        space: encodes configurations.
        hints: predicted costs and peaks, where the runner has them.
        record: trials that ended, and proposals whose trials have not.
        belief: what an earlier search lets expect; ``None`` without one.
        share: how much of it to believe, 0 to 1.

    """

    def __init__(
        self, space: Space, hints: Hints, record: Record, belief: Belief | None, share: float
    ) -> None:
        self._space, self._hints, self._record = space, hints, record
        self._belief, self._share = belief, share

    def scores(
        self,
        points: Sequence[dict[str, Value]],
        rows: np.ndarray,
        alpha: float | None,
        xi: float,
        weight: np.ndarray | None,
    ) -> Scores:
        """What each of ``points`` promises.

        Args:
            points: untried configurations.
            rows: their encoding.
            alpha: noise on unit-variance scores; ``None`` learns it.
            xi: improvement, relative, that counts as none.
            weight: how much each knob is expected to matter; ``None``: all alike.

        """
        measured, bounded = self._record.measured(), self._record.bounded()
        trials = [*measured, *bounded]
        seen = self._encode([t.configuration for t in trials])
        logs = np.array([math.log(cost_of(t)) for t in trials])
        errors = np.array([t.cost_error or 0.0 for t in trials])
        errors[len(measured) :] += _BOUND_ERROR
        logs -= self._log_expected([t.configuration for t in trials], seen)
        center, scale = float(np.mean(logs)), max(float(np.std(logs)), 0.02)
        waiting = self._encode(list(self._record.outstanding.values()))
        model = fit(
            seen,
            (logs - center) / scale,
            self._space.ordered_columns,
            error=errors / scale,
            noise=alpha,
            prior=Prior(noise=((_NOISE / scale) ** 2, _NOISE_SPREAD), weight=weight),
            believe=(waiting, 0.0),
        )
        tried, own = [t.configuration for t in measured], seen[: len(measured)]
        best = float(np.min(model.predict(own)[0] + self._log_expected(tried, own) / scale))
        encoded = with_nulls_apart(self._space, rows)
        mean, deviation = model.predict(encoded)
        mean = mean + self._log_expected(points, encoded) / scale
        if self._belief is not None:
            # What the earlier search left unknown, as far as the own trials have not settled it.
            unknown = self._share * self._belief.deviation(encoded) / scale
            deviation = deviation * np.sqrt(1.0 + unknown**2 / model.prior_variance(encoded))
        better = best - mean - xi / scale
        improvement = _expected(better, deviation)
        feasibility = Feasibility(self._space, self._hints, trials, self._record.failed())
        likely = feasibility.probability(points, rows)
        any_safe = bool(likely.max() >= _LEAST_LIKELY)
        safe = np.where(likely >= _LEAST_LIKELY, likely, 0.0) if any_safe else likely
        hope = np.maximum(better + _HOPE * deviation, 0.0)
        noise = scale * math.sqrt(model.noise_variance)
        lowest = int(np.argmin([cost_of(t) for t in measured]))

        def second() -> np.ndarray:
            forest = Forest(seen, (logs - center) / scale, self._record.seed + len(trials))
            mean, deviation = forest.predict(encoded)
            mean = mean + self._log_expected(points, encoded) / scale
            least = (math.log(cost_of(measured[lowest])) - center) / scale
            return np.asarray(scale * _expected(least - mean - xi / scale, deviation) * safe)

        return Scores(
            scale * improvement * safe,
            scale * hope * likely,
            noise,
            -float(model.surprises()[lowest]),
            second,
            float(scale * improvement.max()),
        )

    def _encode(self, points: Sequence[Configuration]) -> np.ndarray:
        return with_nulls_apart(self._space, self._space.encode(points))

    def _log_expected(self, points: Sequence[Configuration], rows: np.ndarray) -> np.ndarray:
        """What the model corrects: the runner's prediction, and the share of earlier costs."""
        expected = log_predicted(self._hints, points)
        if self._belief is None or self._share == 0.0 or not len(rows):
            return expected
        return expected + self._share * self._belief.mean(rows)


def _expected(better: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """Expected improvement, given its mean and standard deviation."""
    ratio = better / deviation
    density = np.exp(-0.5 * ratio**2) / math.sqrt(2 * math.pi)
    return np.asarray(better * ndtr(ratio) + deviation * density)
