"""All redistributions of a plan as exchanges, those that can move together in batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from perfsearch.parallel.soap.communicators import Communicators, Devices
from perfsearch.parallel.soap.exchange import (
    BroadcastExchange,
    Exchange,
    GatherExchange,
    LocalExchange,
    members_of,
)
from perfsearch.parallel.soap.piece_exchange import PieceBatch, PieceExchange
from perfsearch.parallel.soap.redistribute import Pattern, Redistribution, pattern


@dataclass(frozen=True)
class Connection:
    """A redistribution in its place.

    Attributes:
        plan: what moves.
        dtype: of the values.
        begins: place of the producer.
        ends: place of the first consumer.
        returns: whether its gradient moves back.

    """

    plan: Redistribution
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
        kind = pattern(connection.plan)
        if kind not in _MERGED:
            devices = () if kind is Pattern.LOCAL else members_of(connection.plan)
            found.append(Group([connection], devices))
            continue
        key = (connection.ends, str(connection.dtype), connection.returns)
        if key not in merged:
            merged[key] = Group([], (), merged=True)
            found.append(merged[key])
        group = merged[key]
        group.connections.append(connection)
        group.devices = tuple(sorted({*group.devices, *connection.plan.participants}))
    return found


def connect(group: Group, rank: int, device: torch.device, groups: Communicators) -> None:
    """Make this rank's exchanges of a group."""
    members: list[PieceExchange] = []
    for number, connection in enumerate(group.connections):
        plan = connection.plan
        if rank not in plan.owned and rank not in plan.needed:
            continue
        kind = pattern(plan)
        if kind in _MERGED:
            piece = PieceExchange(plan, rank, connection.dtype, device)
            members.append(piece)
            group.exchanges[number] = piece
        elif kind is Pattern.LOCAL or rank not in group.devices:
            group.exchanges[number] = LocalExchange(plan, rank, connection.dtype, device)
        elif kind is Pattern.ALL_GATHER:
            group.exchanges[number] = GatherExchange(plan, rank, connection.dtype, device, groups)
        else:
            group.exchanges[number] = BroadcastExchange(
                plan, rank, connection.dtype, device, groups
            )
    if members:
        group.batch = PieceBatch(members, group.devices, rank, groups)
