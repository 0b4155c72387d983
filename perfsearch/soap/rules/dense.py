"""Rules of matrix products, embeddings and attention."""

from __future__ import annotations

import math
from collections.abc import Sequence

from perfsearch.soap.capture.lower import (
    Call,
    Lowered,
    Value,
    broadcast,
    broadcast_labels,
    called,
    rule,
    same,
    whole,
)
from perfsearch.soap.graph import Axis, Role, Same, Shape, Summed, Unfolded, Whole


@rule("linear")
def linear(call: Call) -> Lowered | None:
    """The output's last dimension is one of the weight: a parameter split, the input whole.

    Or parts share the sums over the input's last dimension.
    """
    value, weight, bias = call["input"], call["weight"], call["bias"]
    if len(weight.shape) != 2 or value.parameter:
        return None
    last = len(call.shape) - 1
    if not weight.parameter or (bias is not None and not bias.parameter):
        return _made_linear(call)
    lowered = Lowered(
        "linear",
        (*value.labels[:-1], Role.PARAMETER),
        (True,) * len(call.shape),
        attributes={"bias": bias is not None},
        flops=2.0 * math.prod(call.shape) * value.shape[-1],
        precision="lower",
    )
    lowered.operand(value, (*same(last), Summed(value.shape[-1])))
    lowered.operand(weight, (Same(last), Summed(weight.shape[1])), "weight")
    lowered.operand(bias, (Same(last),), "bias")
    return lowered


def _made_linear(call: Call) -> Lowered:
    """With a weight or bias that is computed, as a transposed or a normalised one."""
    value, weight, bias = call["input"], call["weight"], call["bias"]
    last = len(call.shape) - 1
    axes = {
        "input": (*same(last), Whole(value.shape[-1])),
        "weight": (Same(last), Whole(weight.shape[1])),
    }
    if bias is not None:
        axes["bias"] = broadcast(bias.shape, call.shape)
    lowered = Lowered(
        "call",
        (*value.labels[:-1], Role.PARAMETER),
        (True,) * len(call.shape),
        flops=2.0 * math.prod(call.shape) * value.shape[-1],
        precision="lower",
    )
    return called(lowered, call, axes)


@rule("addmm", "baddbmm")
def added_product(call: Call) -> Lowered | None:
    """A linear layer whose weight has inputs first, as GPT-2's; batched or not."""
    added, left, right = (
        call[n]
        for n in (
            ("self", "mat1", "mat2") if call.name == "addmm" else ("self", "batch1", "batch2")
        )
    )
    if left.parameter:
        return None
    count = len(call.shape)
    lead = same(count - 2)
    names = ("mat1", "mat2") if call.name == "addmm" else ("batch1", "batch2")
    axes = {
        "self": broadcast(added.shape, call.shape),
        names[0]: (*lead, Same(count - 2), Summed(left.shape[-1])),
        names[1]: (*lead, Summed(right.shape[-2]), Same(count - 1)),
    }
    labels = broadcast_labels([_batch_of(left), _batch_of(right)], call.shape[:-2])
    last = Role.PARAMETER if right.parameter or right.weighted else Role.ATTRIBUTE
    lowered = Lowered(
        "call",
        (*labels, left.labels[-2], last),
        (True,) * count,
        flops=2.0 * math.prod(call.shape) * left.shape[-1],
        precision="lower",
    )
    return called(lowered, call, axes)


@rule("einsum")
def einsum(call: Call) -> Lowered | None:
    """Every index that the result has; what is summed is whole."""
    tensors: list[Value] = call["tensors"]
    equation = _spelled_out(call["equation"], [len(v.shape) for v in tensors])
    if equation is None or all(v.parameter for v in tensors):
        return None
    terms, result = equation
    lengths: dict[str, int] = {}
    for value, term in zip(tensors, terms, strict=True):
        for size, index in zip(value.shape, term, strict=True):
            lengths[index] = max(size, lengths.get(index, 1))
    axes, labels = [], [Role.ATTRIBUTE] * len(result)
    for value, term in zip(tensors, terms, strict=True):
        found: list[Axis] = []
        for d, index in enumerate(term):
            place = result.find(index)
            full = value.shape[d] == lengths[index]
            found.append(Same(place) if place >= 0 and full else Whole(value.shape[d]))
            if place >= 0 and full and labels[place] is not Role.SAMPLE:
                label = value.labels[d]
                labels[place] = label if label is not Role.ATTRIBUTE else labels[place]
        axes.append(tuple(found))
    lowered = Lowered(
        "call",
        tuple(labels),
        (True,) * len(result),
        flops=2.0 * math.prod(lengths.values()),
        precision="lower",
    )
    return called(lowered, call, {"tensors": axes})


def _spelled_out(equation: str, counts: Sequence[int]) -> tuple[list[str], str] | None:
    """Terms and result without dots; ``None`` where an index is repeated in one of them."""
    left, arrow, result = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or len(terms) != len(counts):
        return None
    spare = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in equation]
    hidden = [n - len(t.replace("...", "")) for t, n in zip(terms, counts, strict=True)]
    dots = [n if "..." in t else 0 for t, n in zip(terms, hidden, strict=True)]
    most = "".join(spare[: max(dots)])
    terms = [t.replace("...", most[len(most) - n :]) for t, n in zip(terms, dots, strict=True)]
    result = result.replace("...", most)
    if any(len(set(t)) != len(t) for t in (*terms, result)):
        return None
    if any(len(t) != n for t, n in zip(terms, counts, strict=True)):
        return None
    return terms, result


@rule("matmul", "bmm", "mm")
def matmul(call: Call) -> Lowered | None:
    """Batched; the summed dimension is whole, or a share of it, which parts add up."""
    left, right = (v for v in call.arguments.values() if isinstance(v, Value))
    if len(left.shape) < 2 or len(right.shape) < 2:
        return None
    count = len(call.shape)
    rows: tuple[Axis, ...] = (Same(count - 2), Summed(left.shape[-1]))
    columns: tuple[Axis, ...] = (Summed(right.shape[-2]), Same(count - 1))
    batch = call.shape[:-2]
    labels = broadcast_labels([_batch_of(left), _batch_of(right)], batch)
    column_label = Role.PARAMETER if right.parameter else Role.ATTRIBUTE
    row_label = left.labels[-2]
    lowered = Lowered(
        "matmul",
        (*labels, row_label, column_label),
        (True,) * count,
        flops=2.0 * math.prod(call.shape) * left.shape[-1],
        precision="lower",
    )
    lowered.attributes = {
        "operands": [
            lowered.operand(left, (*broadcast(left.shape[:-2], batch), *rows)),
            lowered.operand(right, (*broadcast(right.shape[:-2], batch), *columns)),
        ]
    }
    return lowered


def _batch_of(value: Value) -> Value:
    return Value(value.name, value.shape[:-2], value.dtype, value.labels[:-2])


@rule("embedding")
def embedding(call: Call) -> Lowered | None:
    """Rows are whole; the width may be split.

    A sparse gradient is a dense one here: optimizers that take both come to the same weights.
    """
    weight, indices = call["weight"], call["indices"]
    if not weight.parameter or indices.parameter or call["scale_grad_by_freq"]:
        return None
    count = len(call.shape)
    lowered = Lowered(
        "embedding",
        (*indices.labels, Role.PARAMETER),
        (True,) * count,
        attributes={"padding_idx": call["padding_idx"]},
    )
    lowered.operand(indices, same(count - 1))
    lowered.operand(weight, (Whole(weight.shape[0]), Same(count - 1)), "weight")
    return lowered


@rule("embedding_bag")
def embedding_bag(call: Call) -> Lowered | None:
    """Sum or mean of rows. Bags of one size split over samples, ragged ones by width only."""
    weight, indices, offsets = call["weight"], call["indices"], call["offsets"]
    weights = call["per_sample_weights"]
    if not weight.parameter or call["mode"] not in (0, 1) or call["scale_grad_by_freq"]:
        return None
    if call.output != 0:
        return None
    if weights is not None or call["include_last_offset"]:
        return None
    bags = call.shape[0]
    size = _bag_size(call.sources.get(offsets.name), indices.shape, bags)
    lowered = Lowered(
        "embedding_bag",
        (indices.labels[0], Role.PARAMETER),
        (size is not None, True),
        attributes={
            "mode": ("sum", "mean")[call["mode"]],
            "bag_size": size,
            "padding_idx": call.get("padding_idx", -1),
        },
        flops=float(math.prod(indices.shape) * call.shape[1]),
    )
    if size is not None:
        lowered.operand(indices, (Unfolded(0, size),))
    else:
        lowered.operand(indices, whole(indices.shape))
        lowered.operand(offsets, whole(offsets.shape))
    lowered.operand(weight, (Whole(weight.shape[0]), Same(1)), "weight")
    return lowered


def _bag_size(offsets: Call | None, indices: Shape, bags: int) -> int | None:
    """Entries of a bag, where the offsets are an arithmetic sequence that covers all indices."""
    if offsets is None or offsets.name != "arange" or len(indices) != 1:
        return None
    start, step = offsets.get("start", 0), offsets.get("step", 1)
    return int(step) if start == 0 and step * bags == indices[0] else None


@rule("scaled_dot_product_attention")
def attention(call: Call) -> Lowered | None:
    """By sample, head, query position and value width; keys and values are whole."""
    query, key, value, mask = (call[n] for n in ("query", "key", "value", "attn_mask"))
    if call["enable_gqa"] or any(v.parameter for v in (query, key, value)):
        return None
    count = len(call.shape)
    batch = call.shape[:-2]
    labels = broadcast_labels([_batch_of(query), _batch_of(key), _batch_of(value)], batch)
    scores = (*batch, query.shape[-2], key.shape[-2])
    lowered = Lowered(
        "attention",
        (*labels, query.labels[-2], value.labels[-1]),
        (*(True for _ in batch), True, False),
        attributes={
            "causal": bool(call["is_causal"]),
            "scale": call["scale"],
            "probability": float(call["dropout_p"]),
            "scores": scores,
        },
        flops=2.0 * math.prod(scores) * (query.shape[-1] + value.shape[-1]),
        precision="lower",
    )
    lowered.operand(
        query, (*broadcast(query.shape[:-2], batch), Same(count - 2), Whole(query.shape[-1]))
    )
    for operand in (key, value):
        axes = (*broadcast(operand.shape[:-2], batch), *whole(operand.shape[-2:]))
        lowered.operand(operand, axes)
    if mask is not None:
        if mask.parameter:
            return None
        axes = broadcast(mask.shape, scores)
        # the last dimension of the scores is no dimension of the output
        lowered.operand(mask, (*axes[:-1], Whole(mask.shape[-1])))
    return lowered
