"""A plan, really run: each rank computes its parts, and gets what it lacks from the others.

The backward pass is a walk over the operators in reverse, the same on all ranks, rather than one
call of autograd: a rank that only has a source of a value then needs no graph of its own, and
communication has one order everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from perfsearch.parallel.soap.axes import Rectangle
from perfsearch.parallel.soap.capture import Captured
from perfsearch.parallel.soap.communicators import Communicators
from perfsearch.parallel.soap.configuration import Plan, share, validate
from perfsearch.parallel.soap.exchange import Exchange
from perfsearch.parallel.soap.layout import lay_out
from perfsearch.parallel.soap.node import Cut, Node, Source
from perfsearch.parallel.soap.placement import parameters
from perfsearch.parallel.soap.rectangles import within
from perfsearch.parallel.soap.row_updates import RowUpdates, is_plain_descent, tables_of
from perfsearch.parallel.soap.rules import sizes
from perfsearch.parallel.soap.storage import tile_of

_FRESH = frozenset(
    {
        "linear",
        "matmul",
        "embedding",
        "embedding_bag",
        "convolution",
        "layer_norm",
        "rms_norm",
    }
)
"""Kinds whose gradients of parameters are tensors of their own."""


class Execution:
    """Trains one rank's share of a plan.

    Args:
        captured: the model.
        plan: fits it and the number of ranks.
        model: in its starting state, on any device; it is copied from, and its buffers are
            updated.
        device: where this rank computes.
        groups: of the default process group, whose ranks are the plan's devices.

    Attributes:
        parameters: what this rank trains, by key: the tile that it stores.
        shapes: of all parameters of the model, as the graph views them.
        gradients: of these, after ``backward``.
        samples: range of the global batch that this rank must be given, an even share; what it
            needs of other samples it gets from the other ranks.

    Raises:
        PlanError: the plan does not fit.

    """

    def __init__(
        self,
        captured: Captured,
        plan: Plan,
        model: nn.Module,
        device: torch.device,
        groups: Communicators,
    ) -> None:
        self.rank, world = dist.get_rank(), dist.get_world_size()
        validate(captured.graph, plan, world)
        self._captured, self._device = captured, device
        layout = lay_out(captured, plan, model, self.rank, device, groups)
        self._tiles, self._nodes = layout.tiles, layout.nodes
        self._leaves, self._given = layout.leaves, layout.given
        self._given_batches = layout.given_batches
        self._groups = groups
        self._output = layout.output
        self._buffers, self._synchroniser = layout.buffers, layout.synchroniser
        self._exchanges = [exchange for node in self._nodes for exchange in node.outgoing]
        self._exchanges += [exchange for exchange in self._given if exchange is not None]
        self._returning = {exchange for node in self._nodes for exchange in node.returning}
        self.samples = share(captured.graph.batch, world, self.rank)
        tensors = dict(model.named_parameters())
        viewed = parameters(captured.graph)
        self.shapes = {k: viewed[k].shape if k in viewed else t.shape for k, t in tensors.items()}
        self.parameters = {
            key: nn.Parameter(
                tile_of(tensors[key].view(self.shapes[key]), self._tiles[key].rectangle, device),
                tensors[key].requires_grad,
            )
            for key in tensors
            if key in self._tiles
        }
        self.gradients: dict[str, torch.Tensor] = {}
        self._rows: RowUpdates | None = None
        self._values: list[torch.Tensor | None] = [None] * len(self._nodes)
        self._inputs: list[list[torch.Tensor | None]] = [[] for _ in self._nodes]

    def stored(self, key: str) -> Rectangle:
        """What this rank has of a parameter."""
        return self._tiles[key].rectangle

    def step(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """Forward and backward; returns this rank's share of the loss.

        Args:
            leaves: tensors of the batch, in ``tree_flatten`` order, of the samples in ``samples``.

        """
        loss = self.forward(leaves)
        self.backward()
        return loss

    def forward(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """The forward pass; returns this rank's share of the loss, detached."""
        self._give(leaves)
        received: dict[Exchange, torch.Tensor | None] = {}
        for node in self._nodes:
            if node.function is not None:
                inputs = [self._input(source, received) for source in node.sources]
                read = {
                    use.name: self.parameters[use.key]
                    if use.cut is None
                    else self.parameters[use.key][use.cut]
                    for use in node.uses
                }
                self._inputs[node.place] = inputs
                self._values[node.place] = node.function(inputs, read)
            elif node.draws:
                node.draw(self._device)
            value = self._values[node.place]
            for exchange in node.outgoing:
                exchange.start(None if value is None else value.detach())
            for batch in node.launched:
                batch.launch()
        for buffer, number in self._captured.counters:
            self._buffers[buffer].add_(number)
        self._drain()
        loss = self._values[self._output]
        dtype = self._nodes[self._output].dtype
        return torch.zeros((), dtype=dtype, device=self._device) if loss is None else loss.detach()

    def _give(self, leaves: Sequence[torch.Tensor]) -> None:
        for exchange, tensor in zip(self._given, leaves, strict=True):
            if exchange is not None:
                exchange.start(tensor)
        for batch in self._given_batches:
            batch.launch()
        for exchange, leaf in zip(self._given, self._leaves, strict=True):
            if exchange is not None and leaf.rectangle is not None:
                value = exchange.finish()
                assert value is not None and exchange.need is not None
                self._values[leaf.place] = value[within(leaf.rectangle, exchange.need)]
        for node in self._nodes:
            if node.is_leaf and node.operator.name in self._buffers and node.rectangle is not None:
                whole = node.operator.whole
                tensor = self._buffers[node.operator.name]
                self._values[node.place] = tensor[within(node.rectangle, whole)]

    def _input(
        self, source: Source | None, received: dict[Exchange, torch.Tensor | None]
    ) -> torch.Tensor | None:
        if source is None:
            return None
        if source.exchange is None:
            value = self._values[source.place]
            assert value is not None
            if source.cut is not None:
                value = value[source.cut]
        else:
            if source.exchange not in received:
                received[source.exchange] = source.exchange.finish()
            value = received[source.exchange]
            assert value is not None
        value = value.detach()
        return value.requires_grad_() if source.differentiable else value

    def backward(self) -> None:
        """The backward pass; ``gradients`` are summed over those that store the same."""
        gradients = self.gradients
        gradients.clear()
        here: list[torch.Tensor | None] = [None] * len(self._nodes)
        needed: dict[Exchange, torch.Tensor] = {}
        for node in reversed(self._nodes):
            if node.differentiable:
                arrived = here[node.place]
                for exchange in node.outgoing:
                    back = exchange.finish_back()
                    if back is not None:
                        arrived = back if arrived is None else arrived + back
                if node.function is not None:
                    self._differentiate(node, arrived, here, needed)
            for exchange in node.returning:
                gradient = needed.pop(exchange, None)
                if gradient is None and exchange.need is not None:
                    gradient = torch.zeros(
                        sizes(exchange.need), dtype=exchange.dtype, device=self._device
                    )
                exchange.start_back(gradient)
            for batch in node.launched_back:
                batch.launch_back()
            self._synchroniser.after(node.place, gradients)
        self._synchroniser.finish(gradients)
        self._drain()

    def _differentiate(
        self,
        node: Node,
        arrived: torch.Tensor | None,
        here: list[torch.Tensor | None],
        needed: dict[Exchange, torch.Tensor],
    ) -> None:
        """Gradients of one part's inputs and parameters."""
        value, inputs = self._values[node.place], self._inputs[node.place]
        self._values[node.place], self._inputs[node.place] = None, []
        assert value is not None
        if self._rows is not None and node in self._rows:
            if arrived is not None:
                indices = inputs[0]
                assert indices is not None
                self._rows.note(node, indices, arrived)
            return
        wanted = [
            (source, tensor)
            for source, tensor in zip(node.sources, inputs, strict=True)
            if source is not None and source.differentiable
        ]
        trained = [use for use in node.uses if use.trained]
        leaves = [tensor for _, tensor in wanted] + [self.parameters[u.key] for u in trained]
        found: Sequence[torch.Tensor | None] = [None] * len(leaves)
        if value.requires_grad and (arrived is not None or node.place == self._output):
            found = torch.autograd.grad(value, leaves, arrived, allow_unused=True)
        for (source, _), gradient in zip(wanted, found, strict=False):
            if gradient is None:
                continue
            assert source is not None
            if source.exchange is not None:
                before = needed.get(source.exchange)
                needed[source.exchange] = gradient if before is None else before + gradient
            else:
                self._add_here(source.place, source.cut, gradient, here)
        for use, gradient in zip(trained, found[len(wanted) :], strict=True):
            if gradient is None:
                gradient = torch.zeros_like(self.parameters[use.key])
            elif node.operator.kind not in _FRESH:
                gradient = gradient.clone()  # it may be an input's too, and is summed in place
            known = self.gradients.get(use.key)
            self.gradients[use.key] = gradient if known is None else known + gradient

    def _add_here(
        self, place: int, cut: Cut, gradient: torch.Tensor, here: list[torch.Tensor | None]
    ) -> None:
        before = here[place]
        if cut is None:
            here[place] = gradient if before is None else before + gradient
            return
        if before is None:
            rectangle = self._nodes[place].rectangle
            assert rectangle is not None
            before = gradient.new_zeros(sizes(rectangle))
        else:
            before = before.clone()  # it may be somebody else's too
        before[cut] += gradient
        here[place] = before

    def update_rows(self, optimizer: torch.optim.Optimizer | None) -> list[str]:
        """Let tables of this rank alone be updated by rows, where that is the same.

        These have no entry in ``gradients`` then.

        Args:
            optimizer: over ``parameters``.

        Returns:
            The tables' keys.

        """
        if optimizer is None or not is_plain_descent(optimizer):
            return []
        tables = tables_of(self._nodes, self._synchroniser.keys)
        self._rows = RowUpdates(tables, optimizer) if tables else None
        return list(tables)

    def reset(self) -> None:
        """Forget a step that was broken off."""
        for exchange in self._exchanges:
            exchange.forget()
        self._groups.settled()
        self._synchroniser.forget()
        self._values = [None] * len(self._nodes)
        self._inputs = [[] for _ in self._nodes]
        self.gradients.clear()

    def apply_gradients(self, optimizer: torch.optim.Optimizer | None) -> None:
        """One step of the optimizer over ``parameters``; none where this rank has none."""
        for key, parameter in self.parameters.items():
            parameter.grad = self.gradients.get(key)
        if optimizer is not None:
            optimizer.step()
        if self._rows is not None:
            self._rows.apply(self.parameters)

    def _drain(self) -> None:
        """Wait for what this rank only sent, so that nothing of a pass is left to the next."""
        for exchange in self._exchanges:
            exchange.drain()
        self._groups.settled()

    def traffic_bytes(self) -> dict[str, int]:
        """What this rank sends to others in one step: values and gradients, and in sums."""
        moved = 0
        for exchange in self._exchanges:
            there, back = exchange.sent_elements()
            moved += (
                there + (back if exchange in self._returning else 0)
            ) * exchange.dtype.itemsize
        return {"redistributed_mib": moved, "summed_mib": self._synchroniser.summed_bytes}
