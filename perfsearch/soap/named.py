"""Plans that people write by hand and that have a name: to compare with, and to start from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from perfsearch.soap.graph import (
    Graph,
    Operator,
    Rectangle,
    Role,
    Summed,
    intersection,
    volume,
)
from perfsearch.soap.parts import TABLES, splits_of
from perfsearch.soap.plan import OperatorConfiguration, Plan, data_parallel, part_rectangles
from perfsearch.soap.rules.base import input_rectangle, parameter_rectangles

DATA_PARALLEL = "data parallel"
OWN_BEST = "each operator's own best"


def named_plans(
    graph: Graph, devices: int, roles: frozenset[Role] = frozenset(Role)
) -> dict[str, Plan]:
    """Data parallelism first; those that a model has no use for are left out.

    Args:
        graph: of the model.
        devices: to plan for.
        roles: of dimensions that may be split, data parallelism aside.

    """
    found = {
        DATA_PARALLEL: data_parallel(graph, range(devices)),
        "whole": {o.name: _alone(o, 0) for o in graph.planned},
    }
    if devices > 1:
        found["tensor parallel"] = tensor_parallel(graph, devices, roles)
        found["tables by device"] = tables_by_device(graph, devices)
        found["layers by device"] = layers_by_device(graph, devices)
    distinct: dict[str, Plan] = {}
    for name, plan in found.items():
        if plan not in distinct.values():
            distinct[name] = plan
    return distinct


def tensor_parallel(graph: Graph, devices: int, roles: frozenset[Role] = frozenset(Role)) -> Plan:
    """Megatron's pattern, as far as a model has it.

    The first layer of a pair is split by its outputs, heads where it has them; the second one,
    whose inputs then are where they are read, shares its sums and leaves samples, or else
    positions, on each device. What follows stays as it is found, or goes over samples: the traffic
    is that of Megatron's sequence parallelism.
    """
    plan: Plan = {}
    owned: dict[str, dict[int, Rectangle]] = {}
    for operator in graph.planned:
        plan[operator.name] = chosen = _in_pattern(graph, operator, devices, roles, owned)
        parts = part_rectangles(operator, chosen)
        owned[operator.name] = dict(zip(chosen.devices, parts, strict=True))
    return plan


def _in_pattern(
    graph: Graph,
    operator: Operator,
    devices: int,
    roles: frozenset[Role],
    owned: Mapping[str, Mapping[int, Rectangle]],
) -> OperatorConfiguration:
    everyone = tuple(range(devices))
    splits = [
        OperatorConfiguration(degrees, everyone, sums)
        for degrees, sums in splits_of(operator, devices, roles)
        if math.prod(degrees) == max(degrees, default=1) == devices
    ]

    def dim(chosen: OperatorConfiguration) -> int:
        return chosen.degrees.index(devices)

    def by_role(*order: Role) -> list[OperatorConfiguration]:
        found = [c for c in splits if c.sums == 1 and operator.roles[dim(c)] in order]
        return sorted(found, key=lambda c: order.index(operator.roles[dim(c)] or order[0]))

    def stays(chosen: OperatorConfiguration) -> bool:
        return _moved(graph, operator, chosen, owned) == 0

    first = all(name in graph.inputs for name in operator.inputs)
    samples_first = (Role.SAMPLE, Role.ATTRIBUTE, Role.PARAMETER)
    if _is_layer(operator):
        second = [c for c in splits if c.sums == devices and not _by_outputs(operator, c)]
        if not first:
            second.sort(key=lambda c: samples_first.index(operator.roles[dim(c)] or Role.PARAMETER))
            kept = next(filter(stays, second), None)
            if kept is not None:
                return kept
        heads = len(operator.shape) - 2 if operator.attributes.get("blocks", 0) > 1 else -1
        columns = [c for c in splits if c.sums == 1 and _by_outputs(operator, c)]
        if columns:
            return min(
                columns,
                key=lambda c: (operator.shape[dim(c)] % devices > 0, dim(c) != heads, dim(c)),
            )
    others = by_role(*samples_first)
    kept = None if first else next(filter(stays, others), None)
    return kept or (others[0] if others else _alone(operator, 0))


def _is_layer(operator: Operator) -> bool:
    """Whether it is a table, a convolution, or a product with weights."""
    if not operator.parameters:
        return False
    summed = any(isinstance(axis, Summed) for p in operator.parameters for axis in p.axes)
    return summed or operator.kind == "convolution" or operator.kind in TABLES


def _by_outputs(operator: Operator, chosen: OperatorConfiguration) -> bool:
    """Whether a split of the output is one of the weights' outputs."""
    part = part_rectangles(operator, replace(chosen, sums=1))[0]
    found = parameter_rectangles(operator, part)
    return any(volume(found[p.name]) < math.prod(p.shape) for p in operator.parameters)


def _moved(
    graph: Graph,
    operator: Operator,
    chosen: OperatorConfiguration,
    owned: Mapping[str, Mapping[int, Rectangle]],
) -> int:
    """Elements that devices read of what others have."""
    moved = 0
    for device, part in zip(chosen.devices, part_rectangles(operator, chosen), strict=True):
        for index, name in enumerate(operator.inputs):
            need = input_rectangle(operator, index, part)
            if need is None or name in graph.inputs:
                continue
            here = owned[name].get(device)
            common = None if here is None else intersection(need, here)
            moved += volume(need) - (0 if common is None else volume(common))
    return moved


def tables_by_device(graph: Graph, devices: int) -> Plan:
    """Each table whole on one device, the largest first and where least is; data parallel beside.

    This is how recommenders are trained, whose tables are too large for every device.
    """
    plan = data_parallel(graph, range(devices))
    held = [0] * devices
    tables = [o for o in graph.planned if o.kind in TABLES and o.parameters]
    for operator in sorted(tables, key=lambda o: -_weights(o)):
        device = held.index(min(held))
        held[device] += _weights(operator)
        plan[operator.name] = _alone(operator, device)
    return plan


def layers_by_device(graph: Graph, devices: int) -> Plan:
    """Operators whole, in the order of the program, with about as many FLOPs for each device."""
    work = [max(o.flops, float(math.prod(o.shape))) for o in graph.planned]
    whole, done = sum(work), 0.0
    plan = {}
    for operator, own in zip(graph.planned, work, strict=True):
        middle = done + own / 2
        plan[operator.name] = _alone(operator, min(int(devices * middle / whole), devices - 1))
        done += own
    return plan


def within(
    plan: Plan, allowed: dict[str, tuple[OperatorConfiguration, ...]], otherwise: Plan
) -> Plan:
    """The plan with operators that may have no more than some configurations given one of these."""
    found = dict(plan)
    for name, choices in allowed.items():
        if found[name] not in choices:
            found[name] = otherwise[name] if otherwise[name] in choices else choices[0]
    return found


def _alone(operator: Operator, device: int) -> OperatorConfiguration:
    return OperatorConfiguration((1,) * len(operator.shape), (device,))


def _weights(operator: Operator) -> int:
    return sum(math.prod(parameter.shape) for parameter in operator.parameters)
