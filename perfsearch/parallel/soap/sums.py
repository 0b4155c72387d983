"""Sums that the parts of one operator exchange while they compute."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from perfsearch.parallel.soap.communicators import Communicators, Devices
from perfsearch.parallel.soap.configuration import Plan, part_rectangles
from perfsearch.parallel.soap.graph import Graph, Operator
from perfsearch.parallel.soap.kernels import Surroundings
from perfsearch.parallel.soap.rules import stage_rectangles


def sharing(operator: Operator, plan: Plan) -> dict[int, Devices]:
    """By device, the devices whose sums its part needs, itself included.

    Batch norm sums over parts with the same channels, a loss over all of its parts.
    """
    configuration = plan[operator.name]
    parts = {
        device: stage_rectangles(operator, part)[0]
        for device, part in zip(
            configuration.devices, part_rectangles(operator, configuration), strict=True
        )
    }
    if operator.kind == "class_loss":
        return dict.fromkeys(parts, tuple(sorted(parts)))
    if operator.kind == "batch_norm":
        return {
            device: tuple(sorted(d for d, other in parts.items() if other[1] == part[1]))
            for device, part in parts.items()
        }
    return {}


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
