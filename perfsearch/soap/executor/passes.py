"""Forward and backward pass of one rank.

The backward pass goes over the operators in reverse, in one order on all ranks, rather than by one
call of autograd: a rank that only has a source of a value then needs no graph of its own, and
communication has one order everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch
from torch import nn

from perfsearch.soap.executor.exchange import Communicators, Exchange, LocalExchange, PieceBatch
from perfsearch.soap.executor.rank_plan import Cut, Node, RankPlan, Source
from perfsearch.soap.graph import within
from perfsearch.soap.rules.base import sizes
from perfsearch.training.clock import make_clock, synchronize

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
        rank_plan: what the rank does.
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
        rank_plan: RankPlan,
        parameters: Mapping[str, nn.Parameter],
        counters: Sequence[tuple[str, int]],
        device: torch.device,
        groups: Communicators,
    ) -> None:
        self.rank_plan = rank_plan
        self.parameters = parameters
        self.gradients: dict[str, torch.Tensor] = {}
        self.rows: RowUpdates | None = None
        self._counters, self._device, self._groups = counters, device, groups
        self._nodes, self._output = rank_plan.nodes, rank_plan.output
        self._buffers, self._synchroniser = rank_plan.buffers, rank_plan.synchroniser
        self._values: list[torch.Tensor | None] = [None] * len(self._nodes)
        self._inputs: list[list[torch.Tensor | None]] = [[] for _ in self._nodes]

    def forward(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """The forward pass; returns this rank's share of the loss, detached."""
        self._load(leaves)
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

    def _load(self, leaves: Sequence[torch.Tensor]) -> None:
        for exchange, tensor in zip(self.rank_plan.leaf_exchanges, leaves, strict=True):
            if exchange is not None:
                exchange.start(tensor)
        for batch in self.rank_plan.leaf_batches:
            batch.launch()
        for exchange, leaf in zip(
            self.rank_plan.leaf_exchanges, self.rank_plan.leaves, strict=True
        ):
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
            for use in node.parameters
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
        trained = [use for use in node.parameters if use.trained]
        leaves = [tensor for _, tensor in wanted] + [self.parameters[u.key] for u in trained]
        if arrived is None and node.meets and node.place != self._output:
            arrived = torch.zeros_like(value)  # nobody reads this part; its partners wait for it
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
        for exchange in self.rank_plan.exchanges:
            exchange.forget()
        self._groups.settled()
        self._synchroniser.forget()
        self._values = [None] * len(self._nodes)
        self._inputs = [[] for _ in self._nodes]
        self.gradients.clear()

    def _drain(self) -> None:
        """Wait for what this rank only sent, so that nothing of a pass is left to the next."""
        for exchange in self.rank_plan.exchanges:
            exchange.drain()
        self._groups.settled()


# -----------------------------------------------------------------------------
# Forward and backward pass with everything timed by the operator that it belongs to.
#
# Nothing overlaps here, and all ranks come to one point before each operator, transfer and sum:
# what is timed is the thing itself, not the wait for a slower peer. So a step takes longer than
# it does in training, but computes the same.

_SLEEP_CYCLES = 600_000
"""GPU cycles, about 0.3 ms, by which the host gets ahead: a device that waits for what its host is
still to launch would be timed as if it worked."""


class TimedPasses(Passes):
    """``Passes`` on a clock.

    Args:
        usual: what it does the same as.
        clock: of this rank.

    """

    def __init__(self, usual: Passes, clock: OperatorClock) -> None:
        super().__init__(
            usual.rank_plan, usual.parameters, usual._counters, usual._device, usual._groups
        )
        self.rows = usual.rows
        self._clock = clock
        self._places = {node.operator.name: node.place for node in self._nodes}
        self._owners: dict[str, int] = {}
        for node in self._nodes:
            for parameter in node.operator.parameters:
                # a tied one is the first operator's, as in the simulator
                self._owners.setdefault(parameter.key, node.place)

    def _align(self) -> None:
        if self._device.type == "cuda":
            torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        self._groups.align()

    def _compute(self, node: Node, inputs: list[torch.Tensor | None]) -> None:
        with self._clock.span(Column.FORWARD, [(node.place, 1.0)]):
            super()._compute(node, inputs)

    def _differentiate(
        self,
        node: Node,
        arrived: torch.Tensor | None,
        here: list[torch.Tensor | None],
        needed: dict[Exchange, torch.Tensor],
    ) -> None:
        with self._clock.span(Column.BACKWARD, [(node.place, 1.0)]):
            super()._differentiate(node, arrived, here, needed)
            if self.rows is not None and node in self.rows:
                # its update stands for its backward pass, as it does in the costs
                self.rows.apply(self.parameters)

    def _start(self, exchange: Exchange, value: torch.Tensor | None) -> None:
        with self._moving(exchange):
            super()._start(exchange, value)
            exchange.wait()

    def _finish(self, exchange: Exchange) -> torch.Tensor | None:
        with self._moving(exchange):
            return super()._finish(exchange)

    def _start_back(self, exchange: Exchange, gradient: torch.Tensor | None) -> None:
        with self._moving(exchange):
            super()._start_back(exchange, gradient)
            exchange.wait()

    def _finish_back(self, exchange: Exchange, arrived: torch.Tensor | None) -> torch.Tensor | None:
        with self._moving(exchange):
            return super()._finish_back(exchange, arrived)

    def _launch(self, batch: PieceBatch) -> None:
        with self._read_by(batch.consumer):
            super()._launch(batch)
            batch.wait()

    def _launch_back(self, batch: PieceBatch) -> None:
        with self._read_by(batch.consumer):
            super()._launch_back(batch)
            batch.wait()

    def _sum(self, node: Node) -> None:
        for bucket in self._synchroniser.ready(node.place):
            owners = [(self._owners[key], share) for key, share in bucket.shares]
            with self._clock.span(Column.COMMUNICATION, owners):
                bucket.start(self.gradients)
                bucket.finish(self.gradients)

    @contextmanager
    def _moving(self, exchange: Exchange) -> Iterator[None]:
        """Times it where anything leaves the device."""
        if isinstance(exchange, LocalExchange):
            yield
            return
        with self._read_by(exchange.first_consumer):
            yield

    @contextmanager
    def _read_by(self, consumer: str) -> Iterator[None]:
        with self._clock.span(Column.COMMUNICATION, [(self._places[consumer], 1.0)]):
            yield


# -----------------------------------------------------------------------------
# Times spans of a step by operator: device events on a GPU, the host's clock on a CPU.

Owners = Sequence[tuple[int, float]]
"""Places of operators, each with its share of a span."""


class Column(IntEnum):
    """What a span is spent on, in the order of the fields of ``OperatorTime``."""

    FORWARD = 0
    BACKWARD = 1
    COMMUNICATION = 2


class OperatorClock:
    """Adds up the spans of one step.

    Args:
        operators: number of them.
        device: that is timed.

    Attributes:
        last: spans that the last reading counted, in their order: place of the operator, what it
            is spent on, begin and end in microseconds from the first one's begin.

    """

    def __init__(self, operators: int, device: torch.device) -> None:
        self.last: list[tuple[int, Column, float, float]] = []
        self._operators, self._device = operators, device
        self._clock = make_clock(device)
        self._spans: list[tuple[Column, Owners, Any, Any]] = []

    @contextmanager
    def span(self, column: Column, owners: Owners) -> Iterator[None]:
        """What is launched within it belongs to these operators."""
        begin = self._clock.now()
        yield
        self._spans.append((column, owners, begin, self._clock.now()))

    def read(self) -> torch.Tensor:
        """Milliseconds since the last reading, (operators, columns); waits for the device."""
        synchronize(self._device)
        found = torch.zeros(self._operators, len(Column), dtype=torch.float64)
        self.last = []
        for column, owners, begin, end in self._spans:
            spent_ms = 1e3 * self._clock.between(begin, end)
            since_us = 1e6 * self._clock.between(self._spans[0][2], begin)
            self.last.append((owners[0][0], column, since_us, since_us + 1e3 * spent_ms))
            for place, part in owners:
                found[place, column] += part * spent_ms
        self._spans.clear()
        return found


# -----------------------------------------------------------------------------
# Tables of one device under plain gradient descent: only the rows that were read change.
#
# A dense gradient of a table is zeros but for the rows of the batch, and ``weight -= lr *
# gradient`` leaves the others as they are. Writing, reading and adding all of it is what a step
# with large tables spends its time on; the rows alone give the same weights.

_TABLES = ("embedding", "embedding_bag")


class RowUpdates:
    """Tables that are updated by rows.

    Args:
        tables: node of each table, by key of the parameter.
        optimizer: plain SGD.

    """

    def __init__(self, tables: Mapping[str, Node], optimizer: torch.optim.Optimizer) -> None:
        self._places = {node.place: key for key, node in tables.items()}
        self._nodes = dict(tables)
        self._groups = {
            id(parameter): group
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        self._rows: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def __contains__(self, node: Node) -> bool:
        return node.place in self._places

    def note(self, node: Node, indices: torch.Tensor, gradient: torch.Tensor) -> None:
        """Keep the gradient of a node's output until the optimizer steps."""
        attributes = node.operator.attributes
        size = attributes.get("bag_size", 1)
        rows = gradient.reshape(-1, gradient.shape[-1])
        if size > 1:
            rows = rows.repeat_interleave(size, 0)
            if attributes["mode"] == "mean":
                rows = rows / size
        self._rows[self._places[node.place]] = (indices.reshape(-1), rows)

    def apply(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Update the tables with the present learning rates."""
        for key, (indices, rows) in self._rows.items():
            group = self._groups[id(parameters[key])]
            rate = float(group["lr"]) * (-1.0 if group["maximize"] else 1.0)
            table = parameters[key].detach()
            table.index_add_(0, indices, rows.to(table.dtype), alpha=-rate)
        self._rows.clear()


def tables_of(nodes: list[Node], shared: set[str]) -> dict[str, Node]:
    """Tables that one operator of this rank reads, alone and as it stands.

    Args:
        nodes: of this rank.
        shared: keys of parameters whose gradients are summed with other ranks.

    """
    readers: dict[str, list[Node]] = {}
    for node in nodes:
        for use in node.parameters:
            readers.setdefault(use.key, []).append(node)
    return {
        key: found[0]
        for key, found in readers.items()
        if key not in shared and len(found) == 1 and _only_reads(found[0])
    }


def _only_reads(node: Node) -> bool:
    """Whether the operator is the table alone, so that its gradient is that of the rows."""
    stages, attributes = node.operator.stages, node.operator.attributes
    padding = attributes.get("padding_idx")
    alone = len(stages) == 1 or all(
        s.kind == "cast" and s.dtype == stages[0].dtype and "detach" not in s.attributes
        for s in stages[1:]
    )
    return (
        node.operator.kind in _TABLES
        and alone
        and node.differentiable
        and all(use.trained and use.cut is None for use in node.parameters)
        and attributes.get("bag_size", 1) is not None
        and (padding is None or padding < 0)
    )


def is_plain_descent(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step is ``weight -= lr * gradient`` and nothing else."""
    return type(optimizer) is torch.optim.SGD and all(
        group["momentum"] == 0
        and group["weight_decay"] == 0
        and not isinstance(group["lr"], torch.Tensor)
        for group in optimizer.param_groups
    )
