"""Change how a stepping optimizer walks over its parameters, its state going on as it is."""

from __future__ import annotations

import weakref

import torch

from perfsearch.core.knob import Value
from perfsearch.knobs.optimizer import DEFAULT, apply_implementation

_SWITCHABLE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Classes whose implementations keep the same state, but for where the count of steps lives."""


def why_not_switchable(optimizer: torch.optim.Optimizer) -> str:
    """Why its implementation must stay what it is; empty where it can change."""
    name = type(optimizer).__name__
    if type(optimizer) not in _SWITCHABLE:
        return f"{name} is not one of torch's SGD, Adam and AdamW"
    for group in optimizer.param_groups:
        if not {"foreach", "fused"} <= set(group):
            return f"{name} has no choice of implementations in the installed torch"
        for flag in ("capturable", "differentiable"):
            if group.get(flag):
                return f"{name} is {flag}"
        for parameter in group["params"]:
            plain = type(parameter) in (torch.nn.Parameter, torch.Tensor)
            if not plain or not parameter.is_floating_point() or parameter.layout != torch.strided:
                return f"a parameter of {name} is no plain dense floating-point tensor"
    return ""


class ImplementationSwitch:
    """Switches one optimizer to and fro, and keeps it alive no longer than the script does.

    Args:
        optimizer: one that ``why_not_switchable`` has nothing against.

    Attributes:
        choice: what is in force.

    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._own = [(g["foreach"], g["fused"]) for g in optimizer.param_groups]
        self.choice: Value = DEFAULT

    def apply(self, choice: Value) -> None:
        """Use the named implementation from the next step on; ``default`` is the user's own."""
        optimizer = self._optimizer()
        if optimizer is None:
            pass
        elif choice in (None, DEFAULT):
            for group, (foreach, fused) in zip(optimizer.param_groups, self._own, strict=False):
                group.update(foreach=foreach, fused=fused)
            fused_now = any(group["fused"] for group in optimizer.param_groups)
            optimizer._step_supports_amp_scaling = fused_now
        else:
            apply_implementation(optimizer, choice)
            optimizer._step_supports_amp_scaling = choice == "fused"
        if optimizer is not None:
            _move_counts(optimizer)
        self.choice = DEFAULT if choice is None else choice


def _move_counts(optimizer: torch.optim.Optimizer) -> None:
    """The fused kernel counts steps beside the parameter, the others on the host."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            count = optimizer.state.get(parameter, {}).get("step")
            if isinstance(count, torch.Tensor):
                device = parameter.device if group["fused"] else torch.device("cpu")
                kept = count.to(device=device, dtype=torch.float32)
                optimizer.state[parameter]["step"] = kept
