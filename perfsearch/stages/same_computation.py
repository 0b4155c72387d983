"""Whether two configurations train the same model the same way, as far as their losses tell."""

from __future__ import annotations

import math
from collections.abc import Sequence

_SMALL = 0.05
"""An absolute tolerance is at most this share of the largest loss: losses of a thousandth would
otherwise agree whatever was computed."""


def disagreement(
    reference: Sequence[float],
    losses: Sequence[float],
    tolerance: float,
    whose: str = "the baseline",
    resolution: float = 0.0,
) -> str:
    """Compare the losses of the first steps after the common start, at the same global batch.

    Args:
        reference: means over ranks.
        losses: the trial's; the shorter of both lengths is compared.
        tolerance: largest allowed difference relative to the reference, or absolute where that is
            below 1, but then at most a twentieth of the largest reference.
        whose: the reference is, for people.
        resolution: of the losses' type, relative to them, which they may differ by in any case.

    Returns:
        One line saying where they part, empty when they agree.

    """
    if not losses:
        return "no first losses were recorded, so the computation cannot be compared"
    largest = max(map(abs, reference), default=0.0)
    absolute = min(tolerance, _SMALL * largest) if largest else tolerance
    for step, (expected, seen) in enumerate(zip(reference, losses, strict=False)):
        size = abs(expected)
        allowed = max(tolerance * size, absolute, resolution * size)
        if not math.isfinite(seen) or abs(seen - expected) > allowed:
            difference = abs(seen - expected) / max(1.0, size)
            limit = allowed / max(1.0, size)
            return (
                f"loss of step {step} is {seen:.6g} where {whose}'s is {expected:.6g} "
                f"(difference {difference:.2g}, tolerance {limit:.2g})"
            )
    return ""
