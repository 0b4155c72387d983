"""Rules of normalisations and of reductions over dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from perfsearch.soap.capture.lower import Call, Lowered, Value, positive, rule, same, whole
from perfsearch.soap.graph import Axis, Same, Whole


def _call(lowered: Lowered, call: Call, axes: Sequence[Axis], value: Value) -> Lowered:
    """The function itself on the part, its other arguments unchanged."""
    lowered.attributes = {
        "target": str(call.target),
        "arguments": {
            name: lowered.operand(argument, axes) if argument is value else argument
            for name, argument in call.arguments.items()
        },
    }
    return lowered


@rule("softmax", "log_softmax", "_softmax", "_log_softmax", "cumsum")
def along(call: Call) -> Lowered | None:
    """Whole along one dimension."""
    value = call.get("self", call.get("input"))
    count = len(value.shape)
    if not count or value.parameter:
        return None
    dim = positive(call["dim"], count)
    axes = [Whole(value.shape[i]) if i == dim else Same(i) for i in range(count)]
    lowered = Lowered(
        "call",
        value.labels,
        tuple(i != dim for i in range(count)),
        flops=5.0 * math.prod(value.shape),
        precision="full",
    )
    return _call(lowered, call, axes, value)


@rule("layer_norm", "rms_norm")
def layer_norm(call: Call) -> Lowered | None:
    """Whole over the dimensions that are normalised."""
    value, weight, bias = call["input"], call["weight"], call.get("bias")
    count = len(value.shape)
    first = count - len(call["normalized_shape"])
    for parameter in (weight, bias):
        if parameter is not None and not parameter.parameter:
            return None
    lowered = Lowered(
        call.name,
        value.labels,
        tuple(i < first for i in range(count)),
        attributes={"normalized_shape": list(call["normalized_shape"]), "eps": call["eps"]},
        flops=8.0 * math.prod(value.shape),
        precision="full",
    )
    lowered.operand(value, (*same(first), *whole(value.shape[first:])))
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            lowered.operand(parameter, whole(parameter.shape), name)
    return lowered


@rule("batch_norm")
def batch_norm(call: Call) -> Lowered | None:
    """Over the whole batch: parts that share channels all-reduce their partial sums."""
    value, weight, bias = call["input"], call["weight"], call["bias"]
    means, variances = call["running_mean"], call["running_var"]
    if not call["training"]:
        return _frozen_norm(call)
    if (means is None) != (variances is None) or call["momentum"] is None:
        return None
    count = len(value.shape)
    lowered = Lowered(
        "batch_norm",
        value.labels,
        (True,) * count,
        attributes={
            "eps": call["eps"],
            "momentum": call["momentum"],
            "count": math.prod(value.shape) // value.shape[1],
            "running": [] if means is None else [means.name, variances.name],
        },
        flops=10.0 * math.prod(value.shape),
    )
    lowered.operand(value, same(count))
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            if not parameter.parameter:
                return None
            lowered.operand(parameter, (Same(1),), name)
    return lowered


def _frozen_norm(call: Call) -> Lowered | None:
    """With kept statistics it is elementwise."""
    value: Value = call["input"]
    count = len(value.shape)
    lowered = Lowered("call", value.labels, (True,) * count, flops=4.0 * math.prod(value.shape))
    lowered.attributes = {
        "target": str(call.target),
        "arguments": {
            name: lowered.operand(v, same(count) if v is value else (Same(1),), name)
            if isinstance(v, Value)
            else v
            for name, v in call.arguments.items()
        },
    }
    return lowered


@rule(
    "linalg_vector_norm",
    "mean",
    "sum",
    "amax",
    "amin",
    "prod",
    "var",
    "std",
    "logsumexp",
    "any",
    "all",
)
def reduction(call: Call) -> Lowered | None:
    """Whole along what is reduced."""
    value = call["self"]
    count = len(value.shape)
    dims = call.get("dim")
    if dims is None or value.parameter:
        return None
    reduced = {positive(d, count) for d in ([dims] if isinstance(dims, int) else dims)}
    if not reduced:
        return None
    kept = [d for d in range(count) if call["keepdim"] or d not in reduced]
    places = {dim: place for place, dim in enumerate(kept)}
    axes = [Whole(value.shape[d]) if d in reduced else Same(places[d]) for d in range(count)]
    lowered = Lowered(
        "call",
        tuple(value.labels[d] for d in kept),
        tuple(d not in reduced for d in kept),
        flops=float(math.prod(value.shape)),
    )
    return _call(lowered, call, axes, value)
