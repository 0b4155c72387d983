"""How an optimizer walks over its parameters: one by one, in lists, or in one kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from perfsearch.core.knob import Kind, Knob, Numerics, Part, Value
from perfsearch.knobs.base import Job, Record, Taker

if TYPE_CHECKING:
    import torch

DEFAULT = "default"
IMPLEMENTATIONS = (DEFAULT, "foreach", "fused")


def _of_the_scripts(knob: Knob, job: Job) -> Knob | str:
    """Those that the script's optimizers have; what they use today cannot be named ``default``."""
    if job.seen is None:
        return knob
    if job.seen.implementations is not None and list(job.seen.implementations) == [DEFAULT]:
        return "the script's optimizer has no other"
    names = list(job.seen.implementations or IMPLEMENTATIONS)
    if IMPLEMENTATION.of(job.seen.values) in IMPLEMENTATIONS[1:]:
        names = [name for name in names if name != DEFAULT]
    return replace(knob, default=names[0], values=tuple(names))


IMPLEMENTATION = Record(
    Knob(
        "optimizer_implementation", Kind.CATEGORICAL, DEFAULT, values=IMPLEMENTATIONS,
        numerics=Numerics.REORDERED, help="how the optimizer walks over parameters",
        shortens=(Part.OPTIMIZER,),
    ),
    effect=80, zero_effect=15, fit=_of_the_scripts, takers=(Taker.OPTIMIZER,),
    missing="the script makes no torch optimizer", start="fused",
)  # fmt: skip

RECORDS = (IMPLEMENTATION,)


def apply(optimizer: torch.optim.Optimizer, configuration: Mapping[str, Value]) -> None:
    """Have a new optimizer walk over its parameters as the configuration says."""
    apply_implementation(optimizer, IMPLEMENTATION.of(configuration))


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
        raise ValueError(f"{IMPLEMENTATION.name}={choice}: one of {', '.join(IMPLEMENTATIONS)}")
    for group in optimizer.param_groups:
        if choice not in group:
            raise ValueError(
                f"{IMPLEMENTATION.name}={choice}: {type(optimizer).__name__} has no {choice} "
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


def values_of(
    optimizer: torch.optim.Optimizer, configuration: Mapping[str, Value]
) -> dict[str, Value]:
    """What is in force of what was asked for.

    ``default`` leaves the optimizer as the user made it, whatever that is.
    """
    asked = IMPLEMENTATION.of(configuration)
    found = DEFAULT if asked in (None, DEFAULT) else implementation_of(optimizer)
    return {IMPLEMENTATION.name: found}
