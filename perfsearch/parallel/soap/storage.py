"""What a rank copies of the model: its tiles of the parameters, and the buffers."""

from __future__ import annotations

import torch
from torch import nn

from perfsearch.parallel.soap.axes import Rectangle
from perfsearch.parallel.soap.captured import Captured


def tile_of(tensor: torch.Tensor, rectangle: Rectangle, device: torch.device) -> torch.Tensor:
    """A copy of a rectangle of a tensor, on a device."""
    cut = tuple(slice(*span) for span in rectangle)
    return tensor.detach()[cut].to(device, copy=True).contiguous()


def buffers_of(
    captured: Captured, model: nn.Module, device: torch.device
) -> dict[str, torch.Tensor]:
    """By input name and by name in the model; constants by input name."""
    held = dict(model.named_buffers())
    moved = {name: tensor.to(device) for name, tensor in held.items()}
    found = {name: tensor.to(device) for name, tensor in captured.constants.items()}
    found.update({place: moved[name] for place, name in captured.buffers.items()})
    found.update(moved)
    return found
