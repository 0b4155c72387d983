"""How far losses of two runs of the same computation are apart."""

from __future__ import annotations

import math
from collections.abc import Sequence

_SMALL = 0.05
"""An absolute tolerance is at most this share of the largest loss: losses of a thousandth would
otherwise agree whatever was computed."""


def loss_disagreement(
    reference: Sequence[float],
    losses: Sequence[float],
    tolerance: float,
    whose: str = "the baseline",
    resolution: float = 0.0,
    allowance: float = 0.0,
) -> str:
    """Compare the losses of the first steps after the common start, at the same global batch.

    Args:
        reference: means over ranks.
        losses: the trial's; the shorter of both lengths is compared.
        tolerance: largest allowed difference relative to the reference, or absolute where that is
            below 1, but then at most a twentieth of the largest reference.
        whose: the reference is, for people.
        resolution: of the losses' type, relative to them, which they may differ by in any case.
        allowance: difference relative to the reference that is allowed, too, whatever its size.

    Returns:
        One line saying where they part, empty when they agree.

    """
    if not losses:
        return "no first losses were recorded, so the computation cannot be compared"
    largest = max(map(abs, reference), default=0.0)
    absolute = min(tolerance, _SMALL * largest) if largest else tolerance
    for step, (expected, seen) in enumerate(zip(reference, losses, strict=False)):
        size = abs(expected)
        allowed = max(
            tolerance * size, absolute, resolution * size, allowance * max(size, _SMALL * largest)
        )
        if not math.isfinite(seen) or abs(seen - expected) > allowed:
            difference = abs(seen - expected) / max(1.0, size)
            limit = allowed / max(1.0, size)
            return (
                f"loss of step {step} is {seen:.6g} where {whose}'s is {expected:.6g} "
                f"(difference {difference:.2g}, tolerance {limit:.2g})"
            )
    return ""


def largest_difference(reference: Sequence[float], losses: Sequence[float]) -> float:
    """Relative to the reference, as ``loss_disagreement`` has it."""
    least = _SMALL * max(map(abs, reference), default=0.0)
    pairs = zip(reference, losses, strict=False)
    return max((abs(b - a) / (max(abs(a), least) or 1.0) for a, b in pairs), default=0.0)
