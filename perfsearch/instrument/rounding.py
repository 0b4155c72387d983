"""What rounding makes of a script's losses: weights are changed by as little between two steps."""

from __future__ import annotations

from typing import Any

import torch

from perfsearch.instrument.optimizers import Optimizers
from perfsearch.instrument.patching import once, wrap

_TF32 = 2.0**-11
"""Half a step of the type by which GPUs multiply float32 where torch lets them."""


class Rounding:
    """Changes each weight by what the coarsest type in use rounds it by.

    How far the losses of the next steps are then from those of untouched weights says how far
    other kernels for the same computation may take them: a network whose weights were just drawn
    can make a hundred times more of it. All ranks change their copies alike.

    Args:
        optimizers: of the script.

    Attributes:
        end_watch: ends the look at which types the script multiplies in.

    """

    def __init__(self, optimizers: Optimizers) -> None:
        self._optimizers = optimizers
        self._autocast: set[torch.dtype] = set()
        self.end_watch = once(wrap(torch.autocast, "__enter__", self._enter))

    def _enter(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        entered = original(*args, **kwargs)
        (context,) = args
        if getattr(context, "_enabled", False):
            self._autocast.add(context.fast_dtype)
        return entered

    def perturb(self) -> None:
        """Change the weights."""
        groups = [g for optimizer in self._optimizers.live for g in optimizer.param_groups]
        seen: set[int] = set()
        for index, parameter in enumerate(p for group in groups for p in group["params"]):
            if id(parameter) not in seen and parameter.is_floating_point():
                seen.add(id(parameter))
                self._perturb(parameter, index)

    def _perturb(self, parameter: torch.Tensor, seed: int) -> None:
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        drawn = torch.Generator(local.device).manual_seed(seed)
        noise = torch.empty(local.shape, device=local.device, dtype=torch.float32)
        noise.normal_(generator=drawn).mul_(self._step(local)).add_(1.0)
        with torch.no_grad():
            local.copy_(local.float().mul_(noise))

    def _step(self, weights: torch.Tensor) -> float:
        """Largest relative error by which such weights are rounded when they are multiplied."""
        coarse = [float(torch.finfo(dtype).eps) / 2 for dtype in {weights.dtype, *self._autocast}]
        if weights.dtype == torch.float32 and weights.is_cuda and _multiplies_by_tf32():
            coarse.append(_TF32)
        return max(coarse)


def _multiplies_by_tf32() -> bool:
    return bool(torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32)
