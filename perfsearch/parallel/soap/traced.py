"""What can be told of single calls of a traced program."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from perfsearch.parallel.soap import tracing
from perfsearch.parallel.soap.lowering import Call, Lowered, Value
from perfsearch.parallel.soap.tracing import CaptureError

_TRACER = tracing.__file__
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"


def least_flops(call: Call, lowered: Lowered) -> float:
    """By torch's own counter; an operation an element where it has no formula."""
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(getattr(call.target, "overloadpacket", None))
    tensors = [value for value, _ in lowered.operands]
    if formula is None:
        return float(sum(math.prod(value.shape) for value in tensors))
    meta = {
        n: torch.empty(v.shape, dtype=getattr(torch, v.dtype), device="meta")
        if isinstance(v, Value)
        else v
        for n, v in call.arguments.items()
    }
    by_name = {a.name for a in call.target._schema.arguments if a.kwarg_only}
    places = [value for name, value in meta.items() if name not in by_name]
    names = {name: value for name, value in meta.items() if name in by_name}
    out = torch.empty(call.shape, device="meta")
    return float(formula(*places, out_val=out, **names))


def gives_many(node: fx.Node) -> bool:
    """Whether a call gives several tensors, or none."""
    return not isinstance(node.meta.get("val"), torch.Tensor)


def draws(node: fx.Node) -> bool:
    """Whether a call draws random numbers."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def out_of_place(target: Any) -> Any:
    """The function that gives what another one writes."""
    name = target._schema.name.split("::")[1].removesuffix("_")
    packet = getattr(torch.ops.aten, name)
    return getattr(packet, target._overloadname)


def dtype_out_of_place(node: fx.Node) -> torch.dtype:
    """What a call that writes would give if it made a new tensor."""

    def seen(argument: Any) -> Any:
        if not isinstance(argument, fx.Node):
            return argument
        value = argument.meta.get("val")
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    arguments = fx.node.map_aggregate(node.args, seen)
    keywords = fx.node.map_aggregate(node.kwargs, seen)
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        made = out_of_place(node.target)(*arguments, **keywords)
    dtype: torch.dtype = made.dtype
    return dtype


def dtype_name(tensor: torch.Tensor) -> str:
    """As torch names it, without ``torch``."""
    return str(tensor.dtype).removeprefix("torch.")


def module_of(node: fx.Node) -> str:
    """Path of the innermost module that calls it."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return str(paths[-1]).removeprefix("model").removeprefix(".") if paths else ""


def place_of(node: fx.Node) -> str:
    """The line of the user's code: the innermost one that is not torch's."""
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    own = [ln for ln in lines if not ln.startswith((f'File "{_TORCH}', f'File "{_TRACER}"'))]
    if not own:
        return "the loss function"
    parts = own[-1].split(",")
    path = parts[0].removeprefix("File ").strip('"')
    return f"{path}:{parts[1].strip().removeprefix('line ')}"


_LINEAR = frozenset({"mul", "div", "neg", "to", "_to_copy", "clone"})


def loss_and_scale(output: fx.Node, losses: Collection[str]) -> tuple[fx.Node, float]:
    """The loss that the output is a multiple of, and the factor; the output itself if none.

    Args:
        output: of the program.
        losses: names of functions that can be split over their terms.

    """
    node, scale = output, 1.0
    while node.op == "call_function" and _name(node) in _LINEAR:
        tensors = [a for a in node.args if isinstance(a, fx.Node)]
        rest = [a for a in node.args[1:] if _name(node) in ("mul", "div")]
        numbers = [a for a in rest if isinstance(a, int | float)]
        if tensors != [node.args[0]] or len(numbers) != len(rest) or node.kwargs:
            return output, 1.0
        for number in numbers:
            scale = scale * number if _name(node) == "mul" else scale / number
        scale = -scale if _name(node) == "neg" else scale
        node = tensors[0]
    return (node, scale) if _name(node) in losses else (output, 1.0)


def _name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else str(schema.name.split("::")[1])


def batch_size(nodes: Sequence[fx.Node], leaves: Collection[str]) -> int:
    """Samples, which the first dimension of each tensor of the batch counts.

    Raises:
        CaptureError: they have no common first dimension.

    """
    tensors = [node.meta["val"] for node in nodes if node.name in leaves]
    sizes = {int(tensor.shape[0]) if tensor.dim() else -1 for tensor in tensors}
    if len(sizes) != 1 or -1 in sizes:
        raise CaptureError(
            f"tensors of the batch have shapes {[tuple(t.shape) for t in tensors]}: the first "
            "dimension of each must be the samples"
        )
    return sizes.pop()
