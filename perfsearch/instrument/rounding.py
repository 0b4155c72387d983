"""What rounding makes of a script's losses: weights are changed by as little between two steps."""

from __future__ import annotations

from typing import Any

import torch

from perfsearch.instrument.optimizers import Optimizers
from perfsearch.instrument.patching import once, wrap
from perfsearch.training.rounding import perturb


class Rounding:
    """Changes each weight of a script by what the coarsest type in use rounds it by.

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
                perturb(parameter, index, self._autocast)
