"""One redistribution on one rank, there and back; prepared once, run each step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from perfsearch.parallel.soap.axes import Rectangle
from perfsearch.parallel.soap.communicators import Communicators
from perfsearch.parallel.soap.pieces import Gatherer, Scatterer
from perfsearch.parallel.soap.rectangles import volume, within
from perfsearch.parallel.soap.redistribute import Pattern, Redistribution, pattern, stacking
from perfsearch.parallel.soap.rules import sizes

# newer names of the same, whose old ones warn
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Exchange(ABC):
    """Moves values forward and gradients back.

    Either way is started on all participants in one order, and finished where its result is
    wanted, so that computation can go on in between.

    Args:
        plan: what moves.
        rank: this device.
        dtype: of the values.
        device: where they are.

    """

    def __init__(
        self, plan: Redistribution, rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.plan = plan
        self.own = plan.owned.get(rank)
        self.need = plan.needed.get(rank)
        self._rank = rank
        self.dtype = dtype
        self._device = device
        self._work: Any = None

    @abstractmethod
    def start(self, value: torch.Tensor | None) -> None:
        """Begin to move this rank's part, if it has one."""

    @abstractmethod
    def finish(self) -> torch.Tensor | None:
        """Give what this rank needs, if it needs any."""

    @abstractmethod
    def start_back(self, gradient: torch.Tensor | None) -> None:
        """Begin to move the gradient of what was needed."""

    @abstractmethod
    def finish_back(self) -> torch.Tensor | None:
        """Give the gradient of this rank's part, summed over all that needed of it."""

    def forget(self) -> None:
        """Drop what was started and will never end."""
        self._work = None

    def sent_elements(self) -> tuple[int, int]:
        """Elements that leave this rank, forward and backward."""
        moved = [m for m in self.plan.messages if m.source != m.destination]
        there = sum(volume(m.rectangle) for m in moved if m.source == self._rank)
        back = sum(volume(m.rectangle) for m in moved if m.destination == self._rank)
        return there, back

    def drain(self) -> None:
        """Wait for what this rank only sends, so that its buffers may go."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def _empty(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self._device)


class LocalExchange(Exchange):
    """Nothing leaves the device."""

    def start(self, value: torch.Tensor | None) -> None:
        """Cut out what is needed."""
        self._value = None
        if self.need is not None and value is not None:
            assert self.own is not None
            same = self.need == self.own
            self._value = value if same else value[within(self.need, self.own)]

    def finish(self) -> torch.Tensor | None:
        """Give it."""
        return self._value

    def start_back(self, gradient: torch.Tensor | None) -> None:
        """Put it where it belongs."""
        self._gradient = gradient
        if self.own is not None and self.need is not None and self.need != self.own:
            whole = torch.zeros(sizes(self.own), dtype=self.dtype, device=self._device)
            whole[within(self.need, self.own)] = gradient
            self._gradient = whole

    def finish_back(self) -> torch.Tensor | None:
        """Give it."""
        return self._gradient


class PieceExchange(Exchange):
    """All pieces in one exchange, from anybody to anybody: batched point-to-point.

    Pieces for one device lie side by side in one buffer, which is what both backends take; what
    stays on the device is not sent.
    """

    def __init__(
        self,
        plan: Redistribution,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        group: Any,
    ) -> None:
        super().__init__(plan, rank, dtype, device)
        self._group = group
        others = [m for m in plan.messages if m.source != m.destination]
        sent = sorted((m.destination, m.rectangle) for m in others if m.source == rank)
        received = sorted((m.source, m.rectangle) for m in others if m.destination == rank)
        kept = [m.rectangle for m in plan.messages if m.source == m.destination == rank]
        self._send = _Side(sent, plan.participants)
        self._receive = _Side(received, plan.participants)
        self._cut_sent = None if self.own is None else Scatterer(self.own, self._send.pieces)
        self._cut_need = None if self.need is None else Scatterer(self.need, self._receive.pieces)
        self._kept = kept[0] if kept else None
        if self.need is not None:
            self._gather = Gatherer(self.need, [*kept, *self._receive.pieces], add=False)
        if self.own is not None:
            self._gather_back = Gatherer(self.own, [*kept, *self._send.pieces], add=True)

    def _move(self, value: torch.Tensor | None, there: bool) -> None:
        out, back = (self._send, self._receive) if there else (self._receive, self._send)
        scatterer = self._cut_sent if there else self._cut_need
        self._outgoing = (
            self._empty([0]) if scatterer is None or value is None else scatterer.flat(value)
        )
        self._incoming = self._empty([back.elements])
        self._work = dist.all_to_all_single(
            self._incoming,
            self._outgoing,
            back.counts,
            out.counts,
            group=self._group,
            async_op=True,
        )

    def start(self, value: torch.Tensor | None) -> None:
        """Send pieces of the part."""
        self._local = None
        if self._kept is not None and value is not None:
            assert self.own is not None
            self._local = value[within(self._kept, self.own)]
        self._move(value, there=True)

    def finish(self) -> torch.Tensor | None:
        """Put what came together."""
        self.drain()
        if self.need is None:
            return None
        local = [] if self._local is None else [self._local]
        value = self._gather([*local, *self._receive.split(self._incoming)])
        self._local = None
        return value

    def start_back(self, gradient: torch.Tensor | None) -> None:
        """Send each piece's gradient to where the piece came from."""
        self._local = None
        if self._kept is not None and gradient is not None:
            assert self.need is not None
            self._local = gradient[within(self._kept, self.need)]
        self._move(gradient, there=False)

    def finish_back(self) -> torch.Tensor | None:
        """Sum what came."""
        self.drain()
        if self.own is None:
            return None
        local = [] if self._local is None else [self._local]
        pieces = [*local, *self._send.split(self._incoming)]
        self._local = None
        return self._gather_back(pieces) if pieces else None


class _Side:
    """Pieces that are sent, or received, in the order in which they lie in the buffer."""

    def __init__(
        self, pieces: Sequence[tuple[int, Rectangle]], participants: Sequence[int]
    ) -> None:
        self.pieces = [rectangle for _, rectangle in pieces]
        self._shapes = [sizes(r) for r in self.pieces]
        self._lengths = [math.prod(shape) for shape in self._shapes]
        self.elements = sum(self._lengths)
        self.counts = [
            sum(volume(r) for other, r in pieces if other == device) for device in participants
        ]

    def split(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Views of a buffer, a piece each."""
        flat = buffer.split(self._lengths) if self._lengths else ()
        return [part.view(shape) for part, shape in zip(flat, self._shapes, strict=True)]


class GatherExchange(Exchange):
    """Everybody needs everything: all-gather, and reduce-scatter back."""

    def __init__(
        self,
        plan: Redistribution,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        group: Any,
    ) -> None:
        super().__init__(plan, rank, dtype, device)
        self._group = group
        dim = stacking(plan)
        assert dim is not None and self.own is not None
        self._dim = dim
        self._count = len(plan.participants)
        self._part = sizes(self.own)

    def start(self, value: torch.Tensor | None) -> None:
        """Gather parts one after another."""
        assert value is not None
        self._outgoing = value.contiguous()
        self._incoming = self._empty([self._count * self._part[0], *self._part[1:]])
        self._work = _all_gather(self._incoming, self._outgoing, group=self._group, async_op=True)

    def finish(self) -> torch.Tensor | None:
        """Put them side by side."""
        self.drain()
        if self._dim == 0:
            return self._incoming
        return torch.cat(self._incoming.chunk(self._count), self._dim)

    def start_back(self, gradient: torch.Tensor | None) -> None:
        """Sum gradients over all, a part on each."""
        assert gradient is not None
        if self._dim:
            gradient = torch.cat(gradient.chunk(self._count, self._dim))
        self._outgoing = gradient.contiguous()
        self._incoming = self._empty(self._part)
        self._work = _reduce_scatter(
            self._incoming, self._outgoing, group=self._group, async_op=True
        )

    def finish_back(self) -> torch.Tensor | None:
        """Give it."""
        self.drain()
        return self._incoming


class BroadcastExchange(Exchange):
    """All need the same of one: broadcast, and reduce back."""

    def __init__(
        self,
        plan: Redistribution,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        group: Any,
    ) -> None:
        super().__init__(plan, rank, dtype, device)
        self._group = group
        (self._root,) = plan.owned
        self._moved = next(iter(plan.needed.values()))

    def start(self, value: torch.Tensor | None) -> None:
        """Send it to all."""
        if value is not None:
            assert self.own is not None
            self._buffer = value.detach()[within(self._moved, self.own)].contiguous()
        else:
            self._buffer = self._empty(sizes(self._moved))
        self._work = dist.broadcast(self._buffer, self._root, group=self._group, async_op=True)

    def finish(self) -> torch.Tensor | None:
        """Give it where it is needed."""
        self.drain()
        return self._buffer if self.need is not None else None

    def start_back(self, gradient: torch.Tensor | None) -> None:
        """Sum gradients on the one that has the part."""
        if gradient is None:
            shape = sizes(self._moved)
            self._buffer = torch.zeros(shape, dtype=self.dtype, device=self._device)
        else:
            self._buffer = gradient.clone(memory_format=torch.contiguous_format)
        self._work = dist.reduce(self._buffer, self._root, group=self._group, async_op=True)

    def finish_back(self) -> torch.Tensor | None:
        """Give it, in its place in the part."""
        self.drain()
        if self.own is None or self.own == self._moved:
            return self._buffer if self.own is not None else None
        whole = torch.zeros(sizes(self.own), dtype=self.dtype, device=self._device)
        whole[within(self._moved, self.own)] = self._buffer
        return whole


def groups_of(plan: Redistribution) -> tuple[int, ...]:
    """Devices whose communicator it uses; empty where nothing moves."""
    if pattern(plan) is Pattern.BROADCAST:
        return tuple(sorted({*plan.owned, *plan.needed}))
    return plan.participants


def make(
    plan: Redistribution,
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
    groups: Communicators,
) -> Exchange | None:
    """The exchange for a redistribution; ``None`` where this rank has no part in it."""
    found = pattern(plan)
    if rank not in plan.owned and rank not in plan.needed:
        return None
    members = groups_of(plan)
    if found is Pattern.LOCAL or rank not in members:
        return LocalExchange(plan, rank, dtype, device)
    kinds = {Pattern.ALL_GATHER: GatherExchange, Pattern.BROADCAST: BroadcastExchange}
    return kinds.get(found, PieceExchange)(plan, rank, dtype, device, groups.of(members))
