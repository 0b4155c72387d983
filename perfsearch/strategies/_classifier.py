"""A Gaussian process for what runs and what fails."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_solve, cholesky, solve_triangular
from scipy.special import log_ndtr, ndtr

from perfsearch.strategies._kernel import MixedKernel

_SCALES = (1.0, 4.0, 16.0)
"""Tried variances of the latent function, relative to those below; the most probable is kept."""

_OPTIMISM = 0.7
"""Mean of the latent function: without evidence three in four configurations run."""

_LINEAR, _OWN, _JOINT = 2.0, 1.0, 0.3
"""Variances: of a trend over the whole range of a knob, of a knob's own effect beside it, and of
what knobs do together."""

_LENGTH = 0.7
_NEWTON_STEPS = 50
_CLOSE_ENOUGH = 1e-6
_JITTER = 1e-6


class Classifier:
    """Probability of running over encoded configurations, by probit and Laplace's approximation.

    The latent function has a trend along each ordered knob, so that what lies beyond failures is
    expected to fail too; effects of each knob alone; and a term over all (Rasmussen and Williams,
    2006, algorithms 3.1 and 3.2). There is nothing to optimise but one scale of three.

    Args:
        rows: encoded configurations that were tried, shape (n, columns).
        ran: whether each ran, shape (n,).
        ordered: which columns may be compared by distance.

    """

    def __init__(self, rows: np.ndarray, ran: np.ndarray, ordered: np.ndarray) -> None:
        self._rows = rows
        self._ordered = ordered
        columns = len(ordered)
        variance = np.array([_OWN] * columns + [1e-9, _JOINT])
        self._kernel = MixedKernel(np.full(columns, _LENGTH), variance, ordered, np.ones(columns))
        signs = np.where(ran, 1.0, -1.0)
        base = self._covariance(rows, rows) + _JITTER * np.eye(len(rows))
        modes = [(_mode(scale * base, signs), scale) for scale in _SCALES]
        self._mode, self._scale = max(modes, key=lambda pair: pair[0].evidence)

    def probability(self, rows: np.ndarray) -> np.ndarray:
        """Of running, for encoded configurations."""
        cross = self._scale * self._covariance(rows, self._rows)
        mean = _OPTIMISM + cross @ self._mode.slope
        half = solve_triangular(self._mode.factor, self._mode.root[:, None] * cross.T, lower=True)
        variance = self._scale * self._variance(rows) - (half**2).sum(axis=0)
        return np.asarray(ndtr(mean / np.sqrt(1.0 + np.maximum(variance, 0.0))))

    def _covariance(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        trend = (left[:, self._ordered] - 0.5) @ (right[:, self._ordered] - 0.5).T
        return np.asarray(self._kernel(left, right) + 12.0 * _LINEAR * trend)

    def _variance(self, rows: np.ndarray) -> np.ndarray:
        trend = ((rows[:, self._ordered] - 0.5) ** 2).sum(axis=1)
        return np.asarray(self._kernel.diag(rows) + 12.0 * _LINEAR * trend)


@dataclass(frozen=True)
class _Mode:
    """Laplace's approximation around the most probable latent values.

    Attributes:
        slope: derivative of the log likelihood there.
        root: square root of minus its second derivative.
        factor: Cholesky factor of ``1 + root K root``.
        evidence: logarithm of the approximate marginal likelihood.

    """

    slope: np.ndarray
    root: np.ndarray
    factor: np.ndarray
    evidence: float


def _mode(covariance: np.ndarray, signs: np.ndarray) -> _Mode:
    latent = np.zeros(len(signs))  # less the mean
    weights = np.zeros(len(signs))
    before = -np.inf
    for _ in range(_NEWTON_STEPS):
        margin = signs * (latent + _OPTIMISM)
        ratio = np.exp(-0.5 * margin**2 - 0.5 * np.log(2 * np.pi) - log_ndtr(margin))
        slope, curvature = signs * ratio, np.maximum(ratio * (ratio + margin), 1e-12)
        root = np.sqrt(curvature)
        factor = cholesky(
            np.eye(len(signs)) + root[:, None] * covariance * root[None, :], lower=True
        )
        likelihood = float(log_ndtr(margin).sum() - 0.5 * weights @ latent)
        if likelihood - before < _CLOSE_ENOUGH:
            break
        before = likelihood
        aim = curvature * latent + slope
        weights = aim - root * cho_solve((factor, True), root * (covariance @ aim))
        latent = covariance @ weights
    evidence = likelihood - float(np.log(np.diag(factor)).sum())
    return _Mode(slope, root, factor, evidence)
