"""Process groups of sets of devices: made once, in one order on all ranks, and warmed."""

from __future__ import annotations

from collections.abc import Iterable
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

    @property
    def world_size(self) -> int:
        """Ranks of the default group."""
        return len(self._world)

    def ensure(self, sets: Iterable[Devices]) -> None:
        """Make and warm the groups that are missing; all ranks call it with the same sets.

        The first operation of a group must have all its ranks, which no later one has to have.
        """
        for devices in sorted(set(sets) - self._groups.keys()):
            group = dist.new_group(list(devices))
            self._groups[devices] = group
            if self._rank in devices:
                dist.all_reduce(torch.zeros(1, device=self._device), group=group)
        dist.all_reduce(torch.zeros(1, device=self._device))

    def of(self, devices: Devices) -> Any:
        """The group of a set that was ensured."""
        return self._groups[devices]


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
