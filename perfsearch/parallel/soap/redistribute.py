"""Who sends what to whom where producer and consumer are split differently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from perfsearch.parallel.soap.axes import Rectangle
from perfsearch.parallel.soap.configuration import share
from perfsearch.parallel.soap.graph import Graph
from perfsearch.parallel.soap.rectangles import intersection, volume
from perfsearch.parallel.soap.rules import input_rectangle


class Pattern(StrEnum):
    """What a redistribution is; its gradient goes by the transposed one."""

    LOCAL = "local"
    ALL_GATHER = "all_gather"
    """The gradient: reduce-scatter."""
    BROADCAST = "broadcast"
    """The gradient: reduce."""
    ALL_TO_ALL = "all_to_all"
    POINT_TO_POINT = "point_to_point"


@dataclass(frozen=True)
class Message:
    """A piece that a device has and another, or the same one, needs."""

    source: int
    destination: int
    rectangle: Rectangle


@dataclass(frozen=True)
class Redistribution:
    """From the parts of a producer to what consumers need of it.

    Attributes:
        producer: operator.
        owned: part of each device that has one.
        needed: what each device needs.
        messages: in the one order that all ranks follow, those of a device to itself included.
        consumers: operators and their input numbers, in topological order; all read the same.

    """

    producer: str
    owned: Mapping[int, Rectangle]
    needed: Mapping[int, Rectangle]
    messages: tuple[Message, ...]
    consumers: tuple[tuple[str, int], ...] = ()

    @property
    def participants(self) -> tuple[int, ...]:
        """Devices that send to others or receive from others."""
        moved = [m for m in self.messages if m.source != m.destination]
        return tuple(sorted({d for m in moved for d in (m.source, m.destination)}))

    @property
    def moved_elements(self) -> int:
        """Elements that change the device."""
        moved = (m for m in self.messages if m.source != m.destination)
        return sum(volume(m.rectangle) for m in moved)


def messages(
    owned: Mapping[int, Rectangle], needed: Mapping[int, Rectangle]
) -> tuple[Message, ...]:
    """Intersect what each device needs with what each has."""
    found = []
    for destination in sorted(needed):
        for source in sorted(owned):
            piece = intersection(needed[destination], owned[source])
            if piece is not None:
                found.append(Message(source, destination, piece))
    return tuple(found)


def redistributions(graph: Graph, placed: list[dict[str, Rectangle]]) -> list[Redistribution]:
    """All of a plan, producers in topological order.

    Consumers that need the same of a producer share one.

    Args:
        graph: of the model.
        placed: by ``placement.placements``.

    """
    found: list[Redistribution] = []
    by_producer: dict[str, list[tuple[str, int]]] = {}
    for producer, consumer, index in graph.edges:
        by_producer.setdefault(producer, []).append((consumer, index))
    for operator in graph.planned:
        shared: dict[tuple[tuple[int, Rectangle], ...], list[tuple[str, int]]] = {}
        for consumer, index in by_producer.get(operator.name, ()):
            needs = _needs(graph, placed, consumer, index)
            shared.setdefault(tuple(sorted(needs.items())), []).append((consumer, index))
        owned = {d: mine[operator.name] for d, mine in enumerate(placed) if operator.name in mine}
        for key, consumers in shared.items():
            needed = dict(key)
            moves = messages(owned, needed)
            found.append(Redistribution(operator.name, owned, needed, moves, tuple(consumers)))
    return found


def batch_redistributions(
    leaves: Sequence[str], graph: Graph, placed: Sequence[Mapping[str, Rectangle]]
) -> list[Redistribution]:
    """Each tensor of the batch, from the even shares of samples that all ranks load.

    Args:
        leaves: names of the batch's tensors.
        graph: of the model.
        placed: by ``placement.placements``.

    """
    found = []
    for name in leaves:
        _, *rest = graph.by_name[name].whole
        shares = [share(graph.batch, len(placed), device) for device in range(len(placed))]
        owned = {d: (span, *rest) for d, span in enumerate(shares) if span[0] < span[1]}
        needed = {d: (mine[name][0], *rest) for d, mine in enumerate(placed) if name in mine}
        found.append(Redistribution(name, owned, needed, messages(owned, needed)))
    return found


def _needs(
    graph: Graph, placed: list[dict[str, Rectangle]], consumer: str, index: int
) -> dict[int, Rectangle]:
    operator = graph.by_name[consumer]
    needs = {}
    for device, mine in enumerate(placed):
        if consumer in mine:
            need = input_rectangle(operator, index, mine[consumer])
            if need is not None:
                needs[device] = need
    return needs


def pattern(redistribution: Redistribution) -> Pattern:
    """Recognise the collective that does the same."""
    participants = redistribution.participants
    if not participants:
        return Pattern.LOCAL
    owned, needed = redistribution.owned, redistribution.needed
    same = len(set(needed.values())) == 1
    if same and len(owned) == 1 and len(needed) > 1:
        return Pattern.BROADCAST
    everyone = set(owned) == set(needed) == set(participants)
    if same and everyone and stacking(redistribution) is not None:
        return Pattern.ALL_GATHER
    moved = {(m.source, m.destination) for m in redistribution.messages}
    if everyone and len(moved) == len(participants) ** 2:
        return Pattern.ALL_TO_ALL
    return Pattern.POINT_TO_POINT


def stacking(redistribution: Redistribution) -> int | None:
    """The dimension along which equal parts, in the order of devices, make up what is needed."""
    need = next(iter(redistribution.needed.values()))
    parts = [redistribution.owned[d] for d in sorted(redistribution.owned)]
    varying = [dim for dim in range(len(need)) if any(part[dim] != need[dim] for part in parts)]
    if len(varying) != 1:
        return None
    (dim,) = varying
    each, rest = divmod(need[dim][1] - need[dim][0], len(parts))
    start = need[dim][0]
    expected = [(start + i * each, start + (i + 1) * each) for i in range(len(parts))]
    return dim if not rest and [part[dim] for part in parts] == expected else None
