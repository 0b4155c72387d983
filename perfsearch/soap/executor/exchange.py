"""Redistributions on one rank, forward and back, and the process groups that they use."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from perfsearch.soap.graph import Rectangle, volume, within
from perfsearch.soap.plan import Pattern, Redistribution, pattern, stacking
from perfsearch.soap.rules.base import sizes

# newer names of the same, whose old ones warn
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Exchange(ABC):
    """Moves values forward and gradients back.

    Either way is started on all participants in one order, and finished where its result is
    wanted, so that computation can go on in between.

    Args:
        redistribution: what moves.
        rank: this device.
        dtype: of the values.
        device: where they are.

    """

    def __init__(
        self, redistribution: Redistribution, rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.redistribution = redistribution
        self.own = redistribution.owned.get(rank)
        self.need = redistribution.needed.get(rank)
        self._rank = rank
        self.dtype = dtype
        self.device = device
        self._work: dist.Work | None = None

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
        moved = [m for m in self.redistribution.messages if m.source != m.destination]
        there = sum(volume(m.rectangle) for m in moved if m.source == self._rank)
        back = sum(volume(m.rectangle) for m in moved if m.destination == self._rank)
        return there, back

    def wait(self) -> None:
        """Wait for what was started, if anything was."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def drain(self) -> None:
        """Wait for what this rank only sends, so that its buffers may go."""
        self.wait()

    @property
    def first_consumer(self) -> str:
        """The operator that reads what is moved before others do; empty for a batch's tensor."""
        return self.redistribution.consumers[0][0] if self.redistribution.consumers else ""

    def _empty(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


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
            whole = torch.zeros(sizes(self.own), dtype=self.dtype, device=self.device)
            whole[within(self.need, self.own)] = gradient
            self._gradient = whole

    def finish_back(self) -> torch.Tensor | None:
        """Give it."""
        return self._gradient


class GatherExchange(Exchange):
    """Everybody needs everything: all-gather, and reduce-scatter back."""

    def __init__(
        self,
        redistribution: Redistribution,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        groups: Communicators,
    ) -> None:
        super().__init__(redistribution, rank, dtype, device)
        self._groups = groups
        self._members = members_of(redistribution)
        dim = stacking(redistribution)
        assert dim is not None and self.own is not None
        self._dim = dim
        self._count = len(redistribution.participants)
        self._part = sizes(self.own)

    def start(self, value: torch.Tensor | None) -> None:
        """Gather parts one after another."""
        assert value is not None
        self._outgoing = value.contiguous()
        self._incoming = self._empty([self._count * self._part[0], *self._part[1:]])
        self._work = self._groups.launch(
            self._members,
            lambda group: all_gather(self._incoming, self._outgoing, group=group, async_op=True),
        )

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
        self._work = self._groups.launch(
            self._members,
            lambda group: reduce_scatter(
                self._incoming, self._outgoing, group=group, async_op=True
            ),
        )

    def finish_back(self) -> torch.Tensor | None:
        """Give it."""
        self.drain()
        return self._incoming


class BroadcastExchange(Exchange):
    """All need the same of one: broadcast, and reduce back."""

    def __init__(
        self,
        redistribution: Redistribution,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        groups: Communicators,
    ) -> None:
        super().__init__(redistribution, rank, dtype, device)
        self._groups = groups
        self._members = members_of(redistribution)
        (self._root,) = redistribution.owned
        self._moved = next(iter(redistribution.needed.values()))

    def start(self, value: torch.Tensor | None) -> None:
        """Send it to all."""
        if value is not None:
            assert self.own is not None
            self._buffer = value.detach()[within(self._moved, self.own)].contiguous()
        else:
            self._buffer = self._empty(sizes(self._moved))
        self._work = self._groups.launch(
            self._members,
            lambda group: dist.broadcast(self._buffer, self._root, group=group, async_op=True),
        )

    def finish(self) -> torch.Tensor | None:
        """Give it where it is needed."""
        self.drain()
        return self._buffer if self.need is not None else None

    def start_back(self, gradient: torch.Tensor | None) -> None:
        """Sum gradients on the one that has the part."""
        if gradient is None:
            shape = sizes(self._moved)
            self._buffer = torch.zeros(shape, dtype=self.dtype, device=self.device)
        else:
            self._buffer = gradient.clone(memory_format=torch.contiguous_format)
        self._work = self._groups.launch(
            self._members,
            lambda group: dist.reduce(self._buffer, self._root, group=group, async_op=True),
        )

    def finish_back(self) -> torch.Tensor | None:
        """Give it, in its place in the part."""
        self.drain()
        if self.own is None or self.own == self._moved:
            return self._buffer if self.own is not None else None
        whole = torch.zeros(sizes(self.own), dtype=self.dtype, device=self.device)
        whole[within(self._moved, self.own)] = self._buffer
        return whole


def members_of(redistribution: Redistribution) -> Devices:
    """Devices whose communicator a redistribution uses."""
    if pattern(redistribution) is Pattern.BROADCAST:
        return tuple(sorted({*redistribution.owned, *redistribution.needed}))
    return redistribution.participants


# -----------------------------------------------------------------------------
# Any other pattern: the pieces of several redistributions in one all-to-all.


class PieceExchange(Exchange):
    """One redistribution of a batch; ``start`` and ``start_back`` only hand its tensor over."""

    batch: PieceBatch

    def __init__(
        self, redistribution: Redistribution, rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(redistribution, rank, dtype, device)
        others = [m for m in redistribution.messages if m.source != m.destination]
        self.sent = sorted((m.destination, m.rectangle) for m in others if m.source == rank)
        self.received = sorted((m.source, m.rectangle) for m in others if m.destination == rank)
        kept = [m.rectangle for m in redistribution.messages if m.source == m.destination == rank]
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


# -----------------------------------------------------------------------------
# Putting pieces together.


class Gatherer:
    """Puts pieces together to a tensor, in as few copies as their places allow.

    Args:
        target: what the tensor holds.
        pieces: that will be given, in their order.
        add: whether pieces may overlap, and leave gaps: sum them over zeros.

    """

    def __init__(self, target: Rectangle, pieces: Sequence[Rectangle], add: bool) -> None:
        self._shape = sizes(target)
        self._places = [within(piece, target) for piece in pieces]
        self._add = add
        self._single = len(pieces) == 1 and pieces[0] == target
        self._dim, self._order = _stack(target, pieces)

    def __call__(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor."""
        if self._single:
            return pieces[0]
        if self._dim is not None:
            return torch.cat([pieces[i] for i in self._order], self._dim)
        if not self._add:
            whole = pieces[0].new_empty(self._shape)
            for place, piece in zip(self._places, pieces, strict=True):
                whole[place] = piece
            return whole
        whole = pieces[0].new_zeros(self._shape)
        for place, piece in zip(self._places, pieces, strict=True):
            whole[place] += piece
        return whole


def _stack(target: Rectangle, pieces: Sequence[Rectangle]) -> tuple[int | None, list[int]]:
    """The dimension along which the pieces make up the target without gap or overlap."""
    varying = [d for d, span in enumerate(target) if any(p[d] != span for p in pieces)]
    if len(varying) != 1 or sum(volume(p) for p in pieces) != volume(target):
        return None, []
    dim = varying[0]
    order = sorted(range(len(pieces)), key=lambda i: pieces[i][dim])
    ends = [pieces[i][dim][1] for i in order]
    starts = [pieces[i][dim][0] for i in order[1:]]
    return (dim, order) if ends[:-1] == starts else (None, [])


# -----------------------------------------------------------------------------
# All redistributions of a plan as exchanges, those that can move together in batches.


@dataclass(frozen=True)
class Connection:
    """A redistribution in its place.

    Attributes:
        redistribution: what moves.
        dtype: of the values.
        begins: place of the producer.
        ends: place of the first consumer.
        returns: whether its gradient moves back.

    """

    redistribution: Redistribution
    dtype: torch.dtype
    begins: int
    ends: int
    returns: bool


@dataclass
class Group:
    """Connections that move together: one, or those of a batch.

    Attributes:
        connections: in the order of all ranks.
        devices: that communicate; empty where nothing leaves a device.
        merged: whether it is a batch of pieces.
        exchanges: of this rank, by the number of the connection; filled by ``connect``.
        batch: of pieces, where it is one and this rank takes part.

    """

    connections: list[Connection]
    devices: Devices
    merged: bool = False
    exchanges: dict[int, Exchange] = field(default_factory=dict)
    batch: PieceBatch | None = None

    @property
    def begins(self) -> int:
        """Place after which it is launched: that of the last producer."""
        return max(connection.begins for connection in self.connections)

    @property
    def ends(self) -> int:
        """Place whose backward pass launches it back."""
        return self.connections[0].ends

    @property
    def returns(self) -> bool:
        """Whether gradients move back."""
        return self.connections[0].returns


_MERGED = (Pattern.POINT_TO_POINT, Pattern.ALL_TO_ALL)


def grouped(connections: Sequence[Connection]) -> list[Group]:
    """Put together what ends at the same operator and is no collective of its own."""
    found: list[Group] = []
    merged: dict[tuple[int, str, bool], Group] = {}
    for connection in connections:
        kind = pattern(connection.redistribution)
        if kind not in _MERGED:
            devices = () if kind is Pattern.LOCAL else members_of(connection.redistribution)
            found.append(Group([connection], devices))
            continue
        key = (connection.ends, str(connection.dtype), connection.returns)
        if key not in merged:
            merged[key] = Group([], (), merged=True)
            found.append(merged[key])
        group = merged[key]
        group.connections.append(connection)
        group.devices = tuple(sorted({*group.devices, *connection.redistribution.participants}))
    return found


def connect(group: Group, rank: int, device: torch.device, groups: Communicators) -> None:
    """Make this rank's exchanges of a group."""
    members: list[PieceExchange] = []
    for number, connection in enumerate(group.connections):
        redistribution = connection.redistribution
        if rank not in redistribution.owned and rank not in redistribution.needed:
            continue
        kind = pattern(redistribution)
        if kind in _MERGED:
            piece = PieceExchange(redistribution, rank, connection.dtype, device)
            members.append(piece)
            group.exchanges[number] = piece
        elif kind is Pattern.LOCAL or rank not in group.devices:
            group.exchanges[number] = LocalExchange(redistribution, rank, connection.dtype, device)
        elif kind is Pattern.ALL_GATHER:
            group.exchanges[number] = GatherExchange(
                redistribution, rank, connection.dtype, device, groups
            )
        else:
            group.exchanges[number] = BroadcastExchange(
                redistribution, rank, connection.dtype, device, groups
            )
    if members:
        group.batch = PieceBatch(members, group.devices, rank, groups)


# -----------------------------------------------------------------------------
# Process groups of sets of devices: made once, in one order on all ranks, and warmed.

Devices = tuple[int, ...]


class Communicators:
    """Groups by their devices, which are ranks of the default group.

    Args:
        device: where this rank computes.

    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._world = tuple(range(dist.get_world_size()))
        self._groups: dict[Devices, Any] = {self._world: dist.group.WORLD}
        self._rank = dist.get_rank()
        self._streams = device.type == "cuda"
        self._last: tuple[Devices, dist.Work] | None = None

    @property
    def world_size(self) -> int:
        """Ranks of the default group."""
        return len(self._world)

    def ensure(self, sets: Iterable[Devices]) -> None:
        """Make and warm the groups that are missing; all ranks call it with the same sets.

        The first operation of a group must have all its ranks, which no later one has to have.
        """
        missing = {devices for devices in sets if len(devices) > 1} - self._groups.keys()
        for devices in sorted(missing):
            group = dist.new_group(list(devices))
            self._groups[devices] = group
            if self._rank in devices:
                dist.all_reduce(torch.zeros(1, device=self._device), group=group)
        dist.all_reduce(torch.zeros(1, device=self._device))

    def launch(self, devices: Devices, start: Callable[[Any], dist.Work]) -> dist.Work:
        """Start an operation of a set of devices, in which all of them take part.

        Ranks that exchange pieces in a larger group, which the others do not call, were seen to
        wait for ever on NCCL. On GPUs an operation of one communicator waits for that of another
        before it: two at a time may be run in different order by different devices, each waiting
        for the other.

        Args:
            devices: a set that was ensured.
            start: starts it asynchronously in the group that it is given.

        """
        if self._streams and self._last is not None and self._last[0] != devices:
            self._last[1].wait()
        work = start(self._groups[devices])
        self._last = (devices, work)
        return work

    def align(self) -> None:
        """Let no rank, on GPUs no stream, go on before all have come this far."""
        mark = torch.zeros(1, device=self._device)
        self.launch(
            self._world, lambda group: dist.all_reduce(mark, group=group, async_op=True)
        ).wait()

    def settled(self) -> None:
        """All that was launched has been waited for: nothing has to wait for it again."""
        self._last = None


_present: dict[tuple[int, int], Communicators] = {}


def communicators(owner: int, generation: int, device: torch.device) -> Communicators:
    """Those of the present default group; they last as long as it does.

    Args:
        owner: identity of what made the default group.
        generation: how often it has been made.
        device: where this rank computes.

    """
    key = (owner, generation)
    if key not in _present:
        _present.clear()
        _present[key] = Communicators(device)
    return _present[key]
