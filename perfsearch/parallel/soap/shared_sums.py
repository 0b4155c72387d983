"""Which parts of an operator exchange sums while they compute, and how much."""

from __future__ import annotations

from collections.abc import Sequence

from perfsearch.parallel.soap.axes import Rectangle
from perfsearch.parallel.soap.graph import Operator
from perfsearch.parallel.soap.layouts import item_bytes
from perfsearch.parallel.soap.rules import stage_rectangles

_DOUBLE_BYTES = 8
_LEAST_BYTES = 4  # half precision is computed with in single


def partners(operator: Operator, parts: Sequence[Rectangle]) -> list[tuple[int, ...]]:
    """By part, the parts whose sums it needs, itself included; empty where there are no sums.

    Batch norm sums over parts with the same channels, a loss over all of its parts.
    """
    if operator.kind == "class_loss":
        return [tuple(range(len(parts)))] * len(parts)
    if operator.kind == "batch_norm":
        channels = [stage_rectangles(operator, part)[0][1] for part in parts]
        return [
            tuple(place for place, other in enumerate(channels) if other == mine)
            for mine in channels
        ]
    return []


def shares_statistics(operator: Operator, part: Rectangle) -> bool:
    """Whether the part is a batch norm's and has not all elements of its channels."""
    if operator.kind != "batch_norm":
        return False
    own, shape = stage_rectangles(operator, part)[0], operator.stages[0].shape
    return any(dim != 1 and span != (0, shape[dim]) for dim, span in enumerate(own))


def summed_bytes(operator: Operator, part: Rectangle, gradient: bool) -> tuple[int, int]:
    """Bytes that a part has summed with its partners, forward and backward; 0: there is no sum.

    Args:
        operator: has partners.
        part: of it.
        gradient: whether backward computes the gradient of its first input.

    """
    size = max(item_bytes(operator.stages[0].dtype), _LEAST_BYTES)
    if operator.kind == "class_loss":
        return (size if operator.attributes["mean"] else 0), 0
    low, high = stage_rectangles(operator, part)[0][1]
    return 2 * (high - low) * _DOUBLE_BYTES, 2 * (high - low) * size if gradient else 0
