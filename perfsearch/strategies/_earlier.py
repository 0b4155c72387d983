"""How far an earlier search of a similar job may be believed, and what it lets expect."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from perfsearch.search.hints import Earlier
from perfsearch.search.knob import Configuration, Value
from perfsearch.search.space import Space
from perfsearch.strategies._candidates import with_nulls_apart
from perfsearch.strategies._gp import Model, Prior, expected_kernel, fit

_CORRELATIONS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98)
"""Correlations of the two jobs' costs that are thought equally likely before any trial."""

_LEAST_SPREAD = 0.02
"""Standard deviation of the logarithm of a cost that is assumed at least."""

_ANY_LEVEL = 100.0
"""Variance of the mean cost, relative to that of its logarithm: nothing is assumed of the level."""


class Belief:
    """Costs that an earlier search lets expect, and a weight that follows from the own trials.

    The earlier costs are smoothed by a Gaussian process with a noise of its own. The own job's
    costs are taken to be ``share`` times that function plus one that is not known; the share is
    the mean of the two jobs' correlation given the own trials, over a few values of it, each
    weighed by the marginal likelihood of the trials (the autoregressive model of Kennedy and
    O'Hagan, 2000, with the hyperparameters held at their priors); what the earlier search left
    unknown speaks neither for nor against it.

    Args:
        space: of the search.
        earlier: what was found; not empty.
        prior: of the process.
        predicted: logarithms of the costs that the runner predicts, which the process corrects.

    """

    def __init__(
        self,
        space: Space,
        earlier: Earlier,
        prior: Prior,
        predicted: Callable[[Sequence[Configuration]], np.ndarray],
    ) -> None:
        self._space = space
        self._prior = prior
        points = [configuration for configuration, _ in earlier.costs]
        logs = np.array([log for _, log in earlier.costs]) - predicted(points)
        self._rows = with_nulls_apart(space, space.encode(points))
        self._center = float(np.mean(logs))
        self._spread = max(float(np.std(logs)), _LEAST_SPREAD)
        self._target = (logs - self._center) / self._spread
        self._model: Model | None = None
        self.best = [space.canonical(p) for p in points if space.feasible(p)]

    def mean(self, rows: np.ndarray) -> np.ndarray:
        """Expected logarithm of the cost at encoded ``rows``, less its mean; shape (rows,)."""
        return np.asarray(self._spread * self._fitted().predict(rows)[0])

    def deviation(self, rows: np.ndarray) -> np.ndarray:
        """Standard deviation of what ``mean`` is the mean of, as the earlier search left it."""
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
        kernel = expected_kernel(self._space.ordered_columns, self._prior)
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
            ordered = self._space.ordered_columns
            self._model = fit(self._rows, self._target, ordered, prior=self._prior)
        return self._model


def believed(
    space: Space,
    earlier: Earlier | None,
    prior: Prior,
    predicted: Callable[[Sequence[Configuration]], np.ndarray],
) -> Belief | None:
    """The belief, where there is anything to believe: two finite costs in this space."""
    if earlier is None:
        return None
    fitting: list[tuple[dict[str, Value], float]] = []
    for configuration, log in earlier.costs:
        if math.isfinite(log) and fits(space, configuration):
            fitting.append((space.canonical(configuration), log))
    if len(fitting) < 2:
        return None
    return Belief(space, Earlier(earlier.source, tuple(fitting)), prior, predicted)


def fits(space: Space, configuration: Configuration) -> bool:
    """Whether every knob has a value of its own there; constraints may differ between jobs."""
    return all(
        knob.name in configuration and knob.contains(configuration[knob.name])
        for knob in space.knobs
    )
