"""From a graph, costs and a machine to the arrays that the simulator runs on."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from perfsearch.parallel.soap import machine as machines
from perfsearch.parallel.soap import tables as table
from perfsearch.parallel.soap.axes import Rectangle
from perfsearch.parallel.soap.configuration import OperatorConfiguration, Plan, PlanError
from perfsearch.parallel.soap.costs import ShardCost
from perfsearch.parallel.soap.graph import Graph, Operator, Role
from perfsearch.parallel.soap.layouts import (
    Layout,
    class_key,
    degrees_of,
    gradients,
    item_bytes,
    layout,
    owned_keys,
    placements,
)
from perfsearch.parallel.soap.machine import KINDS, Machine
from perfsearch.parallel.soap.placement import parameters
from perfsearch.parallel.soap.rules import input_rectangle
from perfsearch.parallel.soap.shared_sums import partners, summed_bytes
from perfsearch.parallel.soap.tables import Integers, Reals

CURVE_BYTES = [256 * 4**p for p in range(12)]
"""Sizes at which the compiled simulator knows a transfer's time."""

_GIB = 2**30


CostOf = Callable[[Operator, Rectangle, tuple[bool, ...]], ShardCost]
"""Cost of the part of an operator that computes a rectangle; which inputs get a gradient."""


@dataclass
class Class:
    """Operators that only differ in name: their layouts, and the configurations of each."""

    example: Operator
    gradients: tuple[bool, ...]
    only: tuple[OperatorConfiguration, ...] | None = None
    layouts: list[Layout] = field(default_factory=list)
    device_lists: list[list[tuple[int, ...]]] = field(default_factory=list)
    numbers: dict[OperatorConfiguration, int] = field(default_factory=dict)
    """Configuration to its number among all classes'."""


class Problem:
    """A graph on a machine, as tables, and the way between plans and configuration numbers.

    Args:
        graph: the job's.
        machine: to plan for.
        cost_of: times of parts.
        roles: of dimensions that may be split.
        extra: plans whose configurations must be among those that can be simulated.
        allowed: for some operators all that they may have beside ``extra``.

    Attributes:
        tables: for the compiled simulator.
        curves: times of transfers, for the same.
        classes: of operators.
        class_of: (operators), index of each one's class.
        edges: producer, consumer and the consumer's input number, in order of consumers.

    Raises:
        ValueError: an operator has a type or shape that cannot be planned.

    """

    def __init__(
        self,
        graph: Graph,
        machine: Machine,
        cost_of: CostOf,
        roles: frozenset[Role] = frozenset(Role),
        extra: tuple[Plan, ...] = (),
        allowed: Mapping[str, tuple[OperatorConfiguration, ...]] | None = None,
    ) -> None:
        self.graph = graph
        self.machine = machine
        self.operators = graph.planned
        self._owned = owned_keys(graph)
        self.classes: list[Class] = []
        self.class_of: list[int] = []
        place_of = {o.name: i for i, o in enumerate(self.operators)}
        edges = [(place_of[source], place_of[target], i) for source, target, i in graph.edges]
        self.edges = sorted(edges, key=lambda edge: (edge[1], edge[2]))
        self._classify(allowed or {})
        self._configure(roles, extra)
        self.tables = self._build(cost_of)
        self.curves = curves_of(machine)

    def numbers_of(self, plan: Plan) -> Integers:
        """Configuration numbers of a plan.

        Raises:
            PlanError: an operator's configuration is not among those of its class.

        """
        numbers = np.zeros(len(self.operators), dtype=np.int64)
        for place, operator in enumerate(self.operators):
            known = self.classes[self.class_of[place]].numbers
            if plan[operator.name] not in known:
                chosen = plan[operator.name]
                raise PlanError(
                    f"operator {operator.name}: degrees {list(chosen.degrees)} on devices "
                    f"{list(chosen.devices)} are not among what is simulated here"
                )
            numbers[place] = known[plan[operator.name]]
        return numbers

    def plan_of(self, numbers: Integers) -> Plan:
        """The plan of configuration numbers."""
        return {
            operator.name: self._by_number[int(number)]
            for operator, number in zip(self.operators, numbers, strict=True)
        }

    def configurations(self, operator: int) -> list[OperatorConfiguration]:
        """What an operator may have, in the order of their numbers."""
        return list(self.classes[self.class_of[operator]].numbers)

    def _classify(self, allowed: Mapping[str, tuple[OperatorConfiguration, ...]]) -> None:
        found: dict[Hashable, int] = {}
        for operator in self.operators:
            only = allowed.get(operator.name)
            key = (class_key(self.graph, operator, self._owned[operator.name]), only)
            if key not in found:
                found[key] = len(self.classes)
                self.classes.append(Class(operator, gradients(self.graph, operator), only))
            self.class_of.append(found[key])

    def _configure(self, roles: frozenset[Role], extra: tuple[Plan, ...]) -> None:
        asked: list[dict[tuple[int, ...], list[tuple[int, ...]]]] = [{} for _ in self.classes]
        for index, kind in enumerate(self.classes):
            if kind.only is not None:
                for chosen in kind.only:
                    asked[index].setdefault(chosen.degrees, []).append(chosen.devices)
                continue
            for degrees in degrees_of(kind.example, self.machine.devices, roles):
                asked[index][degrees] = placements(degrees, self.machine.devices)
        for plan in extra:
            for place, operator in enumerate(self.operators):
                chosen = plan[operator.name]
                if self.classes[self.class_of[place]].only is not None:
                    continue
                lists = asked[self.class_of[place]].setdefault(chosen.degrees, [])
                if chosen.devices not in lists:
                    lists.append(chosen.devices)
        number = 0
        for kind, of_class in zip(self.classes, asked, strict=True):
            owned = self._owned[kind.example.name]
            for degrees, lists in of_class.items():
                kind.layouts.append(
                    layout(
                        kind.example,
                        degrees,
                        owned,
                        self.machine.state_per_weight,
                        self.machine.updates_rows,
                    )
                )
                kind.device_lists.append(lists)
                for devices in lists:
                    kind.numbers[OperatorConfiguration(degrees, devices)] = number
                    number += 1
        self._by_number = [c for kind in self.classes for c in kind.numbers]

    def _build(self, cost_of: CostOf) -> Integers:
        from perfsearch.parallel.soap import _assemble

        return _assemble.tables(self, cost_of)


def behaviour(machine: Machine, host_is_free: bool) -> dict[int, int]:
    """The scalars that say how the execution behaves."""
    transfer, sync = round(1e3 * machine.transfer_host_us), round(1e3 * machine.sync_host_us)
    return {
        table.TRANSFER_HOST_NS: transfer,
        table.SYNC_HOST_NS: sync,
        table.SYNC_ON_LINK: int(machine.sync_on_link),
        table.COPY_NS: round(1e3 * machine.copy_us),
        table.COPY_NS_PER_MIB: round(1e3 * machine.copy_us_per_mib),
        table.OPTIMIZER_NS: round(1e3 * machine.optimizer_us),
        table.STEP_NS: round(1e3 * machine.step_us),
        table.HOST_NS: round(1e3 * machine.host_us),
        table.HOST_IS_FREE: int(host_is_free and not transfer and not sync),
    }


def curves_of(machine: Machine) -> Reals:
    """Sizes of the curves' points, then nanoseconds by side, kind, members and size."""
    times = np.zeros((2, len(KINDS), machine.devices + 1, len(CURVE_BYTES)))
    for side, curves in enumerate((machine.within, machine.across or machine.within)):
        for row, kind in enumerate(KINDS):
            for count in range(1, machine.devices + 1) if kind in curves else ():
                curve = machines.at_members(curves[kind], count)
                for column, size in enumerate(CURVE_BYTES):
                    times[side, row, count, column] = 1e3 * machines.at_size(curve, size)
    return np.concatenate([np.array(CURVE_BYTES, dtype=np.float64), times.ravel()])


def bucket_bytes(graph: Graph, machine: Machine) -> int:
    """Size of the buckets in which small gradients are summed: what there is, up to the limit."""
    limit = math.ceil(machine.bucket_mib * 2**20)
    sizes = (
        item_bytes(p.dtype) * math.prod(p.shape) for p in parameters(graph).values() if p.trained
    )
    return min(limit, sum(size for size in sizes if size < limit))


def _curves(machine: Machine, devices: Sequence[int]) -> Mapping[str, machines.Curve]:
    nodes = {device // machine.devices_per_node for device in devices}
    return machine.across if len(nodes) > 1 else machine.within


def sync_us(machine: Machine, devices: tuple[int, ...], size: int, bucket: int) -> float:
    """Time of summing a gradient over devices beside computing; small ones share a latency.

    Args:
        machine: has the times of collectives.
        devices: that hold the gradient.
        size: of the gradient, bytes.
        bucket: by ``bucket_bytes``.

    """
    curve = machines.at_members(_curves(machine, devices)["all_reduce"], len(devices))
    if size >= bucket:
        return machine.sync_slowdown * machines.at_size(curve, size)
    return machine.sync_slowdown * machines.at_size(curve, bucket) * size / bucket


def sums_us(
    machine: Machine, kind: Class, parts: Sequence[Rectangle], devices: Sequence[int]
) -> list[tuple[float, float]]:
    """By part, how long it exchanges sums with others within its forward and backward task.

    Empty where the operator has none. That parts wait for one another there is left out.

    Args:
        machine: has the times of collectives.
        kind: of the operator.
        parts: of it.
        devices: that have them.

    """
    found = []
    for part, mine in zip(parts, partners(kind.example, parts), strict=False):
        members = [devices[place] for place in mine]
        sizes = summed_bytes(kind.example, part, kind.gradients[0])
        curve = machines.at_members(_curves(machine, members)["all_reduce"], len(members))
        alone = len(members) < 2
        forward, backward = (
            0.0 if alone or not size else machines.at_size(curve, size) for size in sizes
        )
        found.append((forward, backward))
    return found


def pack_us(machine: Machine, size: int) -> float:
    """Time of packing a gradient into its bucket and taking it out; a large one stays in place."""
    mib = size / 2**20
    if mib >= machine.bucket_mib:
        return 0.0
    return 2 * machine.copy_us_per_mib * mib


def capacity_bytes(machine: Machine) -> int:
    """The hard limit of a device."""
    return math.floor(machine.memory_gib * _GIB)


def needed(kind: Class, index: int, part: Rectangle, dims: int) -> Rectangle:
    """What a part reads of an input, an empty rectangle where that is nothing."""
    rectangle = input_rectangle(kind.example, index, part)
    return rectangle if rectangle is not None else ((0, 0),) * dims


__all__ = ["Class", "CostOf", "Problem", "ShardCost", "item_bytes"]
