"""A small Gaussian process for mixed spaces and few, noisy, costly observations."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.linalg import cho_solve
from scipy.optimize import minimize
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process.kernels import Hyperparameter, Kernel, WhiteKernel
from threadpoolctl import threadpool_limits

_ROUGH_LENGTH, _ROUGH_PRODUCT = 0.2, 8.0
"""Factors on the expected length scales and on the product's variance from which a second fit
starts: from smooth ones alone it may end where a narrow valley is taken for noise."""


_LEARNED_FROM = 100
"""Rows from which hyperparameters are learned, at most; all rows are then conditioned on. Each step
of learning them costs the square of this."""


def telling(values: np.ndarray, most: int) -> np.ndarray:
    """Places of at most ``most`` of the values, in order: half of them the smallest, the others
    evenly by rank, so that what is good is known well and the rest as a whole (a subset of data, as
    in Rasmussen and Williams, 2006, section 8.3).
    """
    if len(values) <= most:
        return np.arange(len(values))
    order, half = np.argsort(values, kind="stable"), most // 2
    others = half + np.arange(most - half) * (len(values) - half) // (most - half)
    return np.sort(np.concatenate([order[:half], order[others]]))


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
        few = telling(target, _LEARNED_FROM)
        if len(few) < len(rows):
            regressor.set_params(alpha=known[few]).fit(rows[few], target[few])
            regressor = GaussianProcessRegressor(regressor.kernel_, alpha=known, optimizer=None)
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


# -----------------------------------------------------------------------------
# The covariance of a Gaussian process over ordered and unordered knobs.

_SQRT5 = math.sqrt(5.0)


class MixedKernel(Kernel):  # type: ignore[misc]
    """A term a knob, one over all pairs, one over all knobs: main effects are learned fast, what
    two knobs do together soon, and the rest in the end.

    ``k(x, y) = sum_d a_d k_d + p sum_{d<e} w_d w_e k_d k_e / n + b prod_d k_d``, where ``k_d`` is a
    Matern kernel of smoothness 5/2 for an ordered column and ``exp(-[x_d != y_d] / l_d)`` (a
    Hamming kernel) for an unordered one, and ``n`` makes the middle term 1 at ``x = y``. The sums
    over pairs follow from those over columns (Duvenaud et al., 2011, additive processes).

    Args:
        length_scale: ``l_d``, shape (columns,).
        variance: ``a_1 .. a_D, p, b``, shape (columns + 2,); for a single column ``p`` has no term.
        ordered: which columns may be compared by distance, shape (columns,).
        share: ``w_d``, how much each column takes part in pairs, shape (columns,).

    """

    def __init__(
        self,
        length_scale: np.ndarray,
        variance: np.ndarray,
        ordered: np.ndarray,
        share: np.ndarray,
    ) -> None:
        self.length_scale = length_scale
        self.variance = variance
        self.ordered = ordered
        self.share = share

    @property
    def hyperparameter_length_scale(self) -> Hyperparameter:
        """Length scales, in units of the encoded columns."""
        return Hyperparameter("length_scale", "numeric", (1e-2, 1e2), np.size(self.length_scale))

    @property
    def hyperparameter_variance(self) -> Hyperparameter:
        """Variances of the main effects and of the product."""
        return Hyperparameter("variance", "numeric", (1e-6, 1e3), np.size(self.variance))

    def __call__(
        self, X: np.ndarray, Y: np.ndarray | None = None, eval_gradient: bool = False
    ) -> Any:
        """Covariance of the rows of ``X`` with those of ``Y``; its gradient by log-parameters."""
        if Y is not None:
            return self._across(X, Y)
        # Every pair once, and last a row with itself; most of an ask's time is spent here.
        first, second, whole = _pairs(len(X))
        gap = np.zeros((X.shape[1], len(first) + 1))
        gap[:, :-1] = np.abs(X[first] - X[second]).T
        covariance, gradient = self._of(gap, eval_gradient)
        full = covariance[whole]
        return full if gradient is None else (full, gradient[:, whole].transpose(1, 2, 0))

    def _across(self, X: np.ndarray, Y: np.ndarray) -> np.ndarray:
        """Covariance of the rows of ``X`` with those of ``Y``, of which ``X`` has many more.

        A column of ``X`` has few values that differ, so each is compared with ``Y`` once.
        """
        variance, share = np.atleast_1d(self.variance), self._share_of_pairs
        length = np.atleast_1d(self.length_scale)
        shape = (len(X), len(Y))
        covariance, total, squares = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        product = np.ones(shape)
        for column, ordered in enumerate(self.ordered):
            values, place = np.unique(X[:, column], return_inverse=True)
            gap = np.abs(values[:, None] - Y[None, :, column])
            t = _SQRT5 * gap / length[column]
            matern = (1.0 + t + t**2 / 3.0) * np.exp(-t)
            levels = matern if ordered else np.exp((gap > 1e-9) / -length[column])
            covariance += (variance[column] * levels)[place]
            total += (share[column] * levels)[place]
            squares += ((share[column] * levels) ** 2)[place]
            product *= levels[place]
        return np.asarray(
            covariance + variance[-2] * 0.5 * (total**2 - squares) + variance[-1] * product
        )

    def _of(self, gap: np.ndarray, eval_gradient: bool) -> tuple[np.ndarray, np.ndarray | None]:
        """Covariances of pairs that are ``gap`` apart, shape (columns, pairs), and gradients."""
        length = np.atleast_1d(self.length_scale)[:, None]
        variance = np.atleast_1d(self.variance)
        each = np.empty_like(gap)
        ordered, unordered = self.ordered, ~self.ordered
        t = _SQRT5 * gap[ordered] / length[ordered]
        decay = np.exp(-t)
        each[ordered] = (1.0 + t + t**2 / 3.0) * decay
        differs = (gap[unordered] > 1e-9) / length[unordered]
        each[unordered] = np.exp(-differs)
        product = np.prod(each, axis=0)
        share = self._share_of_pairs[:, None]
        weighted = each * share
        total = weighted.sum(axis=0)
        pairs = 0.5 * (total**2 - (weighted**2).sum(axis=0))
        covariance = variance[:-2] @ each + variance[-2] * pairs + variance[-1] * product
        if not eval_gradient:
            return covariance, None
        slope = np.empty_like(gap)
        slope[ordered] = t**2 * (1.0 + t) / 3.0 * decay
        slope[unordered] = each[unordered] * differs
        through_product = variance[-1] * product / np.maximum(each, 1e-300)
        through_pairs = variance[-2] * share * (total - weighted)
        by_length = slope * (variance[:-2, None] + through_pairs + through_product)
        by_variance = np.vstack([each, pairs, product]) * variance[:, None]
        return covariance, np.vstack([by_length, by_variance])

    @property
    def _share_of_pairs(self) -> np.ndarray:
        """``w_d`` scaled so that the sum over all pairs is 1; zeros where there is no pair."""
        share = np.asarray(self.share, dtype=float)
        whole = 0.5 * float(share.sum() ** 2 - (share**2).sum())
        return share / math.sqrt(whole) if whole > 1e-12 else np.zeros_like(share)

    def diag(self, X: np.ndarray) -> np.ndarray:
        """Prior variance of each row."""
        variance = np.atleast_1d(self.variance)
        pairs = variance[-2] if self._share_of_pairs.any() else 0.0
        return np.full(len(X), float(np.sum(variance[:-2]) + pairs + variance[-1]))

    def is_stationary(self) -> bool:
        """Whether it depends on differences only."""
        return True


@lru_cache(maxsize=8)
def _pairs(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First and second row of every pair, and the pair of every two rows, shape (rows, rows); a
    row with itself has the place behind the pairs.
    """
    first, second = np.triu_indices(rows, 1)
    whole = np.full((rows, rows), len(first))
    whole[first, second] = whole[second, first] = np.arange(len(first))
    return first, second, whole


# -----------------------------------------------------------------------------
# A forest of randomised trees: a second opinion that assumes no smoothness.

_TREES = 30

_LEAST_DEVIATION = 0.05
"""Where all trees agree they may still be wrong by this much, of unit-variance targets."""


class Forest:
    """Extremely randomised trees (Geurts et al., 2006) on bootstrap samples, grown to single rows.

    Mean and spread over the trees stand for mean and doubt, as in SMAC (Hutter et al., 2011).
    A tree cuts the space where neighbouring costs differ most, so it believes in a step or in a
    narrow valley at once, where a smooth process takes them for noise.

    Args:
        rows: encoded configurations, shape (n, columns).
        target: values, of about unit scale, shape (n,).
        seed: of the bootstrap and of the cuts.

    """

    def __init__(self, rows: np.ndarray, target: np.ndarray, seed: int) -> None:
        from sklearn.ensemble import ExtraTreesRegressor

        self._forest: Any = ExtraTreesRegressor(
            _TREES, bootstrap=True, random_state=seed % 2**32, n_jobs=1
        )
        with threadpool_limits(1):
            self._forest.fit(rows, target)

    def predict(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation at encoded ``rows``."""
        single = np.asarray(rows, dtype=np.float32)  # what the trees compare in
        each = np.array([t.predict(single, check_input=False) for t in self._forest.estimators_])
        return each.mean(axis=0), np.sqrt(each.var(axis=0) + _LEAST_DEVIATION**2)


# -----------------------------------------------------------------------------
# A Gaussian process for what runs and what fails.

_SCALES = (1.0, 4.0, 16.0)
"""Tried variances of the latent function, relative to those below; the most probable is kept."""

_LOGISTIC = 1.702**2
"""Variance of a latent function behind a logistic link relative to one behind a probit link."""

_LINEAR, _OWN, _JOINT = 2.0, 1.0, 0.3
"""Variances: of a trend over the whole range of a knob, of a knob's own effect beside it, and of
what knobs do together."""

_LENGTH = 0.7


class Classifier:
    """Probability of running over encoded configurations.

    The latent function has a trend along each ordered knob, so that what lies beyond failures is
    expected to fail too; effects of each knob alone; and a term over all. There is nothing to
    optimise but one scale of three.

    Args:
        rows: encoded configurations that were tried, shape (n, columns).
        ran: whether each ran, shape (n,); both occur.
        ordered: which columns may be compared by distance.

    """

    def __init__(self, rows: np.ndarray, ran: np.ndarray, ordered: np.ndarray) -> None:
        columns = len(ordered)
        variance = np.array([_OWN] * columns + [1e-9, _JOINT])
        kernel = _TrendKernel(np.full(columns, _LENGTH), variance, ordered, np.ones(columns))
        with threadpool_limits(1):
            fitted = [
                GaussianProcessClassifier(scale * _LOGISTIC * kernel, optimizer=None).fit(rows, ran)
                for scale in _SCALES
            ]
        self._model: Any = max(fitted, key=lambda model: model.log_marginal_likelihood_value_)

    def probability(self, rows: np.ndarray) -> np.ndarray:
        """Of running, for encoded configurations."""
        with threadpool_limits(1):
            return np.asarray(self._model.predict_proba(rows)[:, 1])


class _TrendKernel(MixedKernel):
    """The mixed kernel, and a trend along each ordered column; its hyperparameters are fixed."""

    def __call__(
        self, X: np.ndarray, Y: np.ndarray | None = None, eval_gradient: bool = False
    ) -> Any:
        other = X if Y is None else Y
        trend = (X[:, self.ordered] - 0.5) @ (other[:, self.ordered] - 0.5).T
        return super().__call__(X, other) + 12.0 * _LINEAR * trend

    def diag(self, X: np.ndarray) -> np.ndarray:
        trend = ((X[:, self.ordered] - 0.5) ** 2).sum(axis=1)
        return np.asarray(super().diag(X) + 12.0 * _LINEAR * trend)
