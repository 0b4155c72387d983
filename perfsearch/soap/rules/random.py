"""Rules of functions that draw random numbers: drawn whole on each rank, which keeps its part.

So generators of all ranks stay alike, and numbers are those of one device, whatever the plan.
"""

from __future__ import annotations

from typing import Any

from perfsearch.soap.capture.lower import Call, Lowered, Value, broadcast, plain, rule, same
from perfsearch.soap.graph import Role, Stage

DRAWN = frozenset(
    {
        "bernoulli",
        "bernoulli_",
        "cauchy_",
        "exponential_",
        "geometric_",
        "log_normal_",
        "normal_",
        "rand",
        "rand_like",
        "randint",
        "randint_like",
        "randn",
        "randn_like",
        "random_",
        "randperm",
        "uniform_",
    }
)
"""Functions whose numbers depend on a shape and on plain values, or on probabilities by place."""


def can_draw(call: Call) -> bool:
    """Whether it is drawn by torch's own generator, from what is known beforehand."""
    if call.get("generator") is not None:
        return False
    tensors = {n for n, v in call.arguments.items() if isinstance(v, Value)}
    if call.name in ("bernoulli", "bernoulli_"):
        return tensors <= {"self", "p"}
    return tensors <= {"self"}


def draws(lowered: Lowered | Stage) -> bool:
    """Whether a stage draws numbers."""
    return lowered.kind == "random" or lowered.attributes.get("probability", 0.0) > 0


@rule(*sorted(DRAWN))
def drawn(call: Call) -> Lowered | None:
    """What a tensor held before does not matter, but for probabilities."""
    count = len(call.shape)
    own: Value | None = call.get("self")
    chances = call["p"] if isinstance(call.get("p"), Value) else None
    if call.name == "bernoulli" and call.get("p") is None:
        chances = own
    labels = own.labels if own is not None else (Role.ATTRIBUTE,) * count
    lowered = Lowered("random", labels, (True,) * count)
    arguments: dict[str, Any] = {
        n: v
        for n, v in call.arguments.items()
        if plain(v) and n not in ("size", "generator", "memory_format", "layout", "pin_memory")
    }
    lowered.attributes = {
        "target": str(call.target),
        "arguments": arguments,
        "given": own is not None,
        "chances": None if chances is None else ("self" if chances is own else "p"),
        "dtype": call.dtype if own is None or call.get("dtype") is not None else own.dtype,
    }
    if chances is not None:
        lowered.operand(chances, broadcast(chances.shape, call.shape))
    return lowered


@rule("feature_dropout")
def feature_dropout(call: Call) -> Lowered | None:
    """Whole channels of a sample; the mask is that of the whole tensor."""
    value = call["input"]
    count = len(value.shape)
    if not call["train"] or call["p"] == 0.0:
        lowered = Lowered("cast", value.labels, (True,) * count)
        lowered.attributes = {"dtype": call.dtype}
    else:
        lowered = Lowered("feature_dropout", value.labels, (True,) * count)
        shape = (*value.shape[:2], *(1 for _ in value.shape[2:]))
        lowered.attributes = {"probability": float(call["p"]), "scores": shape}
    lowered.operand(value, same(count))
    return lowered
