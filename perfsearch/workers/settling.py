"""When step times have settled, and how many steps to score. Pure functions, no torch."""

from __future__ import annotations


def is_steady(seconds: list[float], least: int = 3, tolerance: float = 0.2) -> bool:
    """Whether the last steps of a series look like each other.

    Args:
        seconds: of every step since the configuration was put into force.
        least: steps that are never enough by themselves: buckets are rebuilt after the first.
        tolerance: largest difference of the last two steps, relative to the smaller.

    """
    if len(seconds) < least:
        return False
    smaller, larger = sorted(seconds[-2:])
    return larger <= smaller * (1 + tolerance)


def steps_to_fill(seconds: float, step_seconds: float, bounds: tuple[int, int]) -> int:
    """How many steps cover ``seconds``, within ``bounds``."""
    low, high = bounds
    return int(max(low, min(high, seconds / max(step_seconds, 1e-9))))
