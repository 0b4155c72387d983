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
