"""Random operator graphs, machines and plans."""

import math
from dataclasses import replace

from perfsearch.soap.graph import (
    Graph,
    Joined,
    Operator,
    Parameter,
    Role,
    Same,
    Stage,
    Summed,
    Whole,
    volume,
)
from perfsearch.soap.plan import OperatorConfiguration
from perfsearch.soap.rules.base import signature
from perfsearch.soap.simulator.machine import Machine, uniform
from perfsearch.soap.simulator.problem import ShardCost

ROLES = (Role.SAMPLE, Role.PARAMETER)


def batch_input(name, shape, dtype="float32"):
    return Operator(name, "input", (), (), shape, dtype, (None,) * len(shape))


def operator(name, kind, inputs, shape, reads, parameters=(), roles=ROLES):
    return Operator(
        name,
        kind,
        tuple(i.name for i in inputs),
        tuple(i.shape for i in inputs),
        shape,
        "float32",
        roles,
        tuple(parameters),
        (Stage(kind, shape, tuple(reads)),),
        flops=2.0 * math.prod(shape),
    )


def linear(name, before, width, key=None):
    batch, inputs = before.shape
    weight = Parameter(
        "weight", (width, inputs), "float32", key or f"{name}.weight", (Same(1), Summed(inputs))
    )
    bias = Parameter("bias", (width,), "float32", f"{name}.bias", (Same(1),))
    reads = [(Same(0), Summed(inputs))]
    return operator(name, "linear", [before], (batch, width), reads, [weight, bias])


def table(name, before, rows, width):
    batch = before.shape[0]
    weight = Parameter("weight", (rows, width), "float32", f"{name}.weight", (Whole(rows), Same(1)))
    reads = [(Same(0), Whole(before.shape[1]))]
    return operator(name, "embedding_bag", [before], (batch, width), reads, [weight])


def add(name, left, right):
    return operator(name, "add", [left, right], left.shape, [(Same(0), Same(1))] * 2)


def norm(name, before):
    weight = Parameter("weight", before.shape[1:], "float32", f"{name}.weight", (Same(1),))
    reads = [(Same(0), Same(1))]
    return operator(name, "batch_norm", [before], before.shape, reads, [weight])


def cat(name, parts):
    reads, offset = [], 0
    for part in parts:
        reads.append((Same(0), Joined(1, offset, part.shape[1])))
        offset += part.shape[1]
    return operator(name, "cat", parts, (parts[0].shape[0], offset), reads)


def random_graph(rng, count=6):
    """Linear layers, tables, sums and concatenations, some outputs read late or twice."""
    batch = rng.choice([3, 8, 10])
    x, ids = batch_input("x", (batch, 5)), batch_input("ids", (batch, 2), "int64")
    made = []
    for number in range(count):
        kind = rng.choice(["linear", "linear", "table", "add", "cat", "norm"])
        name = f"{kind}_{number}"
        before = rng.choice(made[-3:]) if made else x
        alike = [m for m in made if m.shape == before.shape]
        if kind == "table":
            made.append(table(name, ids, 7, rng.choice([4, 6])))
        elif kind == "add" and alike:
            made.append(add(name, rng.choice(alike), before))
        elif kind == "norm" and made:
            made.append(norm(name, before))
        elif kind == "cat" and len(made) > 1:
            made.append(cat(name, [before, rng.choice(made)]))
        else:
            made.append(linear(name, before, rng.choice([4, 6, 9])))
    read = {name for m in made for name in m.inputs}
    ends = [m for m in made if m.name not in read]
    made.append(cat("end", ends) if len(ends) > 1 else linear("end", ends[0], 2))
    return Graph((x, ids, *made), frozenset({"x", "ids"}), "end", batch)


def machine(devices=4, per_node=None, **more) -> Machine:
    """Latency and bandwidth that make transfers and tasks equally important."""
    values = vars(uniform(devices, latency_us=3, gib_per_s=0.01, memory_gib=1, **more))
    if per_node is not None:
        slow = uniform(devices, latency_us=9, gib_per_s=0.002, memory_gib=1)
        values = {**values, "across": slow.within, "devices_per_node": per_node}
    return Machine(**values)


def uneven_machine(**more) -> Machine:
    """Pairs, one of them slow, three levels of links: within a pair, beside it, and the rest."""
    slowest = uniform(4, latency_us=40, gib_per_s=0.0017, memory_gib=1)
    links = ((0, 0, 1, 2), (0, 0, 1, 2), (1, 1, 0, 2), (2, 2, 2, 0))
    even = machine(per_node=2, **more)
    return replace(even, beyond=(slowest.within,), links=links, speeds=(1.0, 1.0, 0.5, 2.0))


def cost_of(chosen, part, gradients):
    """Arbitrary but fixed by what is computed; the host takes its time too."""
    size = volume(part) + 3 * sum(map(len, repr(signature(chosen, part)))) % 7
    return ShardCost(1 + 0.3 * size, 1.5 + 0.5 * size + any(gradients), 2.0, 3.25)


def free_host_cost_of(chosen, part, gradients):
    cost = cost_of(chosen, part, gradients)
    return ShardCost(cost.forward_us, cost.backward_us)


def random_plan(problem, rng):
    return {
        o.name: rng.choice(problem.configurations(place))
        for place, o in enumerate(problem.operators)
    }


def on(degrees, *devices):
    return OperatorConfiguration(tuple(degrees), tuple(devices))
