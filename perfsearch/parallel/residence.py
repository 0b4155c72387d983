"""Bytes that a rank really holds, from the storages of its tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a distributed tensor that is here; any other tensor as it is."""
    found = getattr(tensor, "_local_tensor", tensor)
    assert isinstance(found, torch.Tensor)
    return found


def held_bytes(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    """Bytes of the storages behind ``tensors`` on ``device``, each counted once."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        here = local(tensor)
        if here.device.type == device.type:
            storage = here.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def resident(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> dict[str, int]:
    """Bytes of parameters, gradients, optimizer state and buffers on ``device``.

    Call it after an optimizer's second step and before gradients are dropped: state is made in the
    first.
    """
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    inner = getattr(optimizer, "optim", optimizer)  # of a ZeroRedundancyOptimizer
    state = [v for entry in inner.state.values() for v in _tensors(entry)]
    return {
        "parameters": held_bytes(parameters, device),
        "gradients": held_bytes(gradients, device),
        "optimizer": held_bytes(state, device),
        "buffers": held_bytes(model.buffers(), device),
    }


def _tensors(entry: Any) -> list[torch.Tensor]:
    return [v for v in entry.values() if isinstance(v, torch.Tensor)]
