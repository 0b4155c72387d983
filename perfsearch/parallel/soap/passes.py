"""Forward and backward pass of one rank.

The backward pass is a walk over the operators in reverse, the same on all ranks, rather than one
call of autograd: a rank that only has a source of a value then needs no graph of its own, and
communication has one order everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from perfsearch.parallel.soap.communicators import Communicators
from perfsearch.parallel.soap.exchange import Exchange
from perfsearch.parallel.soap.layout import Layout
from perfsearch.parallel.soap.node import Cut, Node, Source
from perfsearch.parallel.soap.piece_exchange import PieceBatch
from perfsearch.parallel.soap.rectangles import within
from perfsearch.parallel.soap.row_updates import RowUpdates
from perfsearch.parallel.soap.rules import sizes

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


class Passes:
    """Computes a rank's parts, and exchanges what they need.

    Args:
        layout: of the rank.
        parameters: its tiles, by key.
        counters: buffers that a step adds a number to.
        device: where it computes.
        groups: of the default process group.

    Attributes:
        gradients: of ``parameters``, after ``backward``.
        rows: of tables whose gradients are kept by rows; set before the first step.

    """

    def __init__(
        self,
        layout: Layout,
        parameters: Mapping[str, nn.Parameter],
        counters: Sequence[tuple[str, int]],
        device: torch.device,
        groups: Communicators,
    ) -> None:
        self.layout = layout
        self.parameters = parameters
        self.gradients: dict[str, torch.Tensor] = {}
        self.rows: RowUpdates | None = None
        self._counters, self._device, self._groups = counters, device, groups
        self._nodes, self._output = layout.nodes, layout.output
        self._buffers, self._synchroniser = layout.buffers, layout.synchroniser
        self._values: list[torch.Tensor | None] = [None] * len(self._nodes)
        self._inputs: list[list[torch.Tensor | None]] = [[] for _ in self._nodes]

    def forward(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """The forward pass; returns this rank's share of the loss, detached."""
        self._give(leaves)
        received: dict[Exchange, torch.Tensor | None] = {}
        for node in self._nodes:
            self._align()
            if node.function is not None:
                self._compute(node, [self._input(source, received) for source in node.sources])
            elif node.draws:
                node.draw(self._device)
            self._align()
            value = self._values[node.place]
            for exchange in node.outgoing:
                self._start(exchange, None if value is None else value.detach())
            for batch in node.launched:
                self._launch(batch)
        for buffer, number in self._counters:
            self._buffers[buffer].add_(number)
        self._drain()
        loss = self._values[self._output]
        dtype = self._nodes[self._output].dtype
        return torch.zeros((), dtype=dtype, device=self._device) if loss is None else loss.detach()

    def _give(self, leaves: Sequence[torch.Tensor]) -> None:
        for exchange, tensor in zip(self.layout.given, leaves, strict=True):
            if exchange is not None:
                exchange.start(tensor)
        for batch in self.layout.given_batches:
            batch.launch()
        for exchange, leaf in zip(self.layout.given, self.layout.leaves, strict=True):
            if exchange is not None and leaf.rectangle is not None:
                value = exchange.finish()
                assert value is not None and exchange.need is not None
                self._values[leaf.place] = value[within(leaf.rectangle, exchange.need)]
        for node in self._nodes:
            if node.is_leaf and node.operator.name in self._buffers and node.rectangle is not None:
                whole = node.operator.whole
                tensor = self._buffers[node.operator.name]
                self._values[node.place] = tensor[within(node.rectangle, whole)]

    def _compute(self, node: Node, inputs: list[torch.Tensor | None]) -> None:
        """The forward pass of one part."""
        assert node.function is not None
        read = {
            use.name: self.parameters[use.key]
            if use.cut is None
            else self.parameters[use.key][use.cut]
            for use in node.uses
        }
        self._inputs[node.place] = inputs
        self._values[node.place] = node.function(inputs, read)

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
                received[source.exchange] = self._finish(source.exchange)
            value = received[source.exchange]
            assert value is not None
        value = value.detach()
        return value.requires_grad_() if source.differentiable else value

    def backward(self) -> None:
        """The backward pass; ``gradients`` are summed over those that store the same."""
        self.gradients.clear()
        here: list[torch.Tensor | None] = [None] * len(self._nodes)
        needed: dict[Exchange, torch.Tensor] = {}
        for node in reversed(self._nodes):
            self._align()
            if node.differentiable:
                arrived = here[node.place]
                for exchange in node.outgoing:
                    arrived = self._finish_back(exchange, arrived)
                if node.function is not None:
                    self._differentiate(node, arrived, here, needed)
            self._align()
            for exchange in node.returning:
                gradient = needed.pop(exchange, None)
                if gradient is None and exchange.need is not None:
                    gradient = torch.zeros(
                        sizes(exchange.need), dtype=exchange.dtype, device=self._device
                    )
                self._start_back(exchange, gradient)
            for batch in node.launched_back:
                self._launch_back(batch)
            self._align()
            self._sum(node)
        self._synchroniser.finish(self.gradients)
        self._drain()

    # Single things that a step does; timed steps do them otherwise.

    def _align(self) -> None:
        """Where timed steps let ranks wait for each other."""

    def _start(self, exchange: Exchange, value: torch.Tensor | None) -> None:
        exchange.start(value)

    def _launch(self, batch: PieceBatch) -> None:
        batch.launch()

    def _finish(self, exchange: Exchange) -> torch.Tensor | None:
        return exchange.finish()

    def _start_back(self, exchange: Exchange, gradient: torch.Tensor | None) -> None:
        exchange.start_back(gradient)

    def _launch_back(self, batch: PieceBatch) -> None:
        batch.launch_back()

    def _finish_back(self, exchange: Exchange, arrived: torch.Tensor | None) -> torch.Tensor | None:
        """Add what comes back to the gradient of what was sent."""
        back = exchange.finish_back()
        return arrived if back is None else back if arrived is None else arrived + back

    def _sum(self, node: Node) -> None:
        """Begin to sum the gradients that a node's backward pass has made ready."""
        self._synchroniser.after(node.place, self.gradients)

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
        if self.rows is not None and node in self.rows:
            if arrived is not None:
                indices = inputs[0]
                assert indices is not None
                self.rows.note(node, indices, arrived)
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

    def reset(self) -> None:
        """Forget a step that was broken off."""
        for exchange in self.layout.exchanges:
            exchange.forget()
        self._groups.settled()
        self._synchroniser.forget()
        self._values = [None] * len(self._nodes)
        self._inputs = [[] for _ in self._nodes]
        self.gradients.clear()

    def _drain(self) -> None:
        """Wait for what this rank only sent, so that nothing of a pass is left to the next."""
        for exchange in self.layout.exchanges:
            exchange.drain()
        self._groups.settled()
