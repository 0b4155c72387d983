"""The covariance of a Gaussian process over ordered and unordered knobs."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from sklearn.gaussian_process.kernels import Hyperparameter, Kernel

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
