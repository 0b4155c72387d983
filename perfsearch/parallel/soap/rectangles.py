"""Arithmetic of rectangles."""

from __future__ import annotations

import math
from collections.abc import Iterable

from perfsearch.parallel.soap.axes import Rectangle


def intersection(a: Rectangle, b: Rectangle) -> Rectangle | None:
    """What both cover; ``None`` where that is nothing."""
    common = tuple(
        (max(low, other_low), min(high, other_high))
        for (low, high), (other_low, other_high) in zip(a, b, strict=True)
    )
    return common if all(low < high for low, high in common) else None


def hull(rectangles: Iterable[Rectangle]) -> Rectangle:
    """The smallest rectangle around all of them."""
    return tuple(
        (min(low for low, _ in ranges), max(high for _, high in ranges))
        for ranges in zip(*rectangles, strict=True)
    )


def volume(rectangle: Rectangle) -> int:
    """Number of elements."""
    return math.prod(high - low for low, high in rectangle)


def within(inner: Rectangle, outer: Rectangle) -> tuple[slice, ...]:
    """Slices that cut ``inner`` out of a tensor that holds ``outer``."""
    return tuple(
        slice(low - start, high - start)
        for (low, high), (start, _) in zip(inner, outer, strict=True)
    )


def holds(outer: Rectangle, inner: Rectangle) -> bool:
    """Whether ``outer`` covers all of ``inner``."""
    return all(
        start <= low and high <= end for (low, high), (start, end) in zip(inner, outer, strict=True)
    )
