"""Rules of functions that move elements without computing: views, slices, concatenation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from perfsearch.soap.capture.lower import (
    Call,
    Lowered,
    Value,
    broadcast,
    broadcast_labels,
    called,
    positive,
    rule,
    same,
    whole,
)
from perfsearch.soap.graph import (
    Axis,
    Fixed,
    Folded,
    Joined,
    Role,
    Same,
    Shape,
    Strided,
    Unfolded,
    Whole,
)


def permuted(value: Value, dims: Sequence[int]) -> Lowered:
    """Dimension ``i`` of the output is ``dims[i]`` of the input."""
    axes = [Same(list(dims).index(d)) for d in range(len(dims))]
    lowered = Lowered(
        "permute", tuple(value.labels[d] for d in dims), (True,) * len(dims), shape=None
    )
    lowered.attributes = {"dims": list(dims)}
    lowered.operand(value, axes)
    return lowered


@rule("permute")
def permute(call: Call) -> Lowered | None:
    """Any order."""
    value = call["self"]
    return permuted(value, [positive(d, len(value.shape)) for d in call["dims"]])


@rule("transpose", "t")
def transpose(call: Call) -> Lowered | None:
    """Two dimensions change places."""
    value = call["self"]
    count = len(value.shape)
    if count < 2:
        return None
    dims = list(range(count))
    first, second = positive(call.get("dim0", 0), count), positive(call.get("dim1", 1), count)
    dims[first], dims[second] = second, first
    return permuted(value, dims)


@rule("view", "reshape", "flatten", "unflatten", "_unsafe_view", "unsqueeze", "squeeze")
def reshape(call: Call) -> Lowered | None:
    """Dimensions that are kept, merged or split by a reshape; others stay whole."""
    value = call.get("self", call.get("input"))
    axes: list[Axis] = [Whole(size) for size in value.shape]
    labels: list[Role] = [Role.ATTRIBUTE] * len(call.shape)
    splittable = [False] * len(call.shape)
    folds: list[tuple[int, int, int]] = []
    for before, after in _groups(value.shape, call.shape):
        if not after:
            continue
        if before:
            labels[after[0]] = value.labels[before[0]]
            if len(before) == 1 and labels[after[0]] is not Role.SAMPLE:
                for dim in after:
                    labels[dim] = labels[after[0]]
        if len(before) == len(after) == 1:
            axes[before[0]], splittable[after[0]] = Same(after[0]), True
        elif before:
            # elements behind one index of the outermost dimension, on either side
            ours = math.prod(value.shape[d] for d in before[1:])
            theirs = math.prod(call.shape[d] for d in after[1:])
            if ours % theirs == 0:
                block = ours // theirs
                axes[before[0]], splittable[after[0]] = Folded(after[0], block), True
                folds.append((after[0], before[0], block))
            elif theirs % ours == 0:
                axes[before[0]] = Unfolded(after[0], theirs // ours)
                splittable[after[0]] = True
    lowered = Lowered("reshape", tuple(labels), tuple(splittable))
    lowered.attributes = {"folds": folds}
    lowered.operand(value, axes)
    return lowered


def _groups(before: Shape, after: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """Fewest neighbouring dimensions of both sides that hold the same elements."""
    i = j = 0
    while i < len(before) or j < len(after):
        if i < len(before) and j < len(after) and before[i] == after[j]:
            yield [i], [j]
            i, j = i + 1, j + 1
            continue
        if i < len(before) and before[i] == 1:
            yield [i], []
            i += 1
            continue
        if j < len(after) and after[j] == 1:
            yield [], [j]
            j += 1
            continue
        ours, theirs = [i], [j]
        left, right = before[i], after[j]
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left *= before[i]
                ours.append(i)
                i += 1
            else:
                right *= after[j]
                theirs.append(j)
                j += 1
        yield ours, theirs


def taken(value: Value, axes: Sequence[Axis], output: int) -> Lowered:
    """Indices of the input, by ranges and single ones."""
    labels = [Role.ATTRIBUTE] * output
    for dim, axis in enumerate(axes):
        if isinstance(axis, Same | Strided):
            labels[axis.dim] = value.labels[dim]
    lowered = Lowered("slice", tuple(labels), (True,) * output)
    lowered.attributes = {
        "steps": [
            0 if isinstance(axis, Fixed) else axis.step if isinstance(axis, Strided) else 1
            for axis in axes
        ]
    }
    lowered.operand(value, axes)
    return lowered


def selected(value: Value, dim: int, index: int) -> Lowered:
    """One index of a dimension, which is gone in the output."""
    dim = positive(dim, len(value.shape))
    places = [d - (d > dim) for d in range(len(value.shape))]
    axes: list[Axis] = [Same(place) for place in places]
    axes[dim] = Fixed(positive(index, value.shape[dim]))
    return taken(value, axes, len(value.shape) - 1)


def sliced(value: Value, dim: int, start: int, step: int = 1) -> Lowered:
    """A range of a dimension."""
    axes: list[Axis] = list(same(len(value.shape)))
    dim = positive(dim, len(value.shape))
    axes[dim] = Strided(dim, start, step)
    return taken(value, axes, len(value.shape))


@rule("select")
def select(call: Call) -> Lowered | None:
    """One index."""
    return selected(call["self"], call["dim"], call["index"])


@rule("slice", "narrow")
def slice_(call: Call) -> Lowered | None:
    """A range, with a step or not."""
    value = call["self"]
    size = value.shape[positive(call["dim"], len(value.shape))]
    start = min(positive(call["start"] or 0, size), size)
    return sliced(value, call["dim"], max(start, 0), call.get("step") or 1)


@rule("expand", "expand_as")
def expand(call: Call) -> Lowered | None:
    """Repeated without a copy."""
    value = call["self"]
    lowered = Lowered("expand", broadcast_labels([value], call.shape), (True,) * len(call.shape))
    lowered.operand(value, broadcast(value.shape, call.shape))
    return lowered


@rule("cat", "concat", "concatenate")
def concatenate(call: Call) -> Lowered | None:
    """A part reads those inputs only that it covers."""
    values: list[Value] = [v for v in call["tensors"] if math.prod(v.shape)]
    count = len(call.shape)
    dim = positive(call["dim"], count)
    if any(len(v.shape) != count for v in values):
        return None
    labels = list(broadcast_labels(values, call.shape))
    labels[dim] = broadcast_labels(values, values[0].shape)[dim]
    lowered = Lowered("concatenate", tuple(labels), (True,) * count, attributes={"dim": dim})
    offset = 0
    for value in values:
        axes: list[Axis] = list(same(count))
        axes[dim] = Joined(dim, offset, value.shape[dim])
        lowered.operand(value, axes)
        offset += value.shape[dim]
    return lowered


@rule("stack")
def stack(call: Call) -> Lowered | None:
    """Inputs become indices of a new dimension, which is whole."""
    values = call["tensors"]
    count = len(call.shape)
    dim = positive(call["dim"], count)
    labels = list(broadcast_labels(values, values[0].shape))
    labels.insert(dim, Role.ATTRIBUTE)
    lowered = Lowered(
        "stack", tuple(labels), tuple(d != dim for d in range(count)), attributes={"dim": dim}
    )
    for value in values:
        lowered.operand(value, [Same(d) for d in range(count) if d != dim])
    return lowered


@rule("index")
def index(call: Call) -> Lowered | None:
    """By tensors of indices, for dimensions that lie side by side."""
    value: Value = call["self"]
    indices = list(call["indices"])
    indices += [None] * (len(value.shape) - len(indices))
    used = [d for d, v in enumerate(indices) if v is not None]
    if not used or used != list(range(used[0], used[-1] + 1)):
        return None
    if any(indices[d].dtype not in ("int64", "int32") for d in used):
        return None
    picked = max((indices[d].shape for d in used), key=len)
    if any(indices[d].shape != picked for d in used):
        return None
    first, width = used[0], len(picked)
    labels = (
        *value.labels[:first],
        *broadcast_labels([indices[d] for d in used], picked),
        *value.labels[used[-1] + 1 :],
    )
    lowered = Lowered("index", labels, (True,) * len(call.shape))
    axes: list[Axis] = list(whole(value.shape))
    for dim in range(first):
        axes[dim] = Same(dim)
    for dim in range(used[-1] + 1, len(value.shape)):
        axes[dim] = Same(dim - len(used) + width)
    lowered.operand(value, axes)
    for dim in used:
        lowered.operand(indices[dim], [Same(first + i) for i in range(width)])
    lowered.attributes = {"first": first, "count": len(used)}
    return lowered


@rule("pad", "constant_pad_nd", "roll", "flip")
def moved(call: Call) -> Lowered | None:
    """Dimensions whose indices change are whole, the others are as they were."""
    value: Value = call["self"]
    count = len(value.shape)
    if call.name in ("roll", "flip"):
        changed = {positive(d, count) for d in call["dims"]}
        if not changed:
            return None
    else:
        pads = call["pad"]
        changed = {count - 1 - i // 2 for i, width in enumerate(pads) if width}
    axes = [Whole(n) if d in changed else Same(d) for d, n in enumerate(value.shape)]
    lowered = Lowered("call", value.labels, tuple(d not in changed for d in range(count)))
    return called(lowered, call, {"self": axes})


@rule("gather", "take_along_dim", "index_select")
def picked(call: Call) -> Lowered | None:
    """By indices along one dimension, which is whole in what is picked from."""
    value, dim = call["self"], call["dim"]
    chosen: Value = call["index"] if "index" in call.arguments else call["indices"]
    count = len(call.shape)
    if dim is None or len(value.shape) != count or not count:
        return None
    dim = positive(dim, count)
    of_value: list[Axis] = list(broadcast(value.shape, call.shape))
    if call.name == "gather":
        of_value = list(same(count))
    of_value[dim] = Whole(value.shape[dim])
    labels = list(broadcast_labels([value], call.shape))
    if call.name == "index_select":
        of_chosen: Sequence[Axis] = [Same(dim)] if chosen.shape else []
        labels[dim] = chosen.labels[0] if chosen.labels else Role.ATTRIBUTE
    elif len(chosen.shape) == count:
        of_chosen = broadcast(chosen.shape, call.shape)
        labels = list(broadcast_labels([value, chosen], call.shape))
        labels[dim] = chosen.labels[dim]
    else:
        return None
    lowered = Lowered("call", tuple(labels), (True,) * count)
    name = "index" if "index" in call.arguments else "indices"
    return called(lowered, call, {"self": of_value, name: of_chosen})


@rule("getitem")
def getitem(call: Call) -> Lowered | None:
    """One of the tensors that a function gives."""
    made: Call = call["made"]
    number: int = call["index"]
    value = made.get("self")
    if made.name == "broadcast_tensors":
        value = made["tensors"][number]
        lowered = Lowered(
            "expand", broadcast_labels([value], call.shape), (True,) * len(call.shape)
        )
        lowered.operand(value, broadcast(value.shape, call.shape))
        return lowered
    if made.name == "unbind":
        return selected(value, made["dim"], number)
    return sliced(value, made["dim"], _start(made, number))


def _start(made: Call, number: int) -> int:
    value: Value = made["self"]
    size = value.shape[positive(made["dim"], len(value.shape))]
    sizes = made.get("split_size", made.get("split_sizes"))
    if made.name == "chunk":
        sizes = -(-size // made["chunks"])
    if isinstance(sizes, int):
        return int(sizes) * number
    return int(sum(sizes[:number]))
