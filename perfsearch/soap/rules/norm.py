"""Rules of normalisations and of reductions over dimensions."""

from __future__ import annotations

import math

from perfsearch.soap.capture.lower import (
    Call,
    Lowered,
    Value,
    called,
    positive,
    rule,
    same,
    whole,
)
from perfsearch.soap.graph import Same, Whole


@rule("softmax", "log_softmax", "_softmax", "_log_softmax", "cumsum")
def along(call: Call) -> Lowered | None:
    """Whole along one dimension."""
    name = "self" if "self" in call.arguments else "input"
    value = call[name]
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
    return called(lowered, call, {name: axes})


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
    return called(lowered, call, {"self": axes})


@rule("topk", "sort", "argsort", "max", "min", "kthvalue", "median", "mode", "argmax", "argmin")
def selection(call: Call) -> Lowered | None:
    """By order along one dimension, which is whole; several outputs come as one each."""
    value, dim = call["self"], call.get("dim")
    if dim is None or not value.shape:
        return None
    count = len(value.shape)
    dim = positive(dim, count)
    kept = [d for d in range(count) if d != dim or len(call.shape) == count]
    places = {d: place for place, d in enumerate(kept)}
    axes = [Whole(n) if d == dim else Same(places[d]) for d, n in enumerate(value.shape)]
    lowered = Lowered(
        "call",
        tuple(value.labels[d] for d in kept),
        tuple(d != dim for d in kept),
        flops=5.0 * math.prod(value.shape),
    )
    lowered = called(lowered, call, {"self": axes})
    lowered.attributes["output"] = call.output
    return lowered


def by_indices(call: Call, indices: Value) -> Lowered:
    """The values that a selection along a dimension gives, by their indices."""
    value = call["self"]
    count = len(value.shape)
    dim = positive(call["dim"], count)
    kept = len(call.shape) == count
    places = [d if kept or d < dim else d - 1 for d in range(count)]
    lowered = Lowered("picked", indices.labels, (True,) * len(call.shape))
    lowered.attributes = {"dim": dim, "kept": kept}
    axes = [Whole(n) if d == dim else Same(places[d]) for d, n in enumerate(value.shape)]
    lowered.operand(value, axes)
    lowered.operand(indices, same(len(call.shape)))
    return lowered
