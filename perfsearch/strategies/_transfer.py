"""How far a prior search of a similar job may be believed, and what it lets expect."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from perfsearch.core.hints import Hints
from perfsearch.core.knob import Configuration
from perfsearch.core.space import Space
from perfsearch.strategies._candidates import with_nulls_apart
from perfsearch.strategies._gp import Model, Prior, expected_kernel, fit

_CORRELATIONS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98)
"""Correlations of the two jobs' costs that are thought equally likely before any trial."""

_LEAST_SPREAD = 0.02
"""Standard deviation of the logarithm of a cost that is assumed at least."""

_ANY_LEVEL = 100.0
"""Variance of the mean cost, relative to that of its logarithm: nothing is assumed of the level."""

_FEWEST = 2
"""Costs of which one can be lower than another."""


class Belief:
    """Costs that a prior search lets expect, and a weight that follows from the own trials.

    The prior costs are smoothed by a Gaussian process with a noise of its own. The own job's
    costs are taken to be ``share`` times that function plus one that is not known; the share is
    the mean of the two jobs' correlation given the own trials, over a few values of it, each
    weighed by the marginal likelihood of the trials (the autoregressive model of Kennedy and
    O'Hagan, 2000, with the hyperparameters held at their priors); what the prior search left
    unknown speaks neither for nor against it.

    Args:
        space: of the search.
        prior: of the process.
        points: canonical configurations, best first, at least one.
        logs: logarithms of their relative costs, shape (points,).

    """

    def __init__(
        self, space: Space, prior: Prior, points: Sequence[Configuration], logs: np.ndarray
    ) -> None:
        self._ordered = space.ordered_columns
        self._prior = prior
        self._rows = with_nulls_apart(space, space.encode(points))
        self._spread = max(float(np.std(logs)), _LEAST_SPREAD)
        self._target = (logs - float(np.mean(logs))) / self._spread
        self._model: Model | None = None
        self.best = [dict(point) for point in points if space.feasible(point)]

    def mean(self, rows: np.ndarray) -> np.ndarray:
        """Expected logarithm of the cost at encoded ``rows``, less its mean; shape (rows,)."""
        return np.asarray(self._spread * self._fitted().predict(rows)[0])

    def deviation(self, rows: np.ndarray) -> np.ndarray:
        """Standard deviation of what ``mean`` is the mean of, as the prior search left it."""
        return np.asarray(self._spread * self._fitted().predict(rows)[1])

    def share(self, rows: np.ndarray, logs: np.ndarray, error: np.ndarray) -> float:
        """How much of ``mean`` to believe, 0 to 1, given own trials.

        Args:
            rows: encoded configurations of the own trials.
            logs: logarithms of their costs.
            error: standard errors of ``logs``.

        """
        if len(rows) < 2:
            return float(np.mean(_CORRELATIONS))
        mean, unknown = self.mean(rows), self._spread**2 * self._fitted().covariance(rows)
        kernel = expected_kernel(self._ordered, self._prior)
        covariance = kernel(rows)
        covariance /= covariance[0, 0]
        variance = max(self._spread, float(np.std(logs))) ** 2
        known = np.diag(error**2 + _LEAST_SPREAD**2) + _ANY_LEVEL * variance
        evidence = []
        for correlation in _CORRELATIONS:
            rest = logs - np.mean(logs) - correlation * (mean - np.mean(mean))
            whole = (1.0 - correlation**2) * variance * covariance + known
            whole += correlation**2 * unknown
            triangle = np.linalg.cholesky(whole)
            solved = np.linalg.solve(triangle, rest)
            log_determinant = 2.0 * float(np.sum(np.log(np.diag(triangle))))
            evidence.append(-0.5 * (float(solved @ solved) + log_determinant))
        likely = np.exp(np.array(evidence) - max(evidence))
        return float(likely @ np.array(_CORRELATIONS) / likely.sum())

    def _fitted(self) -> Model:
        """Fitted when it is first needed, as that takes as long as a proposal."""
        if self._model is None:
            self._model = fit(self._rows, self._target, self._ordered, prior=self._prior)
        return self._model


def believed(space: Space, hints: Hints, prior: Prior) -> Belief | None:
    """The belief, where there is anything to believe: some finite costs in this space.

    Where the runner predicts costs, it is in what they differ from the predicted ones.
    """
    found = () if hints.prior_search is None else hints.prior_search.costs
    fitting = [(c, log) for c, log in found if math.isfinite(log) and _fits(space, c)]
    if len(fitting) < _FEWEST:
        return None
    points = [space.canonical(configuration) for configuration, _ in fitting]
    logs = np.array([log for _, log in fitting]) - log_predicted(hints, points)
    return Belief(space, prior, points, logs)


def _fits(space: Space, configuration: Configuration) -> bool:
    """Whether every knob has a value of its own there; constraints may differ between jobs."""
    return all(k.name in configuration and k.contains(configuration[k.name]) for k in space.knobs)


def log_predicted(hints: Hints, points: Sequence[Configuration]) -> np.ndarray:
    """Logarithms of the costs that the runner predicts, a model's prior mean; shape (points,).

    Zeros where it predicts none; the baseline decides, and a single configuration that cannot
    be predicted gets the baseline's.
    """
    start = hints.predict(hints.baseline).cost
    if start is None or start <= 0:
        return np.zeros(len(points))
    costs = [hints.predict(point).cost for point in points]
    return np.log([start if c is None or c <= 0 else c for c in costs])
