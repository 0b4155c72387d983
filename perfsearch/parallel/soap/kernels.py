"""From a part of an operator to the function that computes it; prepared once, called each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from perfsearch.parallel.soap.axes import Rectangle
from perfsearch.parallel.soap.graph import Operator, Stage
from perfsearch.parallel.soap.rules import input_rectangle, sizes, stage_rectangles

Inputs = Sequence[torch.Tensor | None]
Parameters = Mapping[str, torch.Tensor]
Function = Callable[[Inputs, Parameters], torch.Tensor]
"""Takes what a part reads, and gives what it computes."""

SumOver = Callable[[torch.Tensor], torch.Tensor]
"""Adds a tensor up over the parts of an operator that share something; in place."""


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over one part."""
    return tensor


@dataclass(frozen=True)
class Surroundings:
    """What a part knows of the others.

    Attributes:
        device: where it computes.
        sum_over_all: over all parts of the operator.
        sum_over_channels: over those parts that have the same channels.
        buffers: of the model, by name, for statistics that are kept.

    """

    device: torch.device
    sum_over_all: SumOver = alone
    sum_over_channels: SumOver = alone
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Piece:
    """One stage of one part.

    Attributes:
        stage: which.
        rectangle: of the stage's output.
        reads: rectangles of its inputs.
        surroundings: of the part.

    """

    stage: Stage
    rectangle: Rectangle
    reads: tuple[Rectangle | None, ...]
    surroundings: Surroundings

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape of what it computes."""
        return sizes(self.rectangle)

    def __getitem__(self, attribute: str) -> Any:
        return self.stage.attributes[attribute]


Builder = Callable[[Piece], Function]

KERNELS: dict[str, Builder] = {}


def kernel(*kinds: str) -> Callable[[Builder], Builder]:
    """Register what builds a stage's function."""

    def register(builder: Builder) -> Builder:
        KERNELS.update(dict.fromkeys(kinds, builder))
        return builder

    return register


def prepare(operator: Operator, part: Rectangle, surroundings: Surroundings) -> Function:
    """The function that computes a part.

    Its inputs hold exactly ``rules.input_rectangle``, its parameters ``parameter_rectangles``.
    That of a loss gives a scalar: the part's share of the sum.
    """
    _load()
    rectangles = stage_rectangles(operator, part)
    needs = tuple(input_rectangle(operator, i, part) for i in range(len(operator.inputs)))
    functions = []
    for i, (stage, rectangle) in enumerate(zip(operator.stages, rectangles, strict=True)):
        reads = needs if i == 0 else (rectangles[i - 1],)
        built = KERNELS[stage.kind](Piece(stage, rectangle, reads, surroundings))
        precision = stage.attributes.get("cast")
        functions.append(built if precision is None else _in_precision(built, precision))
    if len(functions) == 1:
        return functions[0]
    head, followers = functions[0], functions[1:]

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        value = head(inputs, parameters)
        for follower in followers:
            value = follower((value,), parameters)
        return value

    return run


def forward(
    operator: Operator, part: Rectangle, inputs: Inputs, parameters: Parameters
) -> torch.Tensor:
    """Compute a part once, by itself: without what others would add to it."""
    tensors = [t for t in (*inputs, *parameters.values()) if t is not None]
    device = tensors[0].device if tensors else torch.device("cpu")
    return prepare(operator, part, Surroundings(device))(inputs, parameters)


def _in_precision(function: Function, name: str) -> Function:
    """What autocast does around one function, spelled out."""
    dtype: torch.dtype = getattr(torch, name)

    def cast(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return tensor.to(dtype) if tensor is not None and tensor.is_floating_point() else tensor

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        lowered = {name: tensor.to(dtype) for name, tensor in parameters.items()}
        return function([cast(tensor) for tensor in inputs], lowered)

    return run


def _load() -> None:
    """Kernels register themselves when they are imported."""
    from perfsearch.parallel.soap import (  # noqa: F401
        kernels_calls,
        kernels_dense,
        kernels_loss,
        kernels_norm,
        kernels_shape,
        kernels_window,
    )
