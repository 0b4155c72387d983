"""From anybody to anybody: the pieces of several redistributions in one exchange."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from perfsearch.parallel.soap.axes import Rectangle
from perfsearch.parallel.soap.communicators import Communicators, Devices
from perfsearch.parallel.soap.exchange import Exchange
from perfsearch.parallel.soap.pieces import Gatherer
from perfsearch.parallel.soap.rectangles import within
from perfsearch.parallel.soap.redistribute import Redistribution
from perfsearch.parallel.soap.rules import sizes


class PieceExchange(Exchange):
    """One redistribution of a batch; ``start`` and ``start_back`` only hand its tensor over."""

    batch: PieceBatch

    def __init__(
        self, plan: Redistribution, rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(plan, rank, dtype, device)
        others = [m for m in plan.messages if m.source != m.destination]
        self.sent = sorted((m.destination, m.rectangle) for m in others if m.source == rank)
        self.received = sorted((m.source, m.rectangle) for m in others if m.destination == rank)
        kept = [m.rectangle for m in plan.messages if m.source == m.destination == rank]
        self._kept = kept[0] if kept else None
        if self.need is not None:
            pieces = [*kept, *(piece for _, piece in self.received)]
            self._gather = Gatherer(self.need, pieces, add=False)
        if self.own is not None:
            pieces = [*kept, *(piece for _, piece in self.sent)]
            self._gather_back = Gatherer(self.own, pieces, add=True)
        self.outgoing: torch.Tensor | None = None
        self.incoming: list[torch.Tensor] = []

    def start(self, value: torch.Tensor | None) -> None:
        """Keep the part until the batch is launched."""
        self.outgoing = value

    def finish(self) -> torch.Tensor | None:
        """Put what came together, with what was here."""
        self.batch.wait()
        return None if self.need is None else self._gather(self._pieces(self.own))

    def start_back(self, gradient: torch.Tensor | None) -> None:
        """Keep the gradient until the batch is launched."""
        self.outgoing = gradient

    def finish_back(self) -> torch.Tensor | None:
        """Sum what came, with what was here; ``None`` where nobody read of the part."""
        self.batch.wait()
        if self.own is None:
            return None
        pieces = self._pieces(self.need)
        return self._gather_back(pieces) if pieces else None

    def _pieces(self, held: Rectangle | None) -> list[torch.Tensor]:
        if self._kept is None:
            return self.incoming
        assert held is not None and self.outgoing is not None
        return [self.outgoing[within(self._kept, held)], *self.incoming]

    def wait(self) -> None:
        """Wait for the batch, if it was launched."""
        self.batch.wait()

    def drain(self) -> None:
        """Wait for the batch, and let go of what was sent."""
        self.batch.wait()
        self.outgoing = None
        self.incoming = []

    def forget(self) -> None:
        """Drop what was started and will never end."""
        self.outgoing = None
        self.incoming = []
        self.batch.forget()


class PieceBatch:
    """Exchanges that end at the same operator, moved together.

    Pieces for one device lie side by side in one buffer, which is what both backends take as one
    operation: grouped sends and receives on NCCL. What stays on the device is not sent.

    Args:
        members: in the order of all ranks; of those that this rank has no part in, nothing.
        participants: devices of the batch.
        rank: this device.
        groups: where the participants were ensured.

    Attributes:
        consumer: the operator at which its members end.

    """

    def __init__(
        self,
        members: Sequence[PieceExchange],
        participants: Devices,
        rank: int,
        groups: Communicators,
    ) -> None:
        self._members = members
        self.consumer = members[0].first_consumer
        self._groups = groups
        self._participants = participants
        self._dtype, self._device = members[0].dtype, members[0].device
        self._there = _Way([m.sent for m in members], [m.received for m in members],
                           [m.own for m in members])  # fmt: skip
        self._back = _Way([m.received for m in members], [m.sent for m in members],
                          [m.need for m in members])  # fmt: skip
        for member in members:
            member.batch = self
        self._takes_part = rank in participants
        self._way = self._there
        self._work: dist.Work | None = None

    def launch(self) -> None:
        """Begin to move the members' parts."""
        self._launch(self._there)

    def launch_back(self) -> None:
        """Begin to move the members' gradients."""
        self._launch(self._back)

    def _launch(self, way: _Way) -> None:
        self._way = way
        if not self._takes_part:
            return
        parts = []
        for number, cut in way.cuts:
            value = self._members[number].outgoing
            assert value is not None
            parts.append(value[cut].reshape(-1))
        shape = (way.received,)
        self._outgoing = (
            torch.cat(parts) if parts else torch.empty(0, dtype=self._dtype, device=self._device)
        )
        self._incoming = torch.empty(shape, dtype=self._dtype, device=self._device)
        sent, received = way.counts(self._participants)
        self._work = self._groups.launch(
            self._participants,
            lambda group: dist.all_to_all_single(
                self._incoming, self._outgoing, received, sent, group=group, async_op=True
            ),
        )

    def wait(self) -> None:
        """Wait for what was launched, and hand the pieces to the members."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        for member in self._members:
            member.incoming = []
        parts = self._incoming.split(self._way.lengths) if self._way.lengths else ()
        for (number, shape), part in zip(self._way.places, parts, strict=True):
            self._members[number].incoming.append(part.view(shape))

    def forget(self) -> None:
        """Drop what was launched and will never end."""
        self._work = None


class _Way:
    """Where the members' pieces lie in the buffers, one direction."""

    def __init__(
        self,
        sent: Sequence[Sequence[tuple[int, Rectangle]]],
        received: Sequence[Sequence[tuple[int, Rectangle]]],
        held: Sequence[Rectangle | None],
    ) -> None:
        outgoing = sorted(
            (device, number, piece) for number, each in enumerate(sent) for device, piece in each
        )
        incoming = sorted(
            (device, number, piece)
            for number, each in enumerate(received)
            for device, piece in each
        )
        self.cuts = []
        self._sent: dict[int, int] = {}
        for device, number, piece in outgoing:
            holder = held[number]
            assert holder is not None
            self.cuts.append((number, within(piece, holder)))
            self._sent[device] = self._sent.get(device, 0) + math.prod(sizes(piece))
        self.places = [(number, sizes(piece)) for _, number, piece in incoming]
        self.lengths = [math.prod(shape) for _, shape in self.places]
        self.received = sum(self.lengths)
        self._received: dict[int, int] = {}
        for (device, _, _), length in zip(incoming, self.lengths, strict=True):
            self._received[device] = self._received.get(device, 0) + length
        self._counts: dict[Devices, tuple[list[int], list[int]]] = {}

    def counts(self, peers: Devices) -> tuple[list[int], list[int]]:
        """Elements for and from each of the peers."""
        if peers not in self._counts:
            self._counts[peers] = (
                [self._sent.get(device, 0) for device in peers],
                [self._received.get(device, 0) for device in peers],
            )
        return self._counts[peers]
