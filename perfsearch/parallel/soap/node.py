"""One operator on one rank: its inputs, its function, its gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from perfsearch.parallel.soap.axes import Rectangle
from perfsearch.parallel.soap.exchange import Exchange
from perfsearch.parallel.soap.graph import INPUT, Graph, Operator, Stage
from perfsearch.parallel.soap.kernels import Function, Surroundings, prepare
from perfsearch.parallel.soap.kernels_calls import whole_mask
from perfsearch.parallel.soap.piece_exchange import PieceBatch
from perfsearch.parallel.soap.placement import Tile
from perfsearch.parallel.soap.rectangles import within
from perfsearch.parallel.soap.rules import input_rectangle

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
class Use:
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
        uses: parameters.
        dtype: of the output.
        differentiable: whether a gradient flows through it.
        outgoing: exchanges that take its output.
        launched: batches that move once it is done.
        returning: exchanges that take gradients once it is done in the backward pass.
        launched_back: batches that move them then.
        draws: stages that draw numbers, which a rank without a part must draw too.

    """

    place: int
    operator: Operator
    rectangle: Rectangle | None
    dtype: torch.dtype
    differentiable: bool
    function: Function | None = None
    sources: list[Source | None] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    outgoing: list[Exchange] = field(default_factory=list)
    launched: list[PieceBatch] = field(default_factory=list)
    returning: list[Exchange] = field(default_factory=list)
    launched_back: list[PieceBatch] = field(default_factory=list)
    draws: list[Stage] = field(default_factory=list)

    @property
    def is_leaf(self) -> bool:
        """Whether its value is given from outside."""
        return self.operator.kind == INPUT

    def draw(self, device: torch.device) -> None:
        """Draw what ranks that have a part draw, so that generators stay alike."""
        for stage in self.draws:
            shape = stage.attributes.get("scores", stage.shape)
            order = stage.attributes.get("order", tuple(range(len(shape))))
            probability = stage.attributes["probability"]
            whole_mask(shape, order, probability, getattr(torch, stage.dtype), device)


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
    return [s for s in operator.stages if s.attributes.get("probability", 0.0) > 0]


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


def uses(operator: Operator, stored: Mapping[str, Tile]) -> list[Use]:
    """Parameters that a node reads, as it reads them."""
    found = []
    for parameter in operator.parameters:
        tile = stored[parameter.key]
        read = next(
            u.rectangle
            for u in tile.uses
            if u.operator == operator.name and u.name == parameter.name
        )
        cut = cut_of(read, tile.rectangle)
        found.append(Use(parameter.name, parameter.key, cut, parameter.trained))
    return found


def function(operator: Operator, rectangle: Rectangle, surroundings: Surroundings) -> Function:
    """What computes a part, in the dtype that others expect."""
    inner = prepare(operator, rectangle, surroundings)
    dtype: torch.dtype = getattr(torch, operator.dtype)

    def run(
        inputs: Sequence[torch.Tensor | None], parameters: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        value = inner(inputs, parameters)
        return value if value.dtype == dtype else value.to(dtype)

    return run
