"""When step times have settled, and how many steps to score. Pure functions, no torch."""

from __future__ import annotations

import math

_DETAILED_EACH_S = 0.1
"""Timing the phases of a step takes up to a quarter of a millisecond: of so long, little."""

_GOLDEN = (math.sqrt(5) - 1) / 2

_LEAST_DETAILED = 8
"""Steps of a window whose phases are timed, if it has as many: they are told with an error."""


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


def detailed_each(step_seconds: float, count: int) -> int:
    """Of how many steps of a script one has its phases timed.

    Args:
        step_seconds: of a step.
        count: steps of the window.

    """
    wanted = math.ceil(_DETAILED_EACH_S / max(step_seconds, 1e-9))
    return max(1, min(wanted, count // _LEAST_DETAILED))


def is_detailed(place: int, each: int) -> bool:
    """Whether the phases of a step are timed, the window's first one being 0.

    One is in every stretch of ``each`` steps, at a place that changes by the golden ratio: what a
    script does in every tenth step, such as logging, is met as often as it happens.
    """
    stretch, at = divmod(place, each)
    return at == int(each * ((0.5 + stretch * _GOLDEN) % 1))
