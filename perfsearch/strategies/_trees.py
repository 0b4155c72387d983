"""A forest of randomised trees: a second opinion that assumes no smoothness."""

from __future__ import annotations

from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

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
