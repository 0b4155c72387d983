"""One redistribution on one rank, there and back; prepared once, run each step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist

from perfsearch.parallel.soap.communicators import Communicators, Devices
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
        moved = [m for m in self.plan.messages if m.source != m.destination]
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
        return self.plan.consumers[0][0] if self.plan.consumers else ""

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
        plan: Redistribution,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        groups: Communicators,
    ) -> None:
        super().__init__(plan, rank, dtype, device)
        self._groups = groups
        self._members = members_of(plan)
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
        self._work = self._groups.launch(
            self._members,
            lambda group: _all_gather(self._incoming, self._outgoing, group=group, async_op=True),
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
            lambda group: _reduce_scatter(
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
        plan: Redistribution,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        groups: Communicators,
    ) -> None:
        super().__init__(plan, rank, dtype, device)
        self._groups = groups
        self._members = members_of(plan)
        (self._root,) = plan.owned
        self._moved = next(iter(plan.needed.values()))

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


def members_of(plan: Redistribution) -> Devices:
    """Devices whose communicator a redistribution uses."""
    if pattern(plan) is Pattern.BROADCAST:
        return tuple(sorted({*plan.owned, *plan.needed}))
    return plan.participants
