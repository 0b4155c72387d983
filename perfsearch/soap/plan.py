"""A plan: how each operator is split and placed, what devices store, and what they exchange."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from perfsearch.soap.graph import (
    INPUT,
    Graph,
    Operator,
    Parameter,
    Range,
    Rectangle,
    Role,
    Summand,
    Summed,
    hull,
    intersection,
    share,
    volume,
)
from perfsearch.soap.rules.base import (
    input_rectangle,
    parameter_rectangles,
    stage_rectangles,
)


@dataclass(frozen=True)
class OperatorConfiguration:
    """How one operator is split and placed.

    Attributes:
        degrees: number of parts along each dimension of the output.
        devices: part ``k``, in row-major order of the degrees, runs on ``devices[k]``; no device
            has two.
        sums: consecutive parts that share the sums which their elements are (see ``Summand``), as
            the second layer of Megatron's pairs does; 1: none do.

    """

    degrees: tuple[int, ...]
    devices: tuple[int, ...]
    sums: int = 1


Plan = dict[str, OperatorConfiguration]
"""By operator; those of ``Graph.inputs`` have none."""


class PlanError(ValueError):
    """A plan does not fit the model or the machine."""


def part_rectangles(operator: Operator, configuration: OperatorConfiguration) -> list[Rectangle]:
    """What each part computes; where shares are uneven the first ones are larger by one."""
    ranges = [
        [share(size, degree, i) for i in range(degree)]
        for size, degree in zip(operator.shape, configuration.degrees, strict=True)
    ]
    parts: list[Rectangle] = [tuple(part) for part in itertools.product(*ranges)]
    count = configuration.sums
    if count == 1:
        return parts
    dim, spans = _side_by_side(operator, parts)
    found: list[Rectangle] = []
    for number, part in enumerate(parts):
        first = number - number % count
        span = (spans[first][0], spans[first + count - 1][1])
        found.append(Summand(part, dim, spans[number], span, number % count, count))
    return found


def _side_by_side(operator: Operator, parts: Sequence[Rectangle]) -> tuple[int, list[Range]]:
    """The dimension of the first stage along which parts of one size lie one after another.

    And their ranges there.

    Raises:
        PlanError: they do not.

    """
    firsts = [stage_rectangles(operator, part)[0] for part in parts]
    varying = [d for d, ranges in enumerate(zip(*firsts, strict=True)) if len(set(ranges)) > 1]
    if len(varying) == 1:
        spans = [first[varying[0]] for first in firsts]
        each = spans[0][1] - spans[0][0]
        if spans == [
            (spans[0][0] + i * each, spans[0][0] + (i + 1) * each) for i in range(len(spans))
        ]:
            return varying[0], spans
    raise PlanError(f"operator {operator.name}: its parts do not lie side by side")


def sums_of(operator: Operator, degrees: tuple[int, ...]) -> list[int]:
    """Numbers of parts, above 1, that can share sums at these degrees.

    The operator must be a sum that knows shares, and its parts of one size, one after another
    along one dimension of what is summed.
    """
    count = math.prod(degrees)
    if count < 2 or max(degrees) < count or not operator.stages:
        return []
    axes = [*operator.stages[0].reads, *(p.axes for p in operator.parameters)]
    sizes = [axis.size for each in axes for axis in each if isinstance(axis, Summed)]
    if not sizes:
        return []
    try:
        configuration = OperatorConfiguration(degrees, tuple(range(count)))
        _side_by_side(operator, part_rectangles(operator, configuration))
    except PlanError:
        return []
    return [n for n in range(2, min(count, *sizes) + 1) if count % n == 0]


def data_parallel(graph: Graph, devices: Sequence[int]) -> Plan:
    """Every operator over samples, on all devices; what has no samples runs on the first one."""
    return {o.name: over_samples(o, devices) for o in graph.planned}


def over_samples(operator: Operator, devices: Sequence[int]) -> OperatorConfiguration:
    """Split over samples as far as there are any; whole on the first device otherwise."""
    degrees = [1] * len(operator.shape)
    for dim, role in enumerate(operator.roles):
        if role is Role.SAMPLE:
            degrees[dim] = min(len(devices), operator.shape[dim])
            break
    return OperatorConfiguration(tuple(degrees), tuple(devices[: math.prod(degrees)]))


@dataclass(frozen=True)
class Leftover:
    """What data parallelism leaves whole on one device.

    Attributes:
        share: of the forward FLOPs; 0 is none.
        causes: operators at which samples are lost, each with its share of the FLOPs, those of
            operators behind it included; the largest first.

    """

    share: float
    causes: tuple[tuple[Operator, float], ...]


def left_on_one_device(graph: Graph) -> Leftover:
    """What no number of devices would divide under ``data_parallel``."""
    plan = data_parallel(graph, range(2))
    flops = sum(o.flops for o in graph.planned) or 1.0
    root: dict[str, str] = {}
    lost: dict[str, float] = {}
    for operator in graph.planned:
        if len(plan[operator.name].devices) > 1:
            continue
        before = next((root[name] for name in operator.inputs if name in root), operator.name)
        root[operator.name] = before
        lost[before] = lost.get(before, 0.0) + operator.flops / flops
    largest = sorted(lost, key=lambda name: -lost[name])
    causes = tuple((graph.by_name[name], lost[name]) for name in largest)
    return Leftover(sum(lost.values()), causes)


def choices(
    operator: Operator,
    device_count: int,
    roles: frozenset[Role] = frozenset(Role),
    even: bool = False,
) -> list[tuple[int, ...]]:
    """Legal degrees, the undivided first.

    Args:
        operator: which.
        device_count: most parts.
        roles: of dimensions that may be split.
        even: only into parts of equal size.

    """
    limits = [
        size if role in roles else 1
        for size, role in zip(operator.shape, operator.roles, strict=True)
    ]
    return sorted(_degrees(operator.shape, limits, device_count, even), key=math.prod)


def _degrees(
    shape: Sequence[int], limits: Sequence[int], most: int, even: bool
) -> Iterator[tuple[int, ...]]:
    if not shape:
        yield ()
        return
    for degree in range(1, min(max(limits[0], 1), most) + 1):
        if not even or degree == 1 or shape[0] % degree == 0:
            for rest in _degrees(shape[1:], limits[1:], most // degree, even):
                yield (degree, *rest)


def validate_plan(graph: Graph, plan: Plan, device_count: int) -> None:
    """See that a plan fits.

    Raises:
        PlanError: naming the operator, what it has, and what it may have.

    """
    known = {operator.name for operator in graph.planned}
    unknown = sorted(set(plan) - known)
    if unknown:
        raise PlanError(f"operator {unknown[0]}: the model has none of this name")
    for operator in graph.planned:
        if operator.name not in plan:
            raise PlanError(f"operator {operator.name}: the plan has no configuration of it")
        _check(operator, plan[operator.name], device_count)


def _check(operator: Operator, configuration: OperatorConfiguration, device_count: int) -> None:
    def fail(reason: str) -> PlanError:
        return PlanError(f"operator {operator.name} ({operator.kind}): {reason}")

    degrees, devices = configuration.degrees, configuration.devices
    if len(degrees) != len(operator.shape):
        raise fail(f"degrees {list(degrees)} for an output of shape {list(operator.shape)}")
    for dim, (degree, size, role) in enumerate(
        zip(degrees, operator.shape, operator.roles, strict=True)
    ):
        if degree < 1 or degree > max(size, 1):
            raise fail(f"degree {degree} of dimension {dim}: must be from 1 to {max(size, 1)}")
        if degree > 1 and role is None:
            raise fail(f"degree {degree} of dimension {dim}: it cannot be split, so must be 1")
    legal = sums_of(operator, degrees)
    if configuration.sums != 1 and configuration.sums not in legal:
        allowed = " or ".join(map(str, [1, *legal]))
        raise fail(f"sums {configuration.sums} at degrees {list(degrees)}: must be {allowed}")
    if len(devices) != math.prod(degrees):
        raise fail(f"{math.prod(degrees)} parts, but devices {list(devices)}: one each is needed")
    if len(set(devices)) != len(devices):
        raise fail(f"devices {list(devices)}: each can have one part only")
    absent = [d for d in devices if not 0 <= d < device_count]
    if absent:
        raise fail(f"device {absent[0]}: there are {device_count}, from 0 to {device_count - 1}")


@dataclass(frozen=True)
class OperatorTime:
    """What one operator takes of a step, simulated or measured: the slowest device's time.

    Attributes:
        forward_ms: of its own forward pass.
        backward_ms: of its own backward pass.
        communication_ms: of moving what it reads, and the gradients of that, packing included, and
            of summing the gradients of the parameters that are accounted for with it.

    """

    forward_ms: float = 0.0
    backward_ms: float = 0.0
    communication_ms: float = 0.0

    @property
    def whole_ms(self) -> float:
        """All three; what is overlapped in a step counts as if it were not."""
        return self.forward_ms + self.backward_ms + self.communication_ms

    def to_json(self) -> dict[str, float]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, float]) -> OperatorTime:
        """Rebuild it from ``to_json``."""
        return cls(**record)


# -----------------------------------------------------------------------------
# What each device computes and stores.


def placements(graph: Graph, plan: Plan, device_count: int) -> list[dict[str, Rectangle]]:
    """What each device computes of each operator, the inputs among them, as far as it needs them.

    Args:
        graph: of the model.
        plan: that fits it.
        device_count: devices there are.

    """
    found: list[dict[str, Rectangle]] = [{} for _ in range(device_count)]
    for operator in graph.planned:
        configuration = plan[operator.name]
        parts = part_rectangles(operator, configuration)
        for device, part in zip(configuration.devices, parts, strict=True):
            found[device][operator.name] = part
    for mine in found:
        _add_inputs(graph, mine)
    return found


def _add_inputs(graph: Graph, mine: dict[str, Rectangle]) -> None:
    """Extend it by what its parts read of inputs, consumers before producers."""
    needs: dict[str, list[Rectangle]] = {}
    for operator in reversed(graph.operators):
        if operator.name in graph.inputs and operator.name in needs:
            mine[operator.name] = _computable(operator, hull(needs[operator.name]))
        rectangle = mine.get(operator.name)
        if rectangle is None:
            continue
        for index, name in enumerate(operator.inputs):
            need = input_rectangle(operator, index, rectangle)
            if need is not None and name in graph.inputs:
                needs.setdefault(name, []).append(need)


def _computable(operator: Operator, need: Rectangle) -> Rectangle:
    """What has to be computed for it: all of the dimensions that may not be split."""
    if operator.kind == INPUT:
        return need
    return tuple(
        span if role is not None else (0, size)
        for span, role, size in zip(need, operator.roles, operator.shape, strict=True)
    )


@dataclass(frozen=True)
class ParameterRead:
    """One operator's reading of a parameter on one device."""

    operator: str
    name: str
    rectangle: Rectangle


@dataclass(frozen=True)
class Tile:
    """What one device stores of a parameter: all that its operators read of it.

    Attributes:
        rectangle: stored.
        reads: by operators, in topological order.

    """

    rectangle: Rectangle
    reads: tuple[ParameterRead, ...]


@dataclass(frozen=True)
class Cell:
    """A piece of a parameter that the same devices store.

    Attributes:
        key: of the parameter.
        rectangle: the piece.
        devices: in ascending order; their gradients are summed where there are several.

    """

    key: str
    rectangle: Rectangle
    devices: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of them."""
        return volume(self.rectangle)


def parameters(graph: Graph) -> dict[str, Parameter]:
    """One entry for each tensor, tied ones once, in order of first use."""
    found: dict[str, Parameter] = {}
    for operator in graph.operators:
        for parameter in operator.parameters:
            found.setdefault(parameter.key, parameter)
    return found


def tiles(graph: Graph, mine: Mapping[str, Rectangle]) -> dict[str, Tile]:
    """What a device stores, by the parameters' keys.

    Args:
        graph: of the model.
        mine: the device's entry of ``placements``.

    """
    found: dict[str, list[ParameterRead]] = {}
    for operator in graph.operators:
        rectangle = mine.get(operator.name)
        if rectangle is not None and operator.parameters:
            _add_reads(operator, rectangle, found)
    return {key: Tile(hull(r.rectangle for r in each), tuple(each)) for key, each in found.items()}


def _add_reads(
    operator: Operator, rectangle: Rectangle, found: dict[str, list[ParameterRead]]
) -> None:
    rectangles = parameter_rectangles(operator, rectangle)
    for parameter in operator.parameters:
        read = ParameterRead(operator.name, parameter.name, rectangles[parameter.name])
        found.setdefault(parameter.key, []).append(read)


def cells(key: str, stored: Mapping[int, Rectangle]) -> list[Cell]:
    """Cut a parameter so that each piece is stored wholly or not at all by every device.

    Args:
        key: of the parameter.
        stored: what each device has of it.

    """
    distinct = sorted(set(stored.values()))
    if all(_apart(a, b) for i, a in enumerate(distinct) for b in distinct[i + 1 :]):
        return [Cell(key, r, tuple(sorted(d for d in stored if stored[d] == r))) for r in distinct]
    found = []
    for rectangle in _grid(distinct):
        holders = [d for d, r in stored.items() if _covers(r, rectangle)]
        if holders:
            found.append(Cell(key, rectangle, tuple(sorted(holders))))
    return found


def _apart(a: Rectangle, b: Rectangle) -> bool:
    return any(high <= low or top <= start for (start, high), (low, top) in zip(a, b, strict=True))


def _covers(outer: Rectangle, inner: Rectangle) -> bool:
    return all(o[0] <= i[0] and i[1] <= o[1] for o, i in zip(outer, inner, strict=True))


def _grid(rectangles: Iterable[Rectangle]) -> list[Rectangle]:
    """Pieces between all borders of all rectangles."""
    pieces: list[Rectangle] = [()]
    for ranges in zip(*rectangles, strict=True):
        borders = sorted({border for pair in ranges for border in pair})
        spans = list(itertools.pairwise(borders))
        pieces = [(*piece, span) for piece in pieces for span in spans]
    return pieces


# -----------------------------------------------------------------------------
# What devices exchange where producer and consumer are split differently.


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
        placed: by ``placements``.

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
        placed: by ``placements``.

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
