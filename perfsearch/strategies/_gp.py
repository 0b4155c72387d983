"""A small Gaussian process for mixed spaces and few, noisy, costly observations."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.linalg import cho_solve
from scipy.optimize import minimize
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import WhiteKernel
from threadpoolctl import threadpool_limits

from perfsearch.strategies._kernel import MixedKernel

_ROUGH_LENGTH, _ROUGH_PRODUCT = 0.2, 8.0
"""Factors on the expected length scales and on the product's variance from which a second fit
starts: from smooth ones alone it may end where a narrow valley is taken for noise."""


@dataclass(frozen=True)
class Prior:
    """Log-normal priors of the hyperparameters: median and standard deviation of the logarithm.

    Attributes:
        length_scale: of every column.
        main: variance of each column's own term, times the number of columns.
        weight: relative size of the columns' own terms, and of their parts in pairs, shape
            (columns,); ``None``: all alike.
        pairs: variance of the term over pairs.
        product: variance of the product term.
        noise: variance of the noise.

    """

    length_scale: tuple[float, float] = (0.7, 0.8)
    main: tuple[float, float] = (1.0, 1.5)
    weight: np.ndarray | None = None
    pairs: tuple[float, float] = (0.5, 1.5)
    product: tuple[float, float] = (0.1, 1.5)
    noise: tuple[float, float] = (0.01, 1.0)


@dataclass(frozen=True)
class Model:
    """A fitted process; predictions are of the noise-free function."""

    regressor: Any
    noise_variance: float

    def predict(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation at encoded ``rows``."""
        with threadpool_limits(1):
            mean, deviation = self.regressor.predict(rows, return_std=True)
        variance = np.maximum(deviation**2 - self.noise_variance, 1e-12)
        return np.asarray(mean), np.sqrt(variance)

    def prior_variance(self, rows: np.ndarray) -> np.ndarray:
        """What was unknown at encoded ``rows`` before anything was seen."""
        return np.asarray(self.regressor.kernel_.k1.diag(rows))

    def surprises(self) -> np.ndarray:
        """Residual of each fitted row over its standard deviation, predicted from all the other
        rows; believed rows come last (Rasmussen and Williams, 2006, section 5.4.2).
        """
        regressor = self.regressor
        with threadpool_limits(1):  # the same to the last bit on a resume with other threads
            inverse = cho_solve((regressor.L_, True), np.eye(len(regressor.L_)))
            weighted = inverse @ regressor.y_train_
        return np.asarray(weighted / np.sqrt(np.diag(inverse)))

    def covariance(self, rows: np.ndarray) -> np.ndarray:
        """What is still unknown at encoded ``rows``, shape (rows, rows)."""
        with threadpool_limits(1):
            _, covariance = self.regressor.predict(rows, return_cov=True)
        return np.asarray(covariance) - self.noise_variance * np.eye(len(rows))


def fit(
    rows: np.ndarray,
    target: np.ndarray,
    ordered: np.ndarray,
    *,
    error: np.ndarray | None = None,
    noise: float | None = None,
    prior: Prior | None = None,
    believe: tuple[np.ndarray, float] | None = None,
) -> Model:
    """Fit the hyperparameters at their most probable values given the data and ``prior``.

    Args:
        rows: encoded configurations, shape (n, columns).
        target: values, of about unit scale and zero mean, shape (n,).
        ordered: which columns may be compared by distance.
        error: known standard error of each value, added to the learned noise.
        noise: fixed standard deviation of the noise; ``None`` learns it.
        prior: priors of the hyperparameters.
        believe: rows without a value, and how many posterior standard deviations above the mean
            they are assumed to lie; conditioned on after the fit (pending trials).

    """
    prior = prior or Prior()
    columns = rows.shape[1]
    expected = expected_kernel(ordered, prior)
    medians = np.concatenate(
        [
            expected.length_scale,
            expected.variance,
            [prior.noise[0] if noise is None else noise**2],
        ]
    )
    widths = np.concatenate(
        [
            np.full(columns, prior.length_scale[1]),
            np.full(columns, prior.main[1]),
            [prior.pairs[1], prior.product[1], prior.noise[1]],
        ]
    )
    free = len(medians) - (noise is not None)
    kernel = expected + WhiteKernel(medians[-1], "fixed" if noise is not None else (1e-8, 1e2))
    known = np.full(len(rows), 1e-8) if error is None else 1e-8 + error**2
    regressor = GaussianProcessRegressor(
        kernel,
        alpha=known,
        optimizer=_most_probable(np.log(medians[:free]), widths[:free]),
    )
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        regressor.fit(rows, target)
        noise_variance = float(regressor.kernel_.k2.noise_level)
        if believe is not None and len(believe[0]):
            mean, deviation = Model(regressor, noise_variance).predict(believe[0])
            joint = GaussianProcessRegressor(
                regressor.kernel_,
                alpha=np.concatenate([known, np.full(len(believe[0]), 1e-8)]),
                optimizer=None,
            )
            joint.fit(
                np.vstack([rows, believe[0]]),
                np.concatenate([target, mean + believe[1] * deviation]),
            )
            regressor = joint
    return Model(regressor, noise_variance)


def expected_kernel(ordered: np.ndarray, prior: Prior) -> MixedKernel:
    """The covariance that ``prior`` expects before anything was seen.

    Args:
        ordered: which columns may be compared by distance.
        prior: its medians count.

    """
    columns = len(ordered)
    weight = np.ones(columns) if prior.weight is None else prior.weight / np.mean(prior.weight)
    variance = [*(prior.main[0] / columns * weight), prior.pairs[0], prior.product[0]]
    length = np.full(columns, prior.length_scale[0])
    return MixedKernel(length, np.array(variance), ordered, weight)


def _most_probable(center: np.ndarray, width: np.ndarray) -> Callable[..., Any]:
    """An optimizer for scikit-learn that adds a Gaussian prior on the log-parameters."""

    def optimize(
        objective: Callable[..., Any], initial: np.ndarray, bounds: np.ndarray
    ) -> tuple[np.ndarray, float]:
        def penalised(theta: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = objective(theta, eval_gradient=True)
            away = (theta - center) / width
            return float(value) + 0.5 * float(away @ away), gradient + away / width

        columns = (len(center) - 2) // 2  # a noise, where it is free, changes nothing here
        rough = np.array(initial)
        rough[:columns] += math.log(_ROUGH_LENGTH)
        rough[2 * columns + 1] += math.log(_ROUGH_PRODUCT)
        ends = [
            minimize(
                penalised,
                start,
                jac=True,
                method="L-BFGS-B",
                bounds=bounds,
                options={"maxiter": 60},
            )
            for start in (initial, rough)
        ]
        best = min(ends, key=lambda end: float(end.fun))
        return best.x, float(best.fun)

    return optimize
