"""Writes a problem's arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from perfsearch.parallel.soap import tables as table
from perfsearch.parallel.soap import tasks
from perfsearch.parallel.soap.axes import Rectangle
from perfsearch.parallel.soap.configuration import OperatorConfiguration
from perfsearch.parallel.soap.layouts import item_bytes
from perfsearch.parallel.soap.tables import Integers

if TYPE_CHECKING:
    from perfsearch.parallel.soap.costs import ShardCost
    from perfsearch.parallel.soap.layouts import Layout
    from perfsearch.parallel.soap.machine import Machine
    from perfsearch.parallel.soap.tasks import Class, CostOf, Problem


def tables(problem: Problem, cost_of: CostOf) -> Integers:
    """All of a job's arrays in one."""
    machine, count = problem.machine, len(problem.operators)
    found = {**_classes(problem, cost_of), **_edges(problem)}
    found[table.NODE_OF] = np.arange(machine.devices) // machine.devices_per_node
    found[table.CAPACITY] = np.full(machine.devices, tasks.capacity_bytes(machine))
    hosts = found[table.PARTS].reshape(-1, table.P_WIDTH)
    hosts = hosts[:, [table.P_FORWARD_HOST, table.P_BACKWARD_HOST]]
    scalars = {
        table.OPERATORS: count,
        table.DEVICES: machine.devices,
        table.CONFIGS: len(found[table.CONFIG]),
        table.EDGES: len(problem.graph.edges),
        table.NEED_COUNT: int(found[table.NEED_OF].max(initial=0)) + 1,
        table.POINTS: len(tasks.CURVE_BYTES),
        **tasks.behaviour(machine, host_is_free=not hosts.any()),
    }
    packed = table.pack(scalars, found, table.T_SCALARS, table.T_TABLES)
    _make_absolute(packed, len(found[table.CONFIG]), len(found[table.EDGE_CLASS]))
    return packed


def _make_absolute(packed: Integers, configs: int, edge_classes: int) -> None:
    """Turn places within tables into places within the whole."""
    rows = packed[packed[table.CONFIG] :][: configs * table.C_WIDTH].reshape(configs, -1)
    for column, of in (
        (table.C_DEVICES, table.DEVICE_LISTS),
        (table.C_ROWS, table.PARTS),
        (table.C_GROUPS, table.SYNC_GROUPS),
        (table.C_TIMES, table.SYNC_TIMES),
    ):
        rows[:, column] += packed[of]
    rows = packed[packed[table.EDGE_CLASS] :][: edge_classes * table.E_WIDTH]
    rows = rows.reshape(edge_classes, -1)
    rows[:, table.E_NEEDS] += packed[table.NEEDS]
    rows[:, table.E_NEED_OF] += packed[table.NEED_OF]


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
    bucket = tasks.bucket_bytes(problem.graph, machine)
    class_first, layout_first = [0], [0]
    parts, devices, groups, times = _Pool(), _Pool(), _Pool(), _Pool()
    configs: list[list[int]] = []
    layouts = 0
    for kind in problem.classes:
        for layout, lists in zip(kind.layouts, kind.device_lists, strict=True):
            costs = [cost_of(kind.example, part, kind.gradients) for part in layout.parts]
            rows_of: dict[tuple[tuple[float, float], ...], int] = {}
            at = len(groups.values)
            for group, size in layout.syncs:
                packing = _nanoseconds(tasks.pack_us(machine, size))
                groups.add([len(group), packing, *group])
            for chosen in lists:
                sums = [
                    _nanoseconds(
                        tasks.sync_us(machine, tuple(chosen[m] for m in group), size, bucket)
                    )
                    for group, size in layout.syncs
                ]
                waits = tuple(tasks.sums_us(machine, kind, layout.parts, chosen))
                if waits not in rows_of:  # else as on other devices
                    rows_of[waits] = parts.add(_part_rows(machine, layout, costs, waits))
                rows = rows_of[waits]
                record = [layouts, len(chosen), devices.add(chosen), rows, len(sums), at]
                configs.append([*record, times.add(sums), 0])
            layouts += 1
            layout_first.append(len(configs))
        class_first.append(layouts)
    return {
        table.OPERATOR_CLASS: _array(problem.class_of),
        table.CLASS_FIRST: _array(class_first),
        table.LAYOUT_FIRST: _array(layout_first),
        table.CONFIG: _array(configs).reshape(-1, table.C_WIDTH),
        table.PARTS: parts.array(),
        table.DEVICE_LISTS: devices.array(),
        table.SYNC_GROUPS: groups.array(),
        table.SYNC_TIMES: times.array(),
    }


def _part_rows(
    machine: Machine,
    layout: Layout,
    costs: Sequence[ShardCost],
    waits: Sequence[tuple[float, float]],
) -> Iterator[int]:
    """What ``PARTS`` has of a layout on some devices, by ``tasks.sums_us`` of these."""
    for place, cost in enumerate(costs):
        forward, backward = waits[place] if waits else (0.0, 0.0)
        own_backward = cost.rows_us if layout.by_rows else cost.backward_us
        microseconds = (
            cost.forward_us + forward + machine.task_us,
            own_backward + backward + machine.task_us,
            cost.forward_host_us + (machine.sync_host_us if forward else 0.0),
            cost.backward_host_us + (machine.sync_host_us if backward else 0.0),
        )
        yield from map(_nanoseconds, microseconds)
        yield layout.resident_bytes[place]
        yield _nanoseconds(machine.optimizer_us_per_mib * layout.weight_bytes[place] / 2**20)


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
            read = tuple(tasks.needed(consumer, index, p, dims) for p in layout.parts)
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
        table.EDGE: _array([[s, t, k] for (s, t, _), k in zip(edges, edge_class, strict=True)]),
        table.IN_FIRST: np.searchsorted(consumers, range(count + 1)),
        table.OUT_FIRST: _array([0, *np.cumsum([len(out) for out in outs]).tolist()]),
        table.OUT_EDGES: _array([number for out in outs for number in out]),
        table.EDGE_CLASS: _array(records).reshape(-1, table.E_WIDTH),
        table.NEEDS: needs.array(),
        table.NEED_OF: need_of.array(),
        table.OWNED: _array(owned),
        table.RECTANGLES: rectangles.array(),
        table.COPIES: copies.array(),
        **_live([(s, t) for s, t, _ in edges], count),
    }


def _matches(own: Class, other: Class) -> list[int]:
    """For each configuration the other class's with the same parts on the same devices, or -1."""
    found = []
    rank = len(other.example.shape)
    for chosen in own.numbers:
        number = other.numbers.get(chosen, -1) if rank == len(own.example.shape) else -1
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
    return {table.LIVE_FIRST: _array([*first, len(pool.values)]), table.LIVE: pool.array()}
