"""Kernels of functions that are called as they stand, and of dropout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from perfsearch.parallel.soap.kernels import Function, Inputs, Parameters, Piece, kernel
from perfsearch.parallel.soap.lowering import Slot
from perfsearch.parallel.soap.rectangles import within

Filler = Callable[[Inputs, Parameters], Any]


def overload(name: str) -> Any:
    """The function that ``str`` of it names, such as ``aten.add.Tensor``."""
    space, function, variant = name.split(".")
    return getattr(getattr(getattr(torch.ops, space), function), variant)


def filled(template: Any, device: torch.device) -> Filler:
    """Puts operands into the places that a template of arguments keeps for them."""
    if isinstance(template, Slot):
        if template.name:
            return lambda inputs, parameters: parameters[template.name]
        return lambda inputs, parameters: inputs[template.index]
    if isinstance(template, dict):
        parts = {name: filled(part, device) for name, part in template.items()}
        return lambda inputs, parameters: {n: f(inputs, parameters) for n, f in parts.items()}
    if isinstance(template, list | tuple) and _holds_slot(template):
        items = [filled(part, device) for part in template]
        return lambda inputs, parameters: [f(inputs, parameters) for f in items]
    if isinstance(template, torch.device):
        return lambda inputs, parameters: device
    return lambda inputs, parameters: template


def _holds_slot(template: Any) -> bool:
    if isinstance(template, list | tuple):
        return any(_holds_slot(part) for part in template)
    return isinstance(template, Slot)


@kernel("pointwise", "call", "whole")
def call(piece: Piece) -> Function:
    """The traced function with its own arguments."""
    target = overload(piece["target"])
    # most have tensors first and plain values behind: these are kept ready, and called by place
    names = [argument.name for argument in target._schema.arguments]
    by_keyword = {a.name for a in target._schema.arguments if a.kwarg_only}
    arguments = piece["arguments"]
    device = piece.surroundings.device
    places = [filled(arguments[n], device) for n in names if n in arguments and n not in by_keyword]
    keywords = {n: filled(v, device) for n, v in arguments.items() if n in by_keyword}
    output = piece.stage.attributes.get("output")

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        result = target(
            *[f(inputs, parameters) for f in places],
            **{n: f(inputs, parameters) for n, f in keywords.items()},
        )
        value: torch.Tensor = result if output is None else result[output]
        return value

    return run


@kernel("cast")
def cast(piece: Piece) -> Function:
    """Another dtype; the same tensor where it has that already."""
    dtype: torch.dtype = getattr(torch, piece["dtype"])
    device = piece.surroundings.device
    detached = piece.stage.attributes.get("detach", False)

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        value = inputs[0]
        assert value is not None
        # what the user's code made on the host it also moves by a cast
        return (value.detach() if detached else value).to(device, dtype)

    return run


@kernel("parameter")
def parameter(piece: Piece) -> Function:
    """A parameter that is used as a tensor."""

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        value = parameters["value"]
        return value.view_as(value)

    return run


def whole_mask(
    shape: Sequence[int],
    order: Sequence[int],
    probability: float,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """What one device would draw for the whole tensor, scaled.

    Args:
        shape: of the whole.
        order: its dimensions as they lie in memory, in which numbers are drawn.
        probability: of zero.
        dtype: of the tensor.
        device: where it is.

    """
    laid = torch.ones([shape[d] for d in order], dtype=dtype, device=device)
    ones = laid.permute([list(order).index(d) for d in range(len(order))])
    return functional.dropout(ones, probability, training=True)


@kernel("dropout")
def dropout(piece: Piece) -> Function:
    """Its part of the mask of the whole tensor."""
    mine = within(piece.rectangle, tuple((0, size) for size in piece.stage.shape))
    shape, order, probability = piece.stage.shape, piece["order"], piece["probability"]

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        value = inputs[0]
        assert value is not None
        return value * whole_mask(shape, order, probability, value.dtype, value.device)[mine]

    return run
