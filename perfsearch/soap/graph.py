"""A training step as operators: what each computes, from what, and where it may be split."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from functools import cached_property
from typing import Any

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


# -----------------------------------------------------------------------------
# Which indices of an input's dimension a range of the output's indices reads.

Range = tuple[int, int]
"""Half-open."""

Rectangle = tuple[Range, ...]
"""Half-open range per dimension."""

Shape = tuple[int, ...]


class Summand(tuple[Range, ...]):
    """A part's rectangle where several parts share the sums that its elements are.

    Each of them sums its share for the elements of all; what they get is added up and dealt out,
    so that each ends with its own rectangle.

    Args:
        rectangle: what the part ends with.
        dim: of the first stage's output along which the elements of these parts lie one after
            another.
        own: of the part along ``dim``.
        span: of all of them.
        place: which share of the sums is the part's.
        members: number of parts that share.

    """

    dim: int
    own: Range
    span: Range
    place: int
    members: int

    def __new__(
        cls, rectangle: Rectangle, dim: int, own: Range, span: Range, place: int, members: int
    ) -> Summand:
        """Make one."""
        made = super().__new__(cls, rectangle)
        made.dim, made.own, made.span = dim, own, span
        made.place, made.members = place, members
        return made

    def of_all(self, rectangle: Rectangle) -> Rectangle:
        """A rectangle of the first stage with what all parts have instead of this one's."""
        return (*rectangle[: self.dim], self.span, *rectangle[self.dim + 1 :])


def share(size: int, degree: int, index: int) -> Range:
    """Range ``index`` of ``size`` indices shared out in ``degree`` parts."""
    each, rest = divmod(size, degree)
    start = index * each + min(index, rest)
    return (start, start + each + (index < rest))


@dataclass(frozen=True)
class Summed:
    """All of it, since it is summed over; parts that share the sums read a share each."""

    size: int

    def reads(self, rectangle: Rectangle) -> Range:
        """The range of this dimension that the rectangle of the output needs."""
        return (0, self.size)


@dataclass(frozen=True)
class Whole:
    """All of it, whatever part of the output is computed."""

    size: int

    def reads(self, rectangle: Rectangle) -> Range:
        """The range of this dimension that the rectangle of the output needs."""
        return (0, self.size)


@dataclass(frozen=True)
class Same:
    """Index for index as dimension ``dim`` of the output."""

    dim: int

    def reads(self, rectangle: Rectangle) -> Range:
        """The range of this dimension that the rectangle of the output needs."""
        return rectangle[self.dim]


@dataclass(frozen=True)
class Window:
    """A window that slides over a padded dimension, as convolution and pooling have it."""

    dim: int
    size: int
    kernel: int
    stride: int
    padding: int
    dilation: int = 1

    def reads(self, rectangle: Rectangle) -> Range:
        """The range of this dimension that the rectangle of the output needs, its halo included."""
        low, high = rectangle[self.dim]
        first = low * self.stride - self.padding
        last = (high - 1) * self.stride - self.padding + self.dilation * (self.kernel - 1)
        start = min(max(first, 0), self.size - 1)
        return (start, max(min(last, self.size - 1), start) + 1)


@dataclass(frozen=True)
class Strided:
    """Every ``step``-th index from ``start`` on, as a slice takes them."""

    dim: int
    start: int
    step: int = 1

    def reads(self, rectangle: Rectangle) -> Range:
        """The range of this dimension that the rectangle of the output needs."""
        low, high = rectangle[self.dim]
        return (self.start + low * self.step, self.start + (high - 1) * self.step + 1)


@dataclass(frozen=True)
class Joined:
    """``size`` indices that lie from ``offset`` on in the output, as concatenation puts them."""

    dim: int
    offset: int
    size: int

    def reads(self, rectangle: Rectangle) -> Range:
        """The range of this dimension that the rectangle of the output needs; may be empty."""
        low, high = rectangle[self.dim]
        start, end = max(low - self.offset, 0), min(high - self.offset, self.size)
        return (start, end) if start < end else (0, 0)


@dataclass(frozen=True)
class Fixed:
    """One index that the output has no dimension for."""

    index: int

    def reads(self, rectangle: Rectangle) -> Range:
        """The range of this dimension that the rectangle of the output needs."""
        return (self.index, self.index + 1)


@dataclass(frozen=True)
class Block:
    """Indices from ``start`` to ``end``, whatever part of the output is computed."""

    start: int
    end: int

    def reads(self, rectangle: Rectangle) -> Range:
        """The range of this dimension that the rectangle of the output needs."""
        return (self.start, self.end)


@dataclass(frozen=True)
class Unfolded:
    """Split by a reshape; dimension ``dim`` of the output counts blocks of ``block`` of these."""

    dim: int
    block: int

    def reads(self, rectangle: Rectangle) -> Range:
        """The range of this dimension that the rectangle of the output needs."""
        low, high = rectangle[self.dim]
        return (low * self.block, high * self.block)


@dataclass(frozen=True)
class Folded:
    """The outermost of dimensions that a reshape merged into ``dim``; one is ``block`` of those.

    Where a range of the output begins or ends within a block, the whole block is read.
    """

    dim: int
    block: int

    def reads(self, rectangle: Rectangle) -> Range:
        """The range of this dimension that the rectangle of the output needs."""
        low, high = rectangle[self.dim]
        return (low // self.block, -(-high // self.block))


Axis = Whole | Summed | Same | Window | Strided | Joined | Fixed | Block | Unfolded | Folded
"""One dimension of an input, as a function of the output's rectangle."""


# -----------------------------------------------------------------------------
# Arithmetic of rectangles.


def intersection(a: Rectangle, b: Rectangle) -> Rectangle | None:
    """What both cover; ``None`` where that is nothing."""
    common = tuple(
        (max(low, other_low), min(high, other_high))
        for (low, high), (other_low, other_high) in zip(a, b, strict=True)
    )
    return common if all(low < high for low, high in common) else None


def hull(rectangles: Iterable[Rectangle]) -> Rectangle:
    """The smallest rectangle around all of them."""
    return tuple(
        (min(low for low, _ in ranges), max(high for _, high in ranges))
        for ranges in zip(*rectangles, strict=True)
    )


def volume(rectangle: Rectangle) -> int:
    """Number of elements."""
    return math.prod(high - low for low, high in rectangle)


def within(inner: Rectangle, outer: Rectangle) -> tuple[slice, ...]:
    """Slices that cut ``inner`` out of a tensor that holds ``outer``."""
    return tuple(
        slice(low - start, high - start)
        for (low, high), (start, _) in zip(inner, outer, strict=True)
    )


def holds(outer: Rectangle, inner: Rectangle) -> bool:
    """Whether ``outer`` covers all of ``inner``."""
    return all(
        start <= low and high <= end for (low, high), (start, end) in zip(inner, outer, strict=True)
    )


# -----------------------------------------------------------------------------
# A graph as JSON, so that a captured model can be planned for without capturing it again.

SCHEMA = 1
_CLASSES = {c.__name__: c for c in (*Axis.__args__, Graph, Operator, Parameter, Stage)}


def dump_graph(graph: Graph) -> str:
    """Everything that planning needs of a graph."""
    return json.dumps({"schema": SCHEMA, "graph": _plain(graph)})


def parse_graph(text: str) -> Graph:
    """Read what ``dump_graph`` wrote.

    Raises:
        ValueError: it is of another version, or damaged.

    """
    record = json.loads(text)
    if record.get("schema") != SCHEMA:
        raise ValueError(f"a graph of schema {record.get('schema')!r}; {SCHEMA} is needed")
    made = _made(record["graph"])
    if not isinstance(made, Graph):
        raise ValueError("not a graph")
    return made


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return {"enum": value.value}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if type(value).__name__ not in _CLASSES:
            return {"text": repr(value)}
        fields = dataclasses.fields(value)
        return {
            "class": type(value).__name__,
            **{f.name: _plain(getattr(value, f.name)) for f in fields},
        }
    if isinstance(value, tuple):
        return {"tuple": [_plain(part) for part in value]}
    if isinstance(value, frozenset):
        return {"set": sorted(value)}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if isinstance(value, dict):
        return {"map": [[_plain(k), _plain(v)] for k, v in value.items()]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return {"text": repr(value)}


def _made(value: Any) -> Any:
    if isinstance(value, list):
        return [_made(part) for part in value]
    if not isinstance(value, dict):
        return value
    if "class" in value:
        fields = {k: _made(v) for k, v in value.items() if k != "class"}
        return _CLASSES[value["class"]](**fields)
    if "enum" in value:
        return Role(value["enum"])
    if "tuple" in value:
        return tuple(_made(part) for part in value["tuple"])
    if "set" in value:
        return frozenset(value["set"])
    if "text" in value:
        return value["text"]
    return {_made(k): _made(v) for k, v in value["map"]}


@dataclass(frozen=True)
class Coverage:
    """What a search can split, and what runs whole on one device.

    Attributes:
        operators: that a plan configures.
        missing: those of them that have no rule.
        shares: of each of these, in the forward pass.
        of: what the shares are of: measured time, or FLOPs.

    """

    operators: int
    missing: tuple[Operator, ...]
    shares: Mapping[str, float]
    of: str

    @property
    def share(self) -> float:
        """Of the forward pass, what has rules; 1 is all."""
        return 1.0 - sum(self.shares.values())

    def line(self) -> str:
        """For the terminal."""
        covered = self.operators - len(self.missing)
        text = f"{covered} of {self.operators} operators ({self.share:.1%} of {self.of})"
        text += " can be split"
        if self.missing:
            listed = self._listed()
            names = ", ".join(listed[:3])
            more = len(listed) - 3
            text += f"; whole on one device: {names}" + (f" and {more} more" if more > 0 else "")
        return text

    def refusal(self, least: float) -> str | None:
        """Why a search is not worth while; ``None`` where it is.

        Args:
            least: smallest acceptable share.

        """
        if self.share >= least:
            return None
        listed = "\n".join(f"  {line}" for line in self._listed())
        return (
            f"{self.share:.1%} of {self.of} is in operators that can be split, and {least:.1%} is "
            f"asked for. Without a rule:\n{listed}\n"
            "Replace these by functions that have one, or lower the threshold: they then run "
            "whole, on one device each."
        )

    def _listed(self) -> list[str]:
        """Each function and line once, with its share; the largest first."""
        same: dict[tuple[str, str], list[Operator]] = {}
        for operator in self.missing:
            target = str(operator.attributes.get("target", operator.kind))
            same.setdefault((target, operator.source), []).append(operator)
        shares = {key: sum(self.shares[o.name] for o in each) for key, each in same.items()}
        found = []
        for key in sorted(same, key=lambda key: -shares[key]):
            first, *others = same[key]
            more = f" and {len(others)} more of it" if others else ""
            found.append(f"{described(first)}{more}, {shares[key]:.1%}")
        return found


def coverage(graph: Graph, times: Mapping[str, float] | None = None) -> Coverage:
    """Look for rules of all operators that a plan configures.

    Args:
        graph: of the model.
        times: of their forward passes, whole, as measured; ``None``: FLOPs stand for them.

    """
    planned = graph.planned
    weights = {o.name: o.flops for o in planned} if times is None else times
    total = sum(weights[o.name] for o in planned) or 1.0
    missing = tuple(operator for operator in planned if operator.kind == WHOLE)
    return Coverage(
        operators=len(planned),
        missing=missing,
        shares={operator.name: weights[operator.name] / total for operator in missing},
        of="forward FLOPs" if times is None else "the measured forward time",
    )


def described(operator: Operator) -> str:
    """Its name, function and line of the user's code."""
    target = operator.attributes.get("target", operator.kind)
    place = f" at {operator.source}" if operator.source else ""
    return f"{operator.name} ({target}){place}"
