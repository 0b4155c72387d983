"""A training step as operators: what each computes, from what, and where it may be split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from perfsearch.parallel.soap.axes import Axis, Rectangle, Shape

INPUT = "input"
"""Kind of the operators that stand for tensors of the batch, and for buffers."""

WHOLE = "whole"
"""Kind of operators without a rule: they run whole, on one device."""


class Role(StrEnum):
    """What a dimension of an operator's output is, so what splitting it means (Jia et al. 2019)."""

    SAMPLE = "sample"
    ATTRIBUTE = "attribute"
    PARAMETER = "parameter"


@dataclass(frozen=True, eq=False)
class Parameter:
    """A trained tensor, as one operator sees it.

    Attributes:
        name: within the operator: ``weight``, ``bias``.
        shape: of the whole tensor, as the operator views it: the rows of a linear layer may be
            taken apart in blocks.
        dtype: torch's name of it, such as ``float32``.
        key: qualified name in the model; equal keys are the same (tied) tensor.
        axes: what a rectangle of the first stage's output reads of it.
        trained: whether it has a gradient.

    """

    name: str
    shape: Shape
    dtype: str
    key: str
    axes: tuple[Axis, ...]
    trained: bool = True


@dataclass(frozen=True, eq=False)
class Stage:
    """One torch function. An operator is one, and those of one input that were joined to it.

    Attributes:
        kind: name of the function that computes it.
        shape: of its whole output.
        reads: per input, what a rectangle of the output reads of each dimension.
        attributes: plain values that the function needs.
        dtype: of its output.

    """

    kind: str
    shape: Shape
    reads: tuple[tuple[Axis, ...], ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"


@dataclass(frozen=True, eq=False)
class Operator:
    """What is placed and split as one.

    A loss has the shape of its terms before they are summed, so that it can be split; each part
    gives its share of the sum.

    Attributes:
        name: unique in the graph.
        kind: of its first stage; ``input`` for tensors of the batch and buffers.
        inputs: names of operators.
        input_shapes: theirs.
        shape: of the whole output.
        dtype: of the output, as torch names it.
        roles: what each dimension of the output is; ``None``: it may not be split.
        parameters: what it trains.
        stages: what it computes, in order; empty for inputs.
        flops: of the forward pass, whole.
        source: where the user's code calls it.

    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    input_shapes: tuple[Shape, ...]
    shape: Shape
    dtype: str
    roles: tuple[Role | None, ...]
    parameters: tuple[Parameter, ...] = ()
    stages: tuple[Stage, ...] = ()
    flops: float = 0.0
    source: str = ""

    @property
    def attributes(self) -> Mapping[str, Any]:
        """Those of the first stage."""
        return self.stages[0].attributes if self.stages else {}

    @property
    def whole(self) -> Rectangle:
        """All of the output."""
        return tuple((0, size) for size in self.shape)


@dataclass(frozen=True, eq=False)
class Graph:
    """A training step up to its loss.

    Attributes:
        operators: in topological order, which is the order of the user's code.
        inputs: names of those that every device can have without a transfer: tensors of the
            batch, buffers, and what is computed from them, or from parameters but no samples. A
            plan leaves them out: a device computes as much of them as its parts read, and a
            parameter that is read this way is replicated as far as that goes.
        output: name of the loss.
        batch: samples.

    """

    operators: tuple[Operator, ...]
    inputs: frozenset[str]
    output: str
    batch: int

    @cached_property
    def by_name(self) -> dict[str, Operator]:
        """Operators by name."""
        return {operator.name: operator for operator in self.operators}

    @cached_property
    def planned(self) -> tuple[Operator, ...]:
        """The operators that a plan configures, in topological order."""
        return tuple(o for o in self.operators if o.name not in self.inputs)

    @cached_property
    def edges(self) -> tuple[tuple[str, str, int], ...]:
        """Producer, consumer and the consumer's input number, where something may be moved."""
        return tuple(
            (name, operator.name, index)
            for operator in self.planned
            for index, name in enumerate(operator.inputs)
            if name not in self.inputs
        )
