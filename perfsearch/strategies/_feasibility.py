"""How likely a configuration is to run at all, learned apart from how fast it is."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.stats import norm

from perfsearch.core.hints import Hints
from perfsearch.core.knob import Configuration
from perfsearch.core.space import Space
from perfsearch.core.trial import Trial
from perfsearch.strategies._classifier import Classifier
from perfsearch.strategies._gp import Model, Prior, fit

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
