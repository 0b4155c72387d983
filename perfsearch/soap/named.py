"""Plans that people write by hand and that have a name: to compare with, and to start from."""

from __future__ import annotations

import math

from perfsearch.soap.graph import Graph, Operator, Role
from perfsearch.soap.parts import TABLES, degrees_of
from perfsearch.soap.plan import OperatorConfiguration, Plan, data_parallel

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
    """Megatron's pattern as far as the space has it: outputs of layers, and heads, are split.

    What has neither goes over positions, as in its sequence parallelism, and else over samples. A
    layer's inputs are not split, so that there is an all-gather before the second layer of a pair.
    """
    return {o.name: _by_preference(o, devices, roles) for o in graph.planned}


def _by_preference(
    operator: Operator, devices: int, roles: frozenset[Role]
) -> OperatorConfiguration:
    legal = set(degrees_of(operator, devices, roles))
    for wanted in (Role.PARAMETER, Role.ATTRIBUTE, Role.SAMPLE):
        for dim, role in enumerate(operator.roles):
            degrees = tuple(devices if d == dim else 1 for d in range(len(operator.shape)))
            if role is wanted and degrees in legal:
                return OperatorConfiguration(degrees, tuple(range(devices)))
    return _alone(operator, 0)


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
