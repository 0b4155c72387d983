"""How an optimizer walks over its parameters: one by one, in lists, or in one kernel."""

from __future__ import annotations

import torch

from perfsearch.core.knob import Value

DEFAULT = "default"
IMPLEMENTATIONS = (DEFAULT, "foreach", "fused")


def apply_implementation(optimizer: torch.optim.Optimizer, choice: Value) -> None:
    """Make a new optimizer, that has not stepped, use the named implementation.

    Args:
        optimizer: any optimizer; those of torch keep the choice in their parameter groups.
        choice: ``default`` or ``None`` leaves it as the user made it.

    Raises:
        ValueError: its class has no such implementation.

    """
    if choice in (None, DEFAULT):
        return
    if choice not in IMPLEMENTATIONS:
        raise ValueError(f"optimizer_implementation={choice}: one of {', '.join(IMPLEMENTATIONS)}")
    for group in optimizer.param_groups:
        if choice not in group:
            raise ValueError(
                f"optimizer_implementation={choice}: {type(optimizer).__name__} has no {choice} "
                "implementation"
            )
        for name in ("foreach", "fused"):
            if name in group:
                group[name] = name == choice
    if choice == "fused":
        optimizer._step_supports_amp_scaling = True  # as its constructor does


def implementation_of(optimizer: torch.optim.Optimizer) -> str:
    """Which implementation all parameter groups name."""
    names = {
        "fused" if group.get("fused") else "foreach" if group.get("foreach") else DEFAULT
        for group in optimizer.param_groups
    }
    return names.pop() if len(names) == 1 else "mixed"
