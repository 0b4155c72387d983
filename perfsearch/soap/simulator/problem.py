"""From a graph, costs and a machine to the arrays that the simulator runs on."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from perfsearch.soap.graph import Graph, Operator, Rectangle, Role, Summand
from perfsearch.soap.parts import (
    Layout,
    class_key,
    device_lists,
    gradients,
    item_bytes,
    layout_of,
    owned_keys,
    reduction_bytes,
    reduction_partners,
    splits_of,
)
from perfsearch.soap.plan import OperatorConfiguration, Plan, PlanError, parameters
from perfsearch.soap.rules.base import input_rectangle
from perfsearch.soap.simulator import memory
from perfsearch.soap.simulator.machine import (
    KINDS,
    Machine,
    ShardCost,
    at_members,
    at_size,
)
from perfsearch.soap.simulator.memory import Integers, Reals

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
        self.tables = tables(self, cost_of)
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

    def own_best(self) -> Plan:
        """Each operator as it is fastest by itself: its passes and the sums of its gradients."""
        best = [self._fastest(kind) for kind in self.classes]
        return {o.name: best[k] for o, k in zip(self.operators, self.class_of, strict=True)}

    def _fastest(self, kind: Class) -> OperatorConfiguration:
        def nanoseconds(number: int) -> int:
            record = self.tables[self.tables[memory.CONFIG] + memory.C_WIDTH * number :]
            count, at = record[memory.C_PARTS], record[memory.C_ROWS]
            rows = self.tables[at : at + count * memory.P_WIDTH].reshape(count, -1)
            passes = rows[:, memory.P_FORWARD] + rows[:, memory.P_BACKWARD]
            sums = self.tables[record[memory.C_TIMES] :][: record[memory.C_GROUP_COUNT]]
            return int(passes.max() + sums.sum())

        return min(kind.numbers, key=lambda chosen: nanoseconds(kind.numbers[chosen]))

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
        asked: list[dict[tuple[tuple[int, ...], int], list[tuple[int, ...]]]]
        asked = [{} for _ in self.classes]
        for index, kind in enumerate(self.classes):
            if kind.only is not None:
                for chosen in kind.only:
                    split = (chosen.degrees, chosen.sums)
                    asked[index].setdefault(split, []).append(chosen.devices)
                continue
            for split in splits_of(kind.example, self.machine.devices, roles):
                asked[index][split] = device_lists(split[0], self.machine.devices)
        for plan in extra:
            for place, operator in enumerate(self.operators):
                chosen = plan[operator.name]
                if self.classes[self.class_of[place]].only is not None:
                    continue
                lists = asked[self.class_of[place]].setdefault((chosen.degrees, chosen.sums), [])
                if chosen.devices not in lists:
                    lists.append(chosen.devices)
        number = 0
        for kind, of_class in zip(self.classes, asked, strict=True):
            owned = self._owned[kind.example.name]
            for (degrees, sums), lists in of_class.items():
                kind.layouts.append(
                    layout_of(
                        kind.example,
                        degrees,
                        owned,
                        self.machine.state_per_weight,
                        self.machine.updates_rows,
                        sums,
                    )
                )
                kind.device_lists.append(lists)
                for devices in lists:
                    kind.numbers[OperatorConfiguration(degrees, devices, sums)] = number
                    number += 1
        self._by_number = [c for kind in self.classes for c in kind.numbers]


def behaviour(machine: Machine, host_is_free: bool) -> dict[int, int]:
    """The scalars that say how the execution behaves."""
    transfer, sync = round(1e3 * machine.transfer_host_us), round(1e3 * machine.sync_host_us)
    return {
        memory.TRANSFER_HOST_NS: transfer,
        memory.SYNC_HOST_NS: sync,
        memory.SYNC_ON_LINK: int(machine.sync_on_link),
        memory.COPY_NS: round(1e3 * machine.copy_us),
        memory.COPY_NS_PER_MIB: round(1e3 * machine.copy_us_per_mib),
        memory.OPTIMIZER_NS: round(1e3 * machine.optimizer_us),
        memory.STEP_NS: round(1e3 * machine.step_us),
        memory.HOST_NS: round(1e3 * machine.host_us),
        memory.HOST_IS_FREE: int(host_is_free and not transfer and not sync),
    }


def curves_of(machine: Machine) -> Reals:
    """Sizes of the curves' points, then nanoseconds by level, kind, members and size."""
    times = np.zeros((len(machine.levels), len(KINDS), machine.devices + 1, len(CURVE_BYTES)))
    for level, curves in enumerate(machine.levels):
        for row, kind in enumerate(KINDS):
            for count in range(1, machine.devices + 1) if kind in curves else ():
                curve = at_members(curves[kind], count)
                for column, size in enumerate(CURVE_BYTES):
                    times[level, row, count, column] = 1e3 * at_size(curve, size)
    return np.concatenate([np.array(CURVE_BYTES, dtype=np.float64), times.ravel()])


def bucket_bytes(graph: Graph, machine: Machine) -> int:
    """Size of the buckets in which small gradients are summed: what there is, up to the limit."""
    limit = math.ceil(machine.bucket_mib * 2**20)
    sizes = (
        item_bytes(p.dtype) * math.prod(p.shape) for p in parameters(graph).values() if p.trained
    )
    return min(limit, sum(size for size in sizes if size < limit))


def sync_us(machine: Machine, devices: tuple[int, ...], size: int, bucket: int) -> float:
    """Time of summing a gradient over devices beside computing; small ones share a latency.

    Args:
        machine: has the times of collectives.
        devices: that hold the gradient.
        size: of the gradient, bytes.
        bucket: by ``bucket_bytes``.

    """
    curve = at_members(machine.curves_among(devices)["all_reduce"], len(devices))
    if size >= bucket:
        return machine.sync_slowdown * at_size(curve, size)
    return machine.sync_slowdown * at_size(curve, bucket) * size / bucket


def partial_reductions_us(
    machine: Machine, kind: Class, parts: Sequence[Rectangle], devices: Sequence[int]
) -> list[tuple[float, float]]:
    """By part, how long its partial reductions take within its forward and backward task.

    Empty where the operator has none. That parts wait for one another there is left out.

    Args:
        machine: has the times of collectives.
        kind: of the operator.
        parts: of it.
        devices: that have them.

    """
    found = []
    for part, mine in zip(parts, reduction_partners(kind.example, parts), strict=False):
        members = [devices[place] for place in mine]
        sizes = reduction_bytes(kind.example, part, bool(kind.gradients and kind.gradients[0]))
        kinds = ("all_reduce", "all_reduce")
        if isinstance(part, Summand):
            kinds = ("reduce_scatter", "all_gather")
        curves = machine.curves_among(members)
        forward, backward = (
            at_size(at_members(curves[way], len(members)), size)
            if size and len(members) > 1
            else 0.0
            for way, size in zip(kinds, sizes, strict=True)
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


# -----------------------------------------------------------------------------
# The arrays of a problem.


def tables(problem: Problem, cost_of: CostOf) -> Integers:
    """All of a job's arrays in one."""
    machine, count = problem.machine, len(problem.operators)
    found = {**_classes(problem, cost_of), **_edges(problem)}
    devices = range(machine.devices)
    found[memory.LINK_LEVEL] = _array([machine.level(a, b) for a in devices for b in devices])
    found[memory.CAPACITY] = np.full(machine.devices, capacity_bytes(machine))
    hosts = found[memory.PARTS].reshape(-1, memory.P_WIDTH)
    hosts = hosts[:, [memory.P_FORWARD_HOST, memory.P_BACKWARD_HOST]]
    scalars = {
        memory.OPERATORS: count,
        memory.DEVICES: machine.devices,
        memory.CONFIGS: len(found[memory.CONFIG]),
        memory.EDGES: len(problem.graph.edges),
        memory.NEED_COUNT: int(found[memory.NEED_OF].max(initial=0)) + 1,
        memory.POINTS: len(CURVE_BYTES),
        **behaviour(machine, host_is_free=not hosts.any()),
    }
    packed = memory.pack(scalars, found, memory.T_SCALARS, memory.T_TABLES)
    _make_absolute(packed, len(found[memory.CONFIG]), len(found[memory.EDGE_CLASS]))
    return packed


def _make_absolute(packed: Integers, configs: int, edge_classes: int) -> None:
    """Turn places within tables into places within the whole."""
    rows = packed[packed[memory.CONFIG] :][: configs * memory.C_WIDTH].reshape(configs, -1)
    for column, of in (
        (memory.C_DEVICES, memory.DEVICE_LISTS),
        (memory.C_ROWS, memory.PARTS),
        (memory.C_GROUPS, memory.SYNC_GROUPS),
        (memory.C_TIMES, memory.SYNC_TIMES),
    ):
        rows[:, column] += packed[of]
    rows = packed[packed[memory.EDGE_CLASS] :][: edge_classes * memory.E_WIDTH]
    rows = rows.reshape(edge_classes, -1)
    rows[:, memory.E_NEEDS] += packed[memory.NEEDS]
    rows[:, memory.E_NEED_OF] += packed[memory.NEED_OF]


class _Pool:
    """Numbers laid end to end."""

    def __init__(self) -> None:
        self.values: list[int] = []

    def add(self, values: Iterable[int]) -> int:
        """Append, and return where they begin."""
        start = len(self.values)
        self.values.extend(values)
        return start

    def rectangles(self, rectangles: Iterable[Rectangle]) -> int:
        """Append low and high of every dimension."""
        return self.add(bound for rectangle in rectangles for r in rectangle for bound in r)

    def array(self) -> Integers:
        """All of them."""
        return _array(self.values)


def _array(values: Sequence[Any]) -> Integers:
    return np.array(values, dtype=np.int64)


def _nanoseconds(microseconds: float) -> int:
    return max(0, round(1e3 * microseconds))


def _classes(problem: Problem, cost_of: CostOf) -> dict[int, Integers]:
    machine = problem.machine
    bucket = bucket_bytes(problem.graph, machine)
    class_first, layout_first = [0], [0]
    parts, devices, groups, times = _Pool(), _Pool(), _Pool(), _Pool()
    configs: list[list[int]] = []
    layouts = 0
    for kind in problem.classes:
        for layout, lists in zip(kind.layouts, kind.device_lists, strict=True):
            costs = [cost_of(kind.example, part, kind.gradients) for part in layout.parts]
            rows_of: dict[Hashable, int] = {}
            at = len(groups.values)
            for group, size in layout.syncs:
                packing = _nanoseconds(pack_us(machine, size))
                groups.add([len(group), packing, *group])
            for chosen in lists:
                sums = [
                    _nanoseconds(sync_us(machine, tuple(chosen[m] for m in group), size, bucket))
                    for group, size in layout.syncs
                ]
                waits = tuple(partial_reductions_us(machine, kind, layout.parts, chosen))
                speeds = tuple(machine.speed(device) for device in chosen)
                if (waits, speeds) not in rows_of:  # else as on other devices
                    rows = parts.add(_part_rows(machine, layout, costs, waits, speeds))
                    rows_of[waits, speeds] = rows
                rows = rows_of[waits, speeds]
                record = [layouts, len(chosen), devices.add(chosen), rows, len(sums), at]
                configs.append([*record, times.add(sums), 0])
            layouts += 1
            layout_first.append(len(configs))
        class_first.append(layouts)
    return {
        memory.OPERATOR_CLASS: _array(problem.class_of),
        memory.CLASS_FIRST: _array(class_first),
        memory.LAYOUT_FIRST: _array(layout_first),
        memory.CONFIG: _array(configs).reshape(-1, memory.C_WIDTH),
        memory.PARTS: parts.array(),
        memory.DEVICE_LISTS: devices.array(),
        memory.SYNC_GROUPS: groups.array(),
        memory.SYNC_TIMES: times.array(),
    }


def _part_rows(
    machine: Machine,
    layout: Layout,
    costs: Sequence[ShardCost],
    waits: Sequence[tuple[float, float]],
    speeds: Sequence[float],
) -> Iterator[int]:
    """Rows of ``PARTS`` for a layout on some devices; ``waits`` by ``partial_reductions_us``."""
    for place, cost in enumerate(costs):
        forward, backward = waits[place] if waits else (0.0, 0.0)
        own_backward = cost.rows_us if layout.by_rows else cost.backward_us
        microseconds = (
            cost.forward_us / speeds[place] + forward + machine.task_us,
            own_backward / speeds[place] + backward + machine.task_us,
            cost.forward_host_us + (machine.sync_host_us if forward else 0.0),
            cost.backward_host_us + (machine.sync_host_us if backward else 0.0),
        )
        yield from map(_nanoseconds, microseconds)
        yield layout.resident_bytes[place]
        mib = layout.weight_bytes[place] / 2**20
        yield _nanoseconds(machine.optimizer_us_per_mib * mib / speeds[place])


def _edges(problem: Problem) -> dict[int, Integers]:
    edges = problem.edges
    kinds: dict[tuple[int, int, int], int] = {}
    edge_class = [
        kinds.setdefault((problem.class_of[s], problem.class_of[t], i), len(kinds))
        for s, t, i in edges
    ]
    rectangles, needs, copies = _Pool(), _Pool(), _Pool()
    owned = [
        rectangles.rectangles(layout.parts) for kind in problem.classes for layout in kind.layouts
    ]
    records: list[list[int]] = []
    need_of = _Pool()
    offset_of: dict[int, tuple[Rectangle, ...]] = {}
    shared: dict[tuple[tuple[Rectangle, ...], tuple[int, ...]], int] = {}
    for source, target, index in kinds:
        producer, consumer = problem.classes[source], problem.classes[target]
        dims = len(producer.example.shape)
        offsets = []
        for layout in consumer.layouts:
            read = tuple(needed(consumer, index, p, dims) for p in layout.parts)
            offsets.append(rectangles.rectangles(read))
            offset_of[offsets[-1]] = read
        size, gradient = item_bytes(producer.example.dtype), consumer.gradients[index]
        back, on = (
            copies.add(_matches(consumer, producer)),
            copies.add(_matches(producer, consumer)),
        )
        numbers = [
            shared.setdefault((offset_of[offset], devices), len(shared))
            for offset, lists in zip(offsets, consumer.device_lists, strict=True)
            for devices in lists
        ]
        places = [needs.add(offsets), need_of.add(numbers)]
        records.append([size, int(gradient), dims, *places, back, on])
    outs: list[list[int]] = [[] for _ in problem.operators]
    for number, (source, _, _) in enumerate(edges):
        outs[source].append(number)
    count = len(problem.operators)
    consumers = [target for _, target, _ in edges]
    return {
        memory.EDGE: _array([[s, t, k] for (s, t, _), k in zip(edges, edge_class, strict=True)]),
        memory.IN_FIRST: np.searchsorted(consumers, range(count + 1)),
        memory.OUT_FIRST: _array([0, *np.cumsum([len(out) for out in outs]).tolist()]),
        memory.OUT_EDGES: _array([number for out in outs for number in out]),
        memory.EDGE_CLASS: _array(records).reshape(-1, memory.E_WIDTH),
        memory.NEEDS: needs.array(),
        memory.NEED_OF: need_of.array(),
        memory.OWNED: _array(owned),
        memory.RECTANGLES: rectangles.array(),
        memory.COPIES: copies.array(),
        **_live([(s, t) for s, t, _ in edges], count),
    }


def _matches(own: Class, other: Class) -> list[int]:
    """For each configuration the other class's with the same parts on the same devices, or -1."""
    found = []
    rank = len(other.example.shape)
    for chosen in own.numbers:
        same_rank = rank == len(own.example.shape)
        number = other.numbers.get(chosen, -1) if same_rank else -1
        if number < 0 and same_rank and chosen.sums > 1:
            number = other.numbers.get(replace(chosen, sums=1), -1)
        if number < 0 and rank and chosen.degrees and all(d == 1 for d in chosen.degrees[1:]):
            degrees = (chosen.degrees[0], *[1] * (rank - 1))
            number = other.numbers.get(OperatorConfiguration(degrees, chosen.devices), -1)
        found.append(number)
    return found


def _live(edges: Sequence[tuple[int, int]], count: int) -> dict[int, Integers]:
    """The edges across each boundary between operators."""
    across: list[list[int]] = [[] for _ in range(count)]
    for number, (source, target) in enumerate(edges):
        for boundary in range(source, target):
            across[boundary].append(number)
    pool = _Pool()
    first = [pool.add(live) for live in across]
    return {memory.LIVE_FIRST: _array([*first, len(pool.values)]), memory.LIVE: pool.array()}
