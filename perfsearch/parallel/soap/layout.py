"""From a plan to what one rank does at each operator, prepared once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from perfsearch.parallel.soap.axes import Rectangle
from perfsearch.parallel.soap.captured import Captured
from perfsearch.parallel.soap.communicators import Communicators
from perfsearch.parallel.soap.configuration import Plan
from perfsearch.parallel.soap.connections import Connection, Group, connect, grouped
from perfsearch.parallel.soap.exchange import Exchange
from perfsearch.parallel.soap.graph import Graph
from perfsearch.parallel.soap.node import Node, differentiable, drawing, function, sources, uses
from perfsearch.parallel.soap.piece_exchange import PieceBatch
from perfsearch.parallel.soap.placement import Tile, placements, tiles
from perfsearch.parallel.soap.redistribute import (
    Redistribution,
    batch_redistributions,
    redistributions,
)
from perfsearch.parallel.soap.storage import buffers_of
from perfsearch.parallel.soap.sums import groups_needed, surroundings
from perfsearch.parallel.soap.synchronise import Synchroniser, buckets


@dataclass(frozen=True)
class Layout:
    """One rank's view of a plan.

    Attributes:
        nodes: a place for each operator, in topological order, the same on all ranks.
        output: place of the loss.
        tiles: what the rank stores of each parameter.
        buffers: of the model, on the device.
        leaves: nodes of the batch's tensors.
        given: what brings them; ``None`` where the rank neither has nor needs samples.
        given_batches: what moves these.
        synchroniser: sums gradients.

    """

    nodes: list[Node]
    output: int
    tiles: dict[str, Tile]
    buffers: dict[str, torch.Tensor]
    leaves: list[Node]
    given: list[Exchange | None]
    given_batches: list[PieceBatch]
    synchroniser: Synchroniser

    @cached_property
    def exchanges(self) -> list[Exchange]:
        """All of this rank's."""
        found = [exchange for node in self.nodes for exchange in node.outgoing]
        return found + [exchange for exchange in self.given if exchange is not None]


def lay_out(
    captured: Captured,
    plan: Plan,
    model: nn.Module,
    rank: int,
    device: torch.device,
    groups: Communicators,
) -> Layout:
    """Prepare a rank; all ranks must do so together, since communicators are made.

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
    given = grouped(
        [
            Connection(move, nodes[places[move.producer]].dtype, places[move.producer], -1, False)
            for move in batch_redistributions(captured.leaves, graph, placed)
        ]
    )
    moving = grouped([_connection(m, nodes, places) for m in redistributions(graph, placed)])
    synchronised = buckets(graph, placed)
    groups.ensure(
        [
            *(g.devices for g in (*given, *moving)),
            *(b.devices for b in synchronised),
            *groups_needed(graph, plan),
        ]
    )
    for group in (*given, *moving):
        connect(group, rank, device, groups)
    buffers = buffers_of(captured, model, device)
    for node in nodes:
        if node.rectangle is not None and not node.is_leaf:
            known = surroundings(node.operator, plan, rank, device, groups, buffers)
            node.function = function(node.operator, node.rectangle, known)
    _connect(graph, nodes, moving, mine, stored)
    leaves = [nodes[places[name]] for name in captured.leaves]
    by_producer = {e.plan.producer: e for group in given for e in group.exchanges.values()}
    return Layout(
        nodes=nodes,
        output=places[graph.output],
        tiles=stored,
        buffers=buffers,
        leaves=leaves,
        given=[by_producer.get(name) for name in captured.leaves],
        given_batches=[group.batch for group in given if group.batch is not None],
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
            by_consumer.update(dict.fromkeys(exchange.plan.consumers, exchange))
            nodes[places[exchange.plan.producer]].outgoing.append(exchange)
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
            node.uses = uses(node.operator, stored)
