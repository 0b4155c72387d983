"""What one rank does under a plan, operator by operator; prepared once, run each step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from perfsearch.soap.capture.capture import Captured
from perfsearch.soap.executor.exchange import (
    Communicators,
    Connection,
    Devices,
    Exchange,
    Group,
    PieceBatch,
    all_gather,
    connect,
    grouped,
    reduce_scatter,
)
from perfsearch.soap.executor.kernels import Function, PartContext, draw, prepare
from perfsearch.soap.graph import (
    INPUT,
    Graph,
    Operator,
    Range,
    Rectangle,
    Stage,
    Summand,
    volume,
    within,
)
from perfsearch.soap.parts import reduction_partners
from perfsearch.soap.plan import (
    Cell,
    Plan,
    Redistribution,
    Tile,
    batch_redistributions,
    cells,
    parameters,
    part_rectangles,
    placements,
    redistributions,
    tiles,
)
from perfsearch.soap.rules.base import input_rectangle, sizes
from perfsearch.soap.rules.random import draws


@dataclass(frozen=True)
class RankPlan:
    """One rank's view of a plan.

    Attributes:
        nodes: a place for each operator, in topological order, the same on all ranks.
        output: place of the loss.
        tiles: what the rank stores of each parameter.
        buffers: of the model, on the device.
        leaves: nodes of the batch's tensors.
        leaf_exchanges: what brings them; ``None`` where the rank neither has nor needs samples.
        leaf_batches: what moves these.
        synchroniser: sums gradients.

    """

    nodes: list[Node]
    output: int
    tiles: dict[str, Tile]
    buffers: dict[str, torch.Tensor]
    leaves: list[Node]
    leaf_exchanges: list[Exchange | None]
    leaf_batches: list[PieceBatch]
    synchroniser: Synchroniser

    @cached_property
    def exchanges(self) -> list[Exchange]:
        """All of this rank's."""
        found = [exchange for node in self.nodes for exchange in node.outgoing]
        return found + [exchange for exchange in self.leaf_exchanges if exchange is not None]


def plan_rank(
    captured: Captured,
    plan: Plan,
    model: nn.Module,
    rank: int,
    device: torch.device,
    groups: Communicators,
) -> RankPlan:
    """Prepare a rank for a plan; all ranks must do so together, since communicators are made.

    Args:
        captured: the model.
        plan: that fits it.
        model: whose buffers are moved to the device.
        rank: this device.
        device: where it computes.
        groups: of the default process group.

    """
    graph = captured.graph
    placed = placements(graph, plan, groups.world_size)
    mine = placed[rank]
    stored = tiles(graph, mine)
    nodes = _nodes(graph, mine)
    places = {operator.name: i for i, operator in enumerate(graph.operators)}
    loading = grouped(
        [
            Connection(move, nodes[places[move.producer]].dtype, places[move.producer], -1, False)
            for move in batch_redistributions(captured.leaves, graph, placed)
        ]
    )
    moving = grouped([_connection(m, nodes, places) for m in redistributions(graph, placed)])
    synchronised = buckets(graph, placed)
    groups.ensure(
        [
            *(g.devices for g in (*loading, *moving)),
            *(b.devices for b in synchronised),
            *reduction_groups(graph, plan),
        ]
    )
    for group in (*loading, *moving):
        connect(group, rank, device, groups)
    buffers = buffers_of(captured, model, device)
    for node in nodes:
        if node.rectangle is not None and not node.is_leaf:
            known = part_context(node.operator, plan, rank, device, groups, buffers)
            node.function = function(node.operator, node.rectangle, known)
            node.meets = node.operator.kind == "batch_norm" or isinstance(node.rectangle, Summand)
    _connect(graph, nodes, moving, mine, stored)
    leaves = [nodes[places[name]] for name in captured.leaves]
    by_producer = {
        e.redistribution.producer: e for group in loading for e in group.exchanges.values()
    }
    return RankPlan(
        nodes=nodes,
        output=places[graph.output],
        tiles=stored,
        buffers=buffers,
        leaves=leaves,
        leaf_exchanges=[by_producer.get(name) for name in captured.leaves],
        leaf_batches=[group.batch for group in loading if group.batch is not None],
        synchroniser=Synchroniser(
            synchronised, {key: tile.rectangle for key, tile in stored.items()}, rank, groups
        ),
    )


def _nodes(graph: Graph, mine: Mapping[str, Rectangle]) -> list[Node]:
    flows = differentiable(graph)
    return [
        Node(
            place=place,
            operator=operator,
            rectangle=mine.get(operator.name),
            dtype=getattr(torch, operator.dtype),
            differentiable=flows[operator.name],
            draws=drawing(operator),
        )
        for place, operator in enumerate(graph.operators)
    ]


def _connection(
    move: Redistribution, nodes: Sequence[Node], places: Mapping[str, int]
) -> Connection:
    producer = nodes[places[move.producer]]
    first = min(places[name] for name, _ in move.consumers)
    return Connection(move, producer.dtype, producer.place, first, producer.differentiable)


def _connect(
    graph: Graph,
    nodes: list[Node],
    moving: Iterable[Group],
    mine: Mapping[str, Rectangle],
    stored: Mapping[str, Tile],
) -> None:
    """Give nodes their inputs, exchanges and parameters."""
    places = {node.operator.name: node.place for node in nodes}
    by_consumer: dict[tuple[str, int], Exchange] = {}
    for group in moving:
        for exchange in group.exchanges.values():
            by_consumer.update(dict.fromkeys(exchange.redistribution.consumers, exchange))
            nodes[places[exchange.redistribution.producer]].outgoing.append(exchange)
            if group.returns:
                nodes[group.ends].returning.append(exchange)
        if group.batch is not None:
            nodes[group.begins].launched.append(group.batch)
            if group.returns:
                nodes[group.ends].launched_back.append(group.batch)
    flows = {node.operator.name: node.differentiable for node in nodes}
    for node in nodes:
        if node.function is not None:
            node.sources = sources(graph, node.operator, mine, by_consumer, places, flows)
            node.parameters = node_parameters(node.operator, stored)


# -----------------------------------------------------------------------------
# One operator on one rank: its inputs, its function, its gradients.

Cut = tuple[slice, ...] | None
"""``None``: all of it."""


def cut_of(inner: Rectangle, outer: Rectangle) -> Cut:
    """What cuts ``inner`` out of a tensor that holds ``outer``."""
    return None if inner == outer else within(inner, outer)


@dataclass
class Source:
    """Where one input of a node comes from.

    Attributes:
        exchange: that brings it; ``None``: it is computed here.
        place: of the operator that computes it here.
        cut: what of that is read.
        differentiable: whether its gradient is wanted.

    """

    exchange: Exchange | None
    place: int
    cut: Cut
    differentiable: bool


@dataclass
class NodeParameter:
    """A parameter that a node reads.

    Attributes:
        name: in the operator.
        key: of the parameter.
        cut: what of the tile is read.
        trained: whether its gradient is wanted.

    """

    name: str
    key: str
    cut: Cut
    trained: bool


@dataclass
class Node:
    """What a rank does at one operator's place.

    Attributes:
        place: in topological order.
        operator: which.
        rectangle: of its part here; ``None``: it has none.
        function: computes it.
        sources: by input number; ``None`` where the part reads nothing of it.
        parameters: what it reads of this rank's tiles.
        dtype: of the output.
        differentiable: whether a gradient flows through it.
        outgoing: exchanges that take its output.
        launched: batches that move once it is done.
        returning: exchanges that take gradients once it is done in the backward pass.
        launched_back: batches that move them then.
        draws: stages that draw numbers, which a rank without a part must draw too.
        meets: whether its backward pass exchanges with other parts, so that all must run it.

    """

    place: int
    operator: Operator
    rectangle: Rectangle | None
    dtype: torch.dtype
    differentiable: bool
    function: Function | None = None
    sources: list[Source | None] = field(default_factory=list)
    parameters: list[NodeParameter] = field(default_factory=list)
    outgoing: list[Exchange] = field(default_factory=list)
    launched: list[PieceBatch] = field(default_factory=list)
    returning: list[Exchange] = field(default_factory=list)
    launched_back: list[PieceBatch] = field(default_factory=list)
    draws: list[Stage] = field(default_factory=list)
    meets: bool = False

    @property
    def is_leaf(self) -> bool:
        """Whether its value comes from outside."""
        return self.operator.kind == INPUT

    def draw(self, device: torch.device) -> None:
        """Draw what ranks that have a part draw, so that generators stay alike."""
        for stage in self.draws:
            draw(stage, device)


def differentiable(graph: Graph) -> dict[str, bool]:
    """Operators that a trained parameter reaches."""
    found: dict[str, bool] = {}
    for operator in graph.operators:
        reached = any(p.trained for p in operator.parameters)
        reached = reached or any(found[name] for name in operator.inputs)
        floating = getattr(torch, operator.dtype).is_floating_point
        found[operator.name] = reached and floating
    return found


def drawing(operator: Operator) -> list[Stage]:
    """Stages that draw random numbers."""
    return [s for s in operator.stages if draws(s)]


def sources(
    graph: Graph,
    operator: Operator,
    mine: Mapping[str, Rectangle],
    exchanges: Mapping[tuple[str, int], Exchange],
    places: Mapping[str, int],
    flows: Mapping[str, bool],
) -> list[Source | None]:
    """Where a node's inputs come from.

    Args:
        graph: of the model.
        operator: that has a part on this rank.
        mine: this rank's placement.
        exchanges: by consumer and input number.
        places: of operators in topological order.
        flows: by ``differentiable``.

    """
    found: list[Source | None] = []
    for index, name in enumerate(operator.inputs):
        need = input_rectangle(operator, index, mine[operator.name])
        if need is None:
            found.append(None)
        elif name in graph.inputs:
            cut = cut_of(need, mine[name])
            found.append(Source(None, places[name], cut, flows[name]))
        else:
            exchange = exchanges[operator.name, index]
            found.append(Source(exchange, places[name], None, flows[name]))
    return found


def node_parameters(operator: Operator, stored: Mapping[str, Tile]) -> list[NodeParameter]:
    """Parameters that a node reads, as it reads them."""
    found = []
    for parameter in operator.parameters:
        tile = stored[parameter.key]
        read = next(
            u.rectangle
            for u in tile.reads
            if u.operator == operator.name and u.name == parameter.name
        )
        cut = cut_of(read, tile.rectangle)
        found.append(NodeParameter(parameter.name, parameter.key, cut, parameter.trained))
    return found


def function(operator: Operator, rectangle: Rectangle, context: PartContext) -> Function:
    """What computes a part, in the dtype that others expect."""
    inner = prepare(operator, rectangle, context)
    dtype: torch.dtype = getattr(torch, operator.dtype)

    def run(
        inputs: Sequence[torch.Tensor | None], parameters: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        value = inner(inputs, parameters)
        return value if value.dtype == dtype else value.to(dtype)

    return run


# -----------------------------------------------------------------------------
# Partial reductions: what the parts of one operator all-reduce while they compute.


def reducing_devices(operator: Operator, plan: Plan) -> dict[int, Devices]:
    """By device, the devices that its part reduces with; see ``parts.reduction_partners``."""
    configuration = plan[operator.name]
    devices = configuration.devices
    places = reduction_partners(operator, part_rectangles(operator, configuration))
    return {
        device: tuple(sorted(devices[place] for place in mine))
        for device, mine in zip(devices, places, strict=False)
    }


def reduction_groups(graph: Graph, plan: Plan) -> list[Devices]:
    """Sets of devices that reduce together."""
    found = {
        devices
        for operator in graph.planned
        for devices in reducing_devices(operator, plan).values()
        if len(devices) > 1
    }
    return sorted(found)


def part_context(
    operator: Operator,
    plan: Plan,
    rank: int,
    device: torch.device,
    groups: Communicators,
    buffers: Mapping[str, torch.Tensor],
) -> PartContext:
    """How a part on this rank reduces with the others."""
    shared = reducing_devices(operator, plan).get(rank, ()) if operator.name in plan else ()
    if len(shared) < 2:
        return PartContext(device, buffers=buffers)

    def total(tensor: torch.Tensor) -> torch.Tensor:
        groups.launch(
            shared, lambda group: dist.all_reduce(tensor, group=group, async_op=True)
        ).wait()
        return tensor

    parts = part_rectangles(operator, plan[operator.name])
    held = dict(zip(plan[operator.name].devices, parts, strict=True))
    order = [part.own for m in shared if isinstance(part := held[m], Summand)]

    def share_sums(partial: torch.Tensor, part: Summand) -> torch.Tensor:
        exchange = _SumExchange(part, order, shared, groups)
        shared_sums: torch.Tensor = _SharedSums.apply(partial, exchange)
        return shared_sums

    return PartContext(device, total, total, share_sums, buffers)


@dataclass(frozen=True)
class _SumExchange:
    """How parts that share sums add them up, and have each other's gradients.

    Attributes:
        part: this rank's.
        ranges: along ``part.dim``, of the group's ranks in their order.
        devices: that share.
        groups: where these were ensured.

    """

    part: Summand
    ranges: list[Range]
    devices: Devices
    groups: Communicators

    def reduce_scatter(self, partial: torch.Tensor) -> torch.Tensor:
        """The sums of this part's own elements."""
        dim, first = self.part.dim, self.part.span[0]
        moved = partial.movedim(dim, 0)
        given = torch.cat([moved[low - first : high - first] for low, high in self.ranges])
        own = given.new_empty([len(given) // len(self.ranges), *given.shape[1:]])
        self.groups.launch(
            self.devices,
            lambda group: reduce_scatter(own, given, group=group, async_op=True),
        ).wait()
        return own.movedim(0, dim)

    def all_gather(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradients of all elements."""
        dim = self.part.dim
        given = gradient.movedim(dim, 0).contiguous()
        found = given.new_empty([len(given) * len(self.ranges), *given.shape[1:]])
        self.groups.launch(
            self.devices, lambda group: all_gather(found, given, group=group, async_op=True)
        ).wait()
        pieces = found.chunk(len(self.ranges))
        order = sorted(range(len(pieces)), key=lambda place: self.ranges[place])
        return torch.cat([pieces[place] for place in order]).movedim(0, dim)


class _SharedSums(torch.autograd.Function):  # type: ignore[misc]
    """Adds shares of sums; the backward pass needs the gradients of all elements."""

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, exchange: _SumExchange) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.reduce_scatter(partial)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.exchange.all_gather(gradient), None


# -----------------------------------------------------------------------------
# Gradients of what several devices store: all-reduced in buckets, while the backward pass goes on.

BUCKET_BYTES = 25 * 2**20

Gradients = dict[str, torch.Tensor]
"""By the parameters' keys, of what this device stores."""


@dataclass(frozen=True)
class Bucket:
    """Pieces that are summed by one all-reduce.

    Attributes:
        devices: that store them.
        dtype: torch's name of it.
        cells: pieces.
        ready: place of the operator, in topological order, whose backward pass gives the last
            of their gradients.

    """

    devices: Devices
    dtype: str
    cells: tuple[Cell, ...]
    ready: int

    @property
    def elements(self) -> int:
        """Number of them."""
        return sum(cell.elements for cell in self.cells)


def buckets(
    graph: Graph, placed: Sequence[Mapping[str, Rectangle]], capacity_bytes: int = BUCKET_BYTES
) -> list[Bucket]:
    """All of a plan, in the one order in which they are summed on all ranks.

    Args:
        graph: of the model.
        placed: by ``placements``.
        capacity_bytes: of a bucket; a larger piece has one by itself.

    """
    known = parameters(graph)
    place = {operator.name: i for i, operator in enumerate(graph.operators)}
    stored: dict[str, dict[int, Rectangle]] = {}
    ready: dict[str, int] = {}
    for device, mine in enumerate(placed):
        for key, tile in tiles(graph, mine).items():
            stored.setdefault(key, {})[device] = tile.rectangle
            first = min(place[read.operator] for read in tile.reads)
            ready[key] = min(ready.get(key, first), first)
    order = sorted((k for k in stored if known[k].trained), key=lambda k: (-ready[k], k))
    found: list[Bucket] = []
    filling: dict[tuple[Devices, str], list[Cell]] = {}

    def close(target: tuple[Devices, str]) -> None:
        content = filling.pop(target)
        last = min(ready[cell.key] for cell in content)
        found.append(Bucket(target[0], target[1], tuple(content), last))

    for key in order:
        size = getattr(torch, known[key].dtype).itemsize
        for cell in cells(key, stored[key]):
            if len(cell.devices) < 2:
                continue
            target = (cell.devices, known[key].dtype)
            held = sum(c.elements for c in filling.get(target, ())) * size
            if held and held + cell.elements * size > capacity_bytes:
                close(target)
            filling.setdefault(target, []).append(cell)
    for target in list(filling):
        close(target)
    return sorted(found, key=lambda b: (-b.ready, b.devices, b.cells[0].key))


class Synchroniser:
    """Sums this rank's buckets; each is started when its gradients are there.

    Args:
        buckets: of the plan, all of them.
        stored: what this rank stores of each parameter.
        rank: this device.
        groups: where the buckets' devices were ensured.

    Attributes:
        keys: of parameters of which this rank sums anything.
        summed_bytes: of gradients that this rank sums with others.

    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        stored: Mapping[str, Rectangle],
        rank: int,
        groups: Communicators,
    ) -> None:
        self._by_place: dict[int, list[RankBucket]] = {}
        self.keys = {c.key for b in buckets if rank in b.devices for c in b.cells}
        self.summed_bytes = sum(
            bucket.elements * getattr(torch, bucket.dtype).itemsize
            for bucket in buckets
            if rank in bucket.devices
        )
        for bucket in buckets:
            if rank in bucket.devices:
                one = RankBucket(bucket, stored, groups)
                self._by_place.setdefault(bucket.ready, []).append(one)
        self._started: list[RankBucket] = []

    def ready(self, place: int) -> Sequence[RankBucket]:
        """What the backward pass of operator ``place`` makes ready."""
        return self._by_place.get(place, ())

    def after(self, place: int, gradients: Gradients) -> None:
        """Start what the backward pass of operator ``place`` has made ready."""
        for bucket in self.ready(place):
            bucket.start(gradients)
            self._started.append(bucket)

    def forget(self) -> None:
        """Drop what was started and will never end."""
        self._started.clear()

    def finish(self, gradients: Gradients) -> None:
        """Wait for all, and put the sums where the gradients were."""
        for bucket in self._started:
            bucket.finish(gradients)
        self._started.clear()


class RankBucket:
    """A bucket on one rank that has a part in it.

    Args:
        bucket: what is summed.
        stored: what this rank stores of each parameter.
        groups: where the bucket's devices were ensured.

    """

    def __init__(
        self, bucket: Bucket, stored: Mapping[str, Rectangle], groups: Communicators
    ) -> None:
        self._groups = groups
        self._devices = bucket.devices
        self._keys = [cell.key for cell in bucket.cells]
        self._cuts = [
            None if cell.rectangle == stored[cell.key] else within(cell.rectangle, stored[cell.key])
            for cell in bucket.cells
        ]
        self._shapes = [sizes(cell.rectangle) for cell in bucket.cells]
        self._lengths = [volume(cell.rectangle) for cell in bucket.cells]
        self._direct = len(self._keys) == 1 and self._cuts[0] is None

    @property
    def shares(self) -> list[tuple[str, float]]:
        """Keys of parameters, each with its share of the elements; the shares add up to 1."""
        whole = sum(self._lengths)
        return [(k, n / whole) for k, n in zip(self._keys, self._lengths, strict=True)]

    def start(self, gradients: Gradients) -> None:
        """Begin to sum them."""
        if self._direct:
            # one large tensor is summed where it is
            self._flat = gradients[self._keys[0]].contiguous()
        else:
            parts = [
                gradients[key] if cut is None else gradients[key][cut]
                for key, cut in zip(self._keys, self._cuts, strict=True)
            ]
            self._flat = torch.cat([part.reshape(-1) for part in parts])
        self._work = self._groups.launch(
            self._devices,
            lambda group: dist.all_reduce(self._flat, group=group, async_op=True),
        )

    def finish(self, gradients: Gradients) -> None:
        """Wait for the sums, and put them where the gradients were."""
        self._work.wait()
        if self._direct:
            gradients[self._keys[0]] = self._flat
            return
        parts = self._flat.split(self._lengths)
        for key, cut, shape, part in zip(self._keys, self._cuts, self._shapes, parts, strict=True):
            if cut is None:
                gradients[key] = part.view(shape)
            else:
                whole = gradients[key].clone()  # other pieces of it may be on their way
                whole[cut] = part.view(shape)
                gradients[key] = whole


# -----------------------------------------------------------------------------
# What a rank copies of the model: its tiles of the parameters, and the buffers.


def tile_of(tensor: torch.Tensor, rectangle: Rectangle, device: torch.device) -> torch.Tensor:
    """A copy of a rectangle of a tensor, on a device."""
    cut = tuple(slice(*span) for span in rectangle)
    return tensor.detach()[cut].to(device, copy=True).contiguous()


def buffers_of(
    captured: Captured, model: nn.Module, device: torch.device
) -> dict[str, torch.Tensor]:
    """By input name and by name in the model; constants by input name."""
    held = dict(model.named_buffers())
    moved = {name: tensor.to(device) for name, tensor in held.items()}
    found = {name: tensor.to(device) for name, tensor in captured.constants.items()}
    found.update({place: moved[name] for place, name in captured.buffers.items()})
    found.update(moved)
    return found
