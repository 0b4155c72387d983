"""Calls that are refused by the line of the user's code: what no plan would do right."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import fx

from perfsearch.parallel.soap.traced import dtype_name, dtype_out_of_place, place_of
from perfsearch.parallel.soap.tracing import CaptureError


def schema_name(node: fx.Node) -> str:
    """Name of the function that is called.

    Raises:
        CaptureError: it is none of torch's functions on tensors.

    """
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        raise CaptureError(f"{node.target} is no function on tensors; {place_of(node)}")
    return str(schema.name.split("::")[1])


def require_tensors(
    node: fx.Node, name: str, values: Container[fx.Node], counted: Container[fx.Node]
) -> None:
    """Refuse what reads a number that a step computes, or a buffer that it counts in."""
    for source in node.all_input_nodes:
        if source in counted:
            raise CaptureError(f"{name} reads a buffer that the step changes; {place_of(node)}")
        if source not in values:
            raise CaptureError(
                f"{name} takes a number from {source.name}, which would be another in each "
                f"step; keep it a tensor; {place_of(node)}"
            )


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Shape of what a function gives, empty where that is no tensor.

    Raises:
        CaptureError: the shape depends on values.

    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return ()
    if any(isinstance(size, torch.SymInt) and size.node.hint is None for size in value.shape):
        raise CaptureError(
            f"{node.target} gives a tensor whose shape depends on values, so that it would be "
            "another in each step; choose without changing the shape, as by torch.where or by "
            f"multiplying by a mask; {place_of(node)}"
        )
    return tuple(int(size) for size in value.shape)


def require_same_dtype(node: fx.Node) -> None:
    """Refuse what casts by writing in place: a new tensor would be of another type."""
    written = node.meta["val"]
    if dtype_out_of_place(node) != written.dtype:
        raise CaptureError(
            f"{node.target} writes into a tensor of {dtype_name(written)} what would be of "
            f"another type; cast it before; {place_of(node)}"
        )


def require_real(node: fx.Node, dtype: str) -> None:
    """Refuse complex numbers where gradients are needed."""
    if dtype.startswith("complex"):
        raise CaptureError(
            f"{schema_name(node)} gives complex numbers that depend on parameters, whose "
            f"gradients are not moved between devices; write it with real ones; {place_of(node)}"
        )


def unsplit(node: fx.Node, name: str) -> CaptureError:
    """What draws random numbers, and has no rule for the mask of one part."""
    return CaptureError(
        f"{name} draws random numbers in a form that has no rule for splitting it; {place_of(node)}"
    )
