"""Sums that the parts of one operator exchange while they compute."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from perfsearch.parallel.soap.communicators import Communicators, Devices
from perfsearch.parallel.soap.configuration import Plan, part_rectangles
from perfsearch.parallel.soap.graph import Graph, Operator
from perfsearch.parallel.soap.kernels import Surroundings
from perfsearch.parallel.soap.shared_sums import partners


def sharing(operator: Operator, plan: Plan) -> dict[int, Devices]:
    """By device, the devices whose sums its part needs, itself included; see ``partners``."""
    configuration = plan[operator.name]
    devices = configuration.devices
    places = partners(operator, part_rectangles(operator, configuration))
    return {
        device: tuple(sorted(devices[place] for place in mine))
        for device, mine in zip(devices, places, strict=False)
    }


def groups_needed(graph: Graph, plan: Plan) -> list[Devices]:
    """Sets of devices that exchange sums."""
    found = {
        devices
        for operator in graph.planned
        for devices in sharing(operator, plan).values()
        if len(devices) > 1
    }
    return sorted(found)


def surroundings(
    operator: Operator,
    plan: Plan,
    rank: int,
    device: torch.device,
    groups: Communicators,
    buffers: Mapping[str, torch.Tensor],
) -> Surroundings:
    """What a part on this rank knows of the others."""
    shared = sharing(operator, plan).get(rank, ()) if operator.name in plan else ()
    if len(shared) < 2:
        return Surroundings(device, buffers=buffers)

    def total(tensor: torch.Tensor) -> torch.Tensor:
        groups.launch(
            shared, lambda group: dist.all_reduce(tensor, group=group, async_op=True)
        ).wait()
        return tensor

    return Surroundings(device, total, total, buffers)
