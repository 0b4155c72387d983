"""Take a running script back to where it was after its first step, as far as losses can tell."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import psutil
import torch
from torch.optim.lr_scheduler import LRScheduler

from perfsearch.instrument.generators import RandomState
from perfsearch.instrument.patches import wrap
from perfsearch.instrument.script import Script

_MEMORY_SHARE = 0.3


class Rewinder:
    """Keeps weights, optimizer state, schedules, scalers and random numbers of one point.

    What a script keeps besides (averages of weights, counters) is not taken back; whether that
    matters is found by training the same steps again and comparing their losses.

    Args:
        script: the instruments.
        local_ranks: processes that share this host's memory.

    """

    def __init__(self, script: Script, local_ranks: int) -> None:
        self._script = script
        self._local_ranks = local_ranks
        self._helpers: list[weakref.ref[Any]] = []
        self._tensors: list[tuple[Any, torch.Tensor]] = []
        self._groups: list[tuple[Any, list[dict[str, Any]]]] = []
        self._states: list[tuple[Any, dict[str, Any]]] = []
        self._random: RandomState | None = None
        wrap(LRScheduler, "__init__", self._remember)
        wrap(torch.amp.GradScaler, "__init__", self._remember)

    def _remember(
        self, original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        original(*args, **kwargs)
        self._helpers.append(weakref.ref(args[0]))

    def take(self) -> str:
        """Keep the present point; return why it cannot be kept, or nothing."""
        tensors = list(self._held_tensors())
        needed = sum(t.numel() * t.element_size() for t in tensors)
        free = psutil.virtual_memory().available * _MEMORY_SHARE / self._local_ranks
        if needed > free:
            return f"{needed / 2**30:.1f} GiB of weights and state do not fit beside the script"
        self._tensors = [(t, t.detach().to("cpu", copy=True)) for t in tensors]
        self._groups = [
            (optimizer, [_without_parameters(g) for g in optimizer.param_groups])
            for optimizer in self._script.optimizers.live
        ]
        helpers = [helper for ref in self._helpers if (helper := ref()) is not None]
        self._states = [(h, copy.deepcopy(h.state_dict())) for h in helpers]
        self._random = RandomState.now()
        return ""

    def restore(self) -> None:
        """Go back to the point that was kept."""
        with torch.no_grad():
            for tensor, kept in self._tensors:
                tensor.copy_(kept, non_blocking=True)
        for optimizer, groups in self._groups:
            for group, kept in zip(optimizer.param_groups, groups, strict=False):
                group.update(copy.deepcopy(kept))
        for helper, state in self._states:
            helper.load_state_dict(copy.deepcopy(state))
        if self._random is not None:
            self._random.restore()

    def _held_tensors(self) -> Iterable[torch.Tensor]:
        """Every tensor once: parameters, buffers, and the optimizers' state."""
        seen: set[int] = set()
        for tensor in self._all_tensors():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor.to_local() if hasattr(tensor, "to_local") else tensor

    def _all_tensors(self) -> Iterable[torch.Tensor]:
        for wrapper in self._script.wrappers.live:
            yield from wrapper.module.parameters()
            yield from wrapper.module.buffers()
        for optimizer in self._script.optimizers.live:
            for group in optimizer.param_groups:
                yield from group["params"]
            for state in optimizer.state.values():
                yield from (v for v in state.values() if isinstance(v, torch.Tensor))


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(v) for name, v in group.items() if name != "params"}
