"""Weights that are changed by as little as they are rounded, to see what that makes of the losses.

How far the losses of the next steps are then from those of untouched weights says how far another
order of the same computation may take them: a network whose weights were just drawn can make a
hundred times more of it.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

_TF32 = 2.0**-11
"""Half a step of the type by which GPUs multiply float32 where torch lets them."""


def perturb(parameter: torch.Tensor, seed: int, autocast: Collection[torch.dtype] = ()) -> None:
    """Change each weight by what the coarsest type in use rounds it by; alike on all ranks.

    Args:
        parameter: changed in place.
        seed: of the draws, another for each parameter.
        autocast: types that it is cast to where it is multiplied.

    """
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    drawn = torch.Generator(local.device).manual_seed(seed)
    precise = torch.float64 if local.dtype == torch.float64 else torch.float32
    noise = torch.empty(local.shape, device=local.device, dtype=precise)
    noise.normal_(generator=drawn).mul_(_step(local, autocast)).add_(1.0)
    with torch.no_grad():
        local.copy_(local.to(precise).mul_(noise))


def _step(weights: torch.Tensor, autocast: Collection[torch.dtype]) -> float:
    """Largest relative error by which such weights are rounded when they are multiplied."""
    coarse = [float(torch.finfo(dtype).eps) / 2 for dtype in {weights.dtype, *autocast}]
    if weights.dtype == torch.float32 and weights.is_cuda and _multiplies_by_tf32():
        coarse.append(_TF32)
    return max(coarse)


def _multiplies_by_tf32() -> bool:
    return bool(torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32)
