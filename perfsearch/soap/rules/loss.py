"""Rules of losses: split over their terms, each part gives its share of the sum."""

from __future__ import annotations

import math
from typing import Any

from perfsearch.soap.capture.lower import Call, Lowered, Value, broadcast, rule, same, whole
from perfsearch.soap.graph import Same, Whole

_NONE, _MEAN = 0, 1

LOSSES = frozenset(
    {
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "cross_entropy_loss",
        "nll_loss",
        "nll_loss_nd",
        "mean",
        "sum",
    }
)
"""Functions that are split over their terms where they are the loss, or a multiple of it is."""


@rule(
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)
def elementwise_loss(call: Call) -> Lowered | None:
    """A term per element."""
    value, target = call["self"], call["target"]
    if not _is_sum(call) or value.parameter or value.shape != target.shape:
        return None
    lowered = Lowered(
        "elementwise_loss",
        value.labels,
        (True,) * len(value.shape),
        shape=value.shape,
        flops=5.0 * math.prod(value.shape),
        precision="full",
    )
    arguments: dict[str, Any] = {}
    for name, argument in call.arguments.items():
        if isinstance(argument, Value):
            axes = broadcast(argument.shape, value.shape)
            arguments[name] = lowered.operand(argument, axes)
        else:
            arguments[name] = 2 if name == "reduction" else argument
    mean = call["reduction"] == _MEAN
    lowered.attributes = {
        "target": str(call.target),
        "arguments": arguments,
        "terms": math.prod(value.shape) if mean else 1,
    }
    return lowered


@rule("cross_entropy_loss", "nll_loss", "nll_loss_nd")
def class_loss(call: Call) -> Lowered | None:
    """A term per target; a mean is over those that are not ignored, on all parts."""
    value, target, weight = call["self"], call["target"], call["weight"]
    if not _is_sum(call) or len(target.shape) != len(value.shape) - 1 or len(value.shape) < 2:
        return None
    if weight is not None and weight.parameter:
        return None
    count = len(target.shape)
    lowered = Lowered(
        "class_loss",
        (value.labels[0], *value.labels[2:]),
        (True,) * count,
        shape=target.shape,
        flops=5.0 * math.prod(value.shape),
        precision="full",
    )
    lowered.attributes = {
        "normalise": call.name == "cross_entropy_loss",
        "ignore_index": call["ignore_index"],
        "label_smoothing": call.get("label_smoothing", 0.0),
        "mean": call["reduction"] == _MEAN,
        "weighted": weight is not None,
    }
    spatial = tuple(Same(i) for i in range(1, count))
    lowered.operand(value, (Same(0), Whole(value.shape[1]), *spatial))
    lowered.operand(target, same(count))
    if weight is not None:
        lowered.operand(weight, whole(weight.shape))
    return lowered


def total(call: Call) -> Lowered | None:
    """The mean or the sum of everything, where it is the loss."""
    value = call.get("self")
    if value is None or value.parameter or not value.shape:
        return None
    lowered = Lowered(
        "total",
        value.labels,
        (True,) * len(value.shape),
        shape=value.shape,
        attributes={"terms": math.prod(value.shape) if call.name == "mean" else 1},
        flops=float(math.prod(value.shape)),
    )
    lowered.operand(value, same(len(value.shape)))
    return lowered


def _is_sum(call: Call) -> bool:
    """A loss can be split where it is the graph's output, so that its parts only have to add up."""
    return call.is_output and call["reduction"] != _NONE
