"""Operator graphs for timing the simulator, written down instead of captured."""

from __future__ import annotations

import math

from perfsearch.soap.graph import (
    Graph,
    Joined,
    Operator,
    Parameter,
    Rectangle,
    Role,
    Same,
    Stage,
    Whole,
    volume,
)
from perfsearch.soap.rules.base import input_rectangle, parameter_rectangles
from perfsearch.soap.simulator.problem import ShardCost

FLOPS_PER_US = 2e7
BYTES_PER_US = 2e6
LAUNCH_US = 8.0
ROLES = (Role.SAMPLE, Role.PARAMETER)


def source(name: str, shape: tuple[int, ...], dtype: str = "float32") -> Operator:
    return Operator(name, "input", (), (), shape, dtype, (None,) * len(shape))


def linear(name: str, before: Operator, width: int) -> Operator:
    batch, inputs = before.shape
    stage = Stage("linear", (batch, width), ((Same(0), Whole(inputs)),))
    relu = Stage("relu", (batch, width), ((Same(0), Same(1)),))
    weights = (
        Parameter("weight", (width, inputs), "float32", f"{name}.weight", (Same(1), Whole(inputs))),
        Parameter("bias", (width,), "float32", f"{name}.bias", (Same(1),)),
    )
    return Operator(
        name,
        "linear",
        (before.name,),
        (before.shape,),
        (batch, width),
        "float32",
        ROLES,
        weights,
        (stage, relu),
        2.0 * batch * width * inputs,
    )


def embedding(name: str, before: Operator, rows: int, width: int) -> Operator:
    batch = before.shape[0]
    stage = Stage("embedding_bag", (batch, width), ((Same(0), Whole(before.shape[1])),))
    weight = Parameter("weight", (rows, width), "float32", f"{name}.weight", (Whole(rows), Same(1)))
    return Operator(
        name,
        "embedding_bag",
        (before.name,),
        (before.shape,),
        (batch, width),
        "float32",
        ROLES,
        (weight,),
        (stage,),
    )


def concatenation(name: str, parts: list[Operator]) -> Operator:
    batch = parts[0].shape[0]
    width = sum(p.shape[1] for p in parts)
    reads, offset = [], 0
    for part in parts:
        reads.append((Same(0), Joined(1, offset, part.shape[1])))
        offset += part.shape[1]
    return Operator(
        name,
        "cat",
        tuple(p.name for p in parts),
        tuple(p.shape for p in parts),
        (batch, width),
        "float32",
        ROLES,
        (),
        (Stage("cat", (batch, width), tuple(reads)),),
    )


def dlrm(batch: int = 1024, rows: int = 1_000_000, width: int = 64, tables: int = 8) -> Graph:
    """The DLRM of FlexFlow's examples: 16 operators."""
    dense = source("dense", (batch, 64))
    inputs = [dense]
    operators: list[Operator] = []
    last = dense
    for size in (512, 512, 64):
        last = linear(f"Dense_{size}_{100 + len(operators)}", last, size)
        operators.append(last)
    joined = [last]
    for table in range(tables):
        index = source(f"sparse_{table}", (batch, 1), "int64")
        inputs.append(index)
        joined.append(embedding(f"Embed_{103 + table}", index, rows, width))
    operators.extend(joined[1:])
    last = concatenation("Concat_111", joined)
    operators.append(last)
    for size in (1024, 1024, 1024, 1):
        last = linear(f"Dense_{size}_{100 + len(operators)}", last, size)
        operators.append(last)
    return Graph((*inputs, *operators), frozenset(i.name for i in inputs), last.name, batch)


def linears(count: int, width: int = 1024, batch: int = 4096) -> Graph:
    """A chain of linear layers."""
    last = source("x", (batch, width))
    operators = [last]
    for number in range(count):
        last = linear(f"Dense_{number}", last, width)
        operators.append(last)
    return Graph(tuple(operators), frozenset({"x"}), last.name, batch)


def cost_of(
    operator: Operator,
    part: Rectangle,
    gradients: tuple[bool, ...],
    flops_per_us: float = FLOPS_PER_US,
    bytes_per_us: float = BYTES_PER_US,
) -> ShardCost:
    """Arithmetic or memory traffic, whichever takes longer, and a launch.

    Of a table only the rows that are looked up are read: ``embedding`` one for each element of its
    output, ``embedding_bag`` those that its input counts.
    """
    weights = sum(4 * volume(r) for r in parameter_rectangles(operator, part).values())
    weights = {"embedding": 4 * volume(part), "embedding_bag": 0}.get(operator.kind, weights)
    moved = 4 * volume(part) + weights
    for index in range(len(operator.inputs)):
        read = input_rectangle(operator, index, part)
        moved += 4 * volume(read) if read is not None else 0
    flops = operator.flops * volume(part) / max(math.prod(operator.shape), 1)
    forward = LAUNCH_US + max(flops / flops_per_us, moved / bytes_per_us)
    return ShardCost(forward, forward * (2 if any(gradients) else 1))
