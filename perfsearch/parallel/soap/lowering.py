"""From a call in a traced program to a stage: what rules are given, and what they give back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perfsearch.parallel.soap.axes import Axis, Same, Shape, Whole
from perfsearch.parallel.soap.graph import Role


@dataclass(frozen=True)
class Value:
    """A tensor of the traced program.

    Attributes:
        name: of the operator that computes it; of a parameter, its qualified name in the model.
        shape: whole.
        dtype: torch's name of it.
        labels: what each dimension is.
        parameter: whether it is a parameter of the model.
        trained: whether it has a gradient, where it is a parameter.
        local: whether every device can have it without a transfer.
        strides: of the whole tensor, where they are known.
        sampled: whether it depends on the batch.
        weighted: whether it depends on parameters.

    """

    name: str
    shape: Shape
    dtype: str
    labels: tuple[Role, ...]
    parameter: bool = False
    trained: bool = False
    local: bool = False
    strides: tuple[int, ...] = ()
    sampled: bool = False
    weighted: bool = False

    @property
    def memory_order(self) -> tuple[int, ...]:
        """Dimensions from the outermost in memory to the innermost."""
        if not self.strides:
            return tuple(range(len(self.shape)))
        return tuple(sorted(range(len(self.shape)), key=lambda d: -self.strides[d]))


@dataclass(frozen=True)
class Slot:
    """Stands for an operand among a call's plain arguments.

    Attributes:
        name: of a parameter of the operator; empty for an input.
        index: of the input.

    """

    name: str = ""
    index: int = -1


@dataclass(frozen=True)
class Call:
    """One call of the traced program.

    Attributes:
        name: of the function, such as ``layer_norm``.
        target: the function.
        arguments: by the names of the function's schema, defaults filled in; tensors are
            ``Value``.
        shape: of the result.
        dtype: of the result.
        is_output: whether the result is the loss.
        sources: by name of a value, the call that made it.

    """

    name: str
    target: Any
    arguments: Mapping[str, Any]
    shape: Shape
    dtype: str
    is_output: bool
    sources: Mapping[str, Call]

    def __getitem__(self, argument: str) -> Any:
        return self.arguments[argument]

    def get(self, argument: str, default: Any = None) -> Any:
        """An argument that the function may not have."""
        return self.arguments.get(argument, default)


@dataclass
class Lowered:
    """A stage in the making.

    Attributes:
        kind: of the stage.
        labels: what each dimension of the output is.
        splittable: dimensions of the output that may be divided.
        operands: inputs with what is read of each.
        parameters: by name in the operator, with what is read of each.
        attributes: plain values for the kernel.
        shape: where it differs from that of the call's result.
        flops: of the forward pass.
        precision: what autocast does: ``lower``, ``full`` or ``keep``.

    """

    kind: str
    labels: tuple[Role, ...]
    splittable: tuple[bool, ...]
    operands: list[tuple[Value, tuple[Axis, ...]]] = field(default_factory=list)
    parameters: dict[str, tuple[Value, tuple[Axis, ...]]] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    shape: Shape | None = None
    flops: float = 0.0
    precision: str = "keep"

    def operand(self, value: Value | None, axes: Sequence[Axis], name: str = "") -> Slot | None:
        """Take in a tensor; a parameter under ``name``."""
        if value is None:
            return None
        if value.parameter:
            name = name or f"operand_{len(self.parameters)}"
            self.parameters[name] = (value, tuple(axes))
            return Slot(name=name)
        self.operands.append((value, tuple(axes)))
        return Slot(index=len(self.operands) - 1)


Rule = Callable[[Call], Lowered | None]
"""Gives the stage; ``None`` where this form of the function is not covered."""

RULES: dict[str, Rule] = {}

TAKE_PARAMETERS = frozenset(
    {
        "linear",
        "matmul",
        "embedding",
        "embedding_bag",
        "conv1d",
        "conv2d",
        "conv3d",
        "layer_norm",
        "rms_norm",
        "batch_norm",
        "group_norm",
        "instance_norm",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
    }
)
"""Functions whose rules take parameters as they are; others take them as tensors."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for functions."""

    def register(function: Rule) -> Rule:
        for name in names:
            if name in RULES:
                raise ValueError(f"two rules for {name}")
            RULES[name] = function
        return function

    return register


def same(count: int) -> tuple[Axis, ...]:
    """Index for index in every dimension."""
    return tuple(Same(dim) for dim in range(count))


def whole(shape: Shape) -> tuple[Axis, ...]:
    """All of it."""
    return tuple(Whole(size) for size in shape)


def broadcast(shape: Shape, output: Shape) -> tuple[Axis, ...]:
    """As an operand of an elementwise function whose result is ``output``."""
    first = len(output) - len(shape)
    return tuple(
        Same(first + dim) if size == output[first + dim] else Whole(size)
        for dim, size in enumerate(shape)
    )


def broadcast_labels(values: Sequence[Value], output: Shape) -> tuple[Role, ...]:
    """What the result's dimensions are: samples where an operand says so, else by the first."""
    labels: list[Role | None] = [None] * len(output)
    for value in values:
        first = len(output) - len(value.shape)
        for dim, (size, label) in enumerate(zip(value.shape, value.labels, strict=True)):
            fits = size == output[first + dim]
            if fits and (labels[first + dim] is None or label is Role.SAMPLE):
                labels[first + dim] = label
    return tuple(label or Role.ATTRIBUTE for label in labels)


def plain(value: Any) -> bool:
    """Whether a value holds no tensor."""
    if isinstance(value, list | tuple):
        return all(plain(part) for part in value)
    return not isinstance(value, Value)


def positive(dim: int, count: int) -> int:
    """A dimension counted from the front."""
    return dim + count if dim < 0 else dim
