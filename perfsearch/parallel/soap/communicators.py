"""Process groups of sets of devices: made once, in one order on all ranks, and warmed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

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

    def peers(self, devices: Devices) -> Devices:
        """Ranks, in order, of the group in which ``devices`` exchange pieces.

        On NCCL pieces go by the default group, where ranks that neither send nor receive need not
        take part: fewer communicators, and one order of everything.
        """
        return self._world if self._streams else devices

    def launch(
        self, devices: Devices, start: Callable[[Any], dist.Work], exchange: bool = False
    ) -> dist.Work:
        """Start an operation of a set of devices.

        On GPUs an operation of one communicator waits for that of another before it: two at a time
        may be run in different order by different devices, each waiting for the other.

        Args:
            devices: a set that was ensured.
            start: starts it asynchronously in the group that it is given.
            exchange: whether it exchanges pieces.

        """
        members = self.peers(devices) if exchange else devices
        if self._streams and self._last is not None and self._last[0] != members:
            self._last[1].wait()
        work = start(self._groups[members])
        self._last = (members, work)
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
