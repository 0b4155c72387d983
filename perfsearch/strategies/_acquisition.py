"""The acquisition function: expected improvement, times the probability of running."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr
from scipy.stats import norm

from perfsearch.core.hints import Hints
from perfsearch.core.knob import Configuration, Value
from perfsearch.core.space import Space
from perfsearch.core.trial import Trial
from perfsearch.strategies._candidates import with_nulls_apart
from perfsearch.strategies._gp import Classifier, Forest, Model, Prior, fit, telling
from perfsearch.strategies._history import History, cost_of, log_costs
from perfsearch.strategies._transfer import Belief, log_predicted

_LEAST_LIKELY = 0.4
"""What is less likely to run than this is left for when nothing else is left, or for the final
exploration before the end."""

_NOISE = 0.02
"""Relative noise between two trials of a configuration, as expected before any was seen."""

_NOISE_SPREAD = 0.7
"""Standard deviation of the logarithm of its variance: what the model does not explain is rarely
noise, as each trial's own is known."""

_CENSORED_ERROR = 0.1
"""Error of the logarithm of a cost that is known as a lower bound only."""

_MOST_TRIALS, _MOST_OTHERS = 200, 100
"""Measured trials that the model is made of, and the latest of those that failed or were cut short:
time grows with the third power of them."""

_OPTIMISM = 2.0
"""Standard deviations below the mean at which a cost is still thought possible."""


class Acquisition:
    """Scores configurations by the trials so far.

    Args:
        space: encodes configurations.
        hints: predicted costs and peaks, where the runner has them.
        history: trials that ended, and proposals whose trials have not.
        belief: what a prior search lets expect; ``None`` without one.
        share: how much of it to believe, 0 to 1.

    """

    def __init__(
        self, space: Space, hints: Hints, history: History, belief: Belief | None, share: float
    ) -> None:
        self._space, self._hints, self._history = space, hints, history
        self._belief, self._share = belief, share

    def scores(
        self,
        points: Sequence[dict[str, Value]],
        rows: np.ndarray,
        alpha: float | None,
        xi: float,
        weight: np.ndarray | None,
    ) -> Scores:
        """Score each of ``points``.

        Args:
            points: untried configurations.
            rows: their encoding.
            alpha: noise on unit-variance scores; ``None`` learns it.
            xi: improvement, relative, that counts as none.
            weight: how much each knob is expected to matter; ``None``: all alike.

        """
        measured = self._history.measured()
        kept = telling(log_costs(measured)[0], _MOST_TRIALS)
        measured, bounded = [measured[i] for i in kept], self._history.bounded()[-_MOST_OTHERS:]
        trials = [*measured, *bounded]
        seen = self._encode([t.configuration for t in trials])
        logs, errors = log_costs(trials)
        errors[len(measured) :] += _CENSORED_ERROR
        logs -= self._log_expected([t.configuration for t in trials], seen)
        center, scale = float(np.mean(logs)), max(float(np.std(logs)), 0.02)
        waiting = self._encode(list(self._history.outstanding.values()))
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
            # What the prior search left unknown, as far as the own trials have not settled it.
            unknown = self._share * self._belief.deviation(encoded) / scale
            deviation = deviation * np.sqrt(1.0 + unknown**2 / model.prior_variance(encoded))
        better = best - mean - xi / scale
        improvement = _expected_improvement(better, deviation)
        feasibility = Feasibility(
            self._space, self._hints, trials, self._history.failed()[-_MOST_OTHERS:]
        )
        likely = feasibility.probability(points, rows)
        any_safe = bool(likely.max() >= _LEAST_LIKELY)
        safe = np.where(likely >= _LEAST_LIKELY, likely, 0.0) if any_safe else likely
        optimistic = np.maximum(better + _OPTIMISM * deviation, 0.0)
        lowest = int(np.argmin([cost_of(t) for t in measured]))

        def by_forest() -> np.ndarray:
            forest = Forest(seen, (logs - center) / scale, self._history.seed + len(trials))
            mean, deviation = forest.predict(encoded)
            mean = mean + self._log_expected(points, encoded) / scale
            least = (math.log(cost_of(measured[lowest])) - center) / scale
            gain = _expected_improvement(least - mean - xi / scale, deviation)
            return np.asarray(scale * gain * safe)

        return Scores(
            gain=scale * improvement * safe,
            optimistic_gain=scale * optimistic * likely,
            noise=scale * math.sqrt(model.noise_variance),
            surprise=-float(model.surprises()[lowest]),
            by_forest=by_forest,
            largest_improvement=float(scale * improvement.max()),
        )

    def _encode(self, points: Sequence[Configuration]) -> np.ndarray:
        return with_nulls_apart(self._space, self._space.encode(points))

    def _log_expected(self, points: Sequence[Configuration], rows: np.ndarray) -> np.ndarray:
        """What the model corrects: the runner's prediction, and the share of the prior costs."""
        expected = log_predicted(self._hints, points)
        if self._belief is None or self._share == 0.0 or not len(rows):
            return expected
        return expected + self._share * self._belief.mean(rows)


@dataclass(frozen=True)
class Scores:
    """The acquisition function's values, as gains relative to the best cost so far.

    Attributes:
        gain: expected improvement, times the probability of running.
        optimistic_gain: improvement if the cost is far below the mean, times the same.
        noise: what was learned of the relative noise between trials.
        surprise: how far the best trial lies below what all the others let expect of it, in
            standard deviations.
        by_forest: makes ``gain`` anew by a forest of trees; for when the process expects none.
        largest_improvement: the largest expected improvement, whatever the probability of running.

    """

    gain: np.ndarray
    optimistic_gain: np.ndarray
    noise: float = 0.0
    surprise: float = 0.0
    by_forest: Callable[[], np.ndarray] | None = None
    largest_improvement: float = math.inf


def _expected_improvement(better: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """Given the mean and the standard deviation of the improvement."""
    ratio = better / deviation
    # Not ``norm.pdf`` and ``norm.cdf``: their checks of arguments cost more than the arithmetic.
    density = np.exp(-0.5 * ratio**2) / math.sqrt(2 * math.pi)
    return np.asarray(better * ndtr(ratio) + deviation * density)


# -----------------------------------------------------------------------------
# How likely a configuration is to run at all, learned apart from how fast it is.

_FEWEST_PEAKS = 3
_LEAST_SPREAD = 0.1
"""Peaks that differ by less than this (in the logarithm) say nothing of the cliff."""
_MEMORY = Prior(length_scale=(1.0, 0.7), noise=(1e-3, 1.0))
_LIMIT_QUANTILES = np.linspace(0.05, 0.95, 10)


class Feasibility:
    """Probability that a configuration runs, from failures and from measured peak memory.

    Memory is modelled as a smooth function of the knobs. Failures that lie beyond the largest
    peak that was survived are put down to it, whatever status they have: they bound the limit,
    and right up to the cliff nothing is held against a configuration. All other failures train a
    classifier over the knobs.

    Args:
        space: encodes configurations.
        hints: predicted peaks and the memory limit, where the runner has them.
        survived: trials that ran.
        failed: trials that failed.

    """

    def __init__(
        self, space: Space, hints: Hints, survived: Sequence[Trial], failed: Sequence[Trial]
    ) -> None:
        self.space = space
        self.hints = hints
        self._ordered = space.ordered_columns
        self._memory: Model | None = None
        self._limits = np.array([math.inf])
        self._classifier: Classifier | None = None
        known = [hints.predict(t.configuration).peak_gib or 0 for t in survived]
        self._predicts = len(known) > 0 and min(known) > 0
        peaks = _peaks(survived, 1 if self._predicts else _FEWEST_PEAKS)
        if peaks is not None:
            self._fit_memory(survived, peaks)
        unexplained = list(failed)
        if self._memory is not None and failed:
            unexplained = self._bound_limit(failed)
        if unexplained:
            rows = space.encode([t.configuration for t in (*survived, *unexplained)])
            ran = np.array([True] * len(survived) + [False] * len(unexplained))
            self._classifier = Classifier(rows, ran, self._ordered)

    def probability(self, points: Sequence[Configuration], rows: np.ndarray) -> np.ndarray:
        """Probability of running, for configurations and their encoding."""
        likely = np.ones(len(rows))
        if self._memory is not None and np.isfinite(self._limits).any():
            mean, deviation = self._predict_log_peak(points, rows)
            gap = (self._limits[None, :] - mean[:, None]) / np.maximum(deviation, 1e-3)[:, None]
            likely *= norm.cdf(gap).mean(axis=1)
        if self._classifier is not None:
            likely *= self._classifier.probability(rows)
        return np.asarray(likely)

    def _fit_memory(self, survived: Sequence[Trial], peaks: np.ndarray) -> None:
        points = [t.configuration for t in survived]
        logs = np.log(peaks)
        residual = logs - self._prior_log_peak(points)
        if np.ptp(logs) < _LEAST_SPREAD and not self._predicts:
            return
        self._center = float(np.mean(residual))
        doubt = 0.15 if len(logs) < _FEWEST_PEAKS else 0.05
        self._scale = max(float(np.std(residual)), doubt)
        self._memory = fit(
            self.space.encode(points),
            (residual - self._center) / self._scale,
            self._ordered,
            prior=_MEMORY,
        )
        self._survived_log_peak = float(np.max(logs))
        limit = self.hints.memory_limit_gib
        if limit is not None and limit > 0:
            self._limits = np.array([max(math.log(limit), self._survived_log_peak)])

    def _bound_limit(self, failed: Sequence[Trial]) -> list[Trial]:
        """Narrow the memory limit by the failures beyond it; return the other failures."""
        points = [t.configuration for t in failed]
        mean, deviation = self._predict_log_peak(points, self.space.encode(points))
        beyond = mean + 0.5 * deviation > self._survived_log_peak
        if beyond.any() and not np.isfinite(self._limits).all():
            low = self._survived_log_peak
            high = max(float(np.min(mean[beyond])), low + 0.02)
            self._limits = low + (high - low) * _LIMIT_QUANTILES
        return [t for t, explained in zip(failed, beyond, strict=True) if not explained]

    def _predict_log_peak(
        self, points: Sequence[Configuration], rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        assert self._memory is not None
        mean, deviation = self._memory.predict(rows)
        prior = self._prior_log_peak(points)
        log_peak: np.ndarray = prior + self._center + self._scale * mean
        return log_peak, self._scale * deviation

    def _prior_log_peak(self, points: Sequence[Configuration]) -> np.ndarray:
        """Logarithms of the runner's predictions; zeros where it predicts nothing.

        A single configuration that it cannot predict gets the mean of the others.
        """
        if not self._predicts:
            return np.zeros(len(points))
        predicted = np.array([self.hints.predict(point).peak_gib or np.nan for point in points])
        logs = np.log(np.where(predicted > 0, predicted, np.nan))
        known = logs[np.isfinite(logs)]
        return np.where(np.isfinite(logs), logs, known.mean() if len(known) else 0.0)


def _peaks(survived: Sequence[Trial], fewest: int) -> np.ndarray | None:
    """Reserved peaks where all of at least ``fewest`` trials have one, else allocated ones."""
    measured = [t.measurement for t in survived if t.measurement is not None]
    if len(measured) < max(fewest, len(survived)):
        return None
    for name in ("peak_reserved_gib", "peak_allocated_gib"):
        values = [getattr(m, name) for m in measured]
        if all(v is not None and v > 0 for v in values):
            return np.array(values, dtype=float)
    return None
