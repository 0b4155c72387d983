"""Rules of functions that compute each element from those at the same place."""

from __future__ import annotations

from typing import Any

from perfsearch.soap.capture.lower import (
    Call,
    Lowered,
    Value,
    broadcast,
    broadcast_labels,
    rule,
    same,
)
from perfsearch.soap.graph import Role

_CASTS = ("to", "_to_copy", "clone", "contiguous", "detach", "alias", "type_as", "lift_fresh_copy")


def pointwise(call: Call) -> Lowered | None:
    """Any function that torch tags as elementwise; parameters may be among its operands."""
    tensors = [v for v in _flat(call.arguments) if isinstance(v, Value)]
    if not tensors:
        return None
    lowered = Lowered(
        kind="pointwise",
        labels=broadcast_labels(tensors, call.shape),
        splittable=(True,) * len(call.shape),
    )
    lowered.attributes = {
        "target": str(call.target),
        "arguments": {name: _slots(value, call, lowered) for name, value in call.arguments.items()},
    }
    return lowered


@rule("hardswish", "log_sigmoid", "fix", "special_expit", "floor_divide")
def untagged(call: Call) -> Lowered | None:
    """Elementwise, though torch does not tag them so."""
    return pointwise(call)


def _slots(value: Any, call: Call, lowered: Lowered) -> Any:
    if isinstance(value, Value):
        return lowered.operand(value, broadcast(value.shape, call.shape))
    if isinstance(value, list | tuple):
        return [_slots(part, call, lowered) for part in value]
    return value


def _flat(arguments: Any) -> list[Any]:
    if isinstance(arguments, dict):
        return [leaf for part in arguments.values() for leaf in _flat(part)]
    if isinstance(arguments, list | tuple):
        return [leaf for part in arguments for leaf in _flat(part)]
    return [arguments]


@rule(*_CASTS)
def cast(call: Call) -> Lowered | None:
    """A copy, in another dtype or not."""
    value = call.get("self", call.get("input"))
    lowered = Lowered(
        "cast", value.labels, (True,) * len(call.shape), attributes={"dtype": call.dtype}
    )
    if call.name == "detach":
        lowered.attributes["detach"] = True
    lowered.operand(value, same(len(call.shape)))
    return lowered


_FILLED = {"zeros": 0, "empty": 0, "ones": 1, "full": None}
_MADE = [name for fill in _FILLED for name in (f"{fill}_like", f"new_{fill}")]


@rule(*_MADE)
def made(call: Call) -> Lowered | None:
    """Of one value: nothing is read of the tensor that says the type, or the shape."""
    own: Value = call["self"]
    fill = _FILLED[call.name.removeprefix("new_").removesuffix("_like")]
    if fill is None:
        fill = call["fill_value"]
    if isinstance(fill, Value):
        return None
    labels = own.labels if own.shape == call.shape else (Role.ATTRIBUTE,) * len(call.shape)
    lowered = Lowered("constant", labels, (True,) * len(call.shape))
    lowered.attributes = {
        "fill": fill,
        "dtype": own.dtype if call.get("dtype") is None else call.dtype,
    }
    return lowered


@rule("dropout")
def dropout(call: Call) -> Lowered | None:
    """The mask is that of the whole tensor, of which each part takes its own piece."""
    value = call.get("input", call.get("self"))  # of dropout_
    if not call["train"] or call["p"] == 0.0:
        lowered = Lowered("cast", value.labels, (True,) * len(call.shape))
        lowered.attributes = {"dtype": call.dtype}
    else:
        lowered = Lowered("dropout", value.labels, (True,) * len(call.shape))
        lowered.attributes = {"probability": float(call["p"]), "order": value.memory_order}
    lowered.operand(value, same(len(call.shape)))
    return lowered
