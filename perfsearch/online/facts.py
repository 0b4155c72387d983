"""What a rank says of its job when tuning begins: plain values for the process that proposes."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from perfsearch.core.knob import Value
from perfsearch.online import wrapper as wrapping
from perfsearch.online.optimizer import why_not


def facts_of(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, implementation: Value
) -> dict[str, Any]:
    """Device, sizes, what is in force, and what may not be changed for which reason.

    Args:
        model: the wrapper.
        optimizer: that its steps are counted by.
        implementation: which implementation of the optimizer is in force, ``None`` where it
            cannot change.

    """
    world = dist.get_world_size(model.process_group)
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    trained = [p for p in model.module.parameters() if p.requires_grad]
    configuration = wrapping.configuration_of(model)
    fixed = wrapping.why_not_each(model)
    if implementation is not None:
        configuration["optimizer_implementation"] = implementation
    else:
        fixed["optimizer_implementation"] = why_not(optimizer)
    return {
        "device": torch.device(model.device).type,
        "ranks_per_node": per_node if world % per_node == 0 else world,
        "nodes": world // per_node if world % per_node == 0 else 1,
        "gradient_mib": sum(p.numel() * p.element_size() for p in trained) / wrapping.MIB,
        "wrapper_parameters": sorted(wrapping.constructor_parameters),
        "configuration": configuration,
        "fixed": fixed,
    }


def job_name(model: DistributedDataParallel) -> str:
    """Which job numbers belong to: ranks, device, size of the model, version of torch."""
    device = torch.device(model.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    parameters = sum(p.numel() for p in model.module.parameters())
    world = dist.get_world_size(model.process_group)
    return f"{world} x {name}, {parameters} parameters, torch {torch.__version__}"
