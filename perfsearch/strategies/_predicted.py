"""What a runner predicts, as a model's prior mean."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perfsearch.core.hints import Hints
from perfsearch.core.knob import Configuration


def log_predicted(hints: Hints, points: Sequence[Configuration]) -> np.ndarray:
    """Logarithms of the costs that the runner predicts, shape (points,).

    Zeros where it predicts none; the baseline decides, and a single configuration that cannot
    be predicted gets the baseline's.
    """
    start = hints.predict(hints.baseline).cost
    if start is None or start <= 0:
        return np.zeros(len(points))
    costs = [hints.predict(point).cost for point in points]
    return np.log([start if c is None or c <= 0 else c for c in costs])
