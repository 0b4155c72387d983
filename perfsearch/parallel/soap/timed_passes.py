"""Forward and backward pass with everything timed by the operator that it belongs to.

Nothing overlaps here, and all ranks come to one point before each operator, transfer and sum: what
is timed is the thing itself, not the wait for a slower peer. So a step takes longer than it does in
training, but computes the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from perfsearch.parallel.soap.exchange import Exchange, LocalExchange
from perfsearch.parallel.soap.node import Node
from perfsearch.parallel.soap.operator_clock import Column, OperatorClock
from perfsearch.parallel.soap.passes import Passes
from perfsearch.parallel.soap.piece_exchange import PieceBatch

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
            usual.layout, usual.parameters, usual._counters, usual._device, usual._groups
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
