"""Some further steps of an execution, to time each operator in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from perfsearch.parallel.soap.execute import Execution
from perfsearch.parallel.soap.operator_clock import Column, OperatorClock
from perfsearch.parallel.soap.operator_time import OperatorTime

STEPS = 4
"""Steps that are run; the first is not counted: what was replayed so far is launched there."""


def time_operators(
    execution: Execution,
    optimizer: torch.optim.Optimizer | None,
    next_leaves: Callable[[], Sequence[torch.Tensor]],
    device: torch.device,
) -> dict[str, OperatorTime]:
    """What each operator takes: the slowest rank's in each step, and the median of the steps.

    All ranks must call it together. The steps train as any others do.

    Args:
        execution: of a plan, warm.
        optimizer: over its parameters; ``None`` where this rank has none.
        next_leaves: gives tensors of the next batch, as ``Execution.step`` takes them.
        device: where this rank computes.

    """
    clock = OperatorClock(len(execution.operators), device)
    readings = []
    with execution.timed(clock):
        for _ in range(STEPS):
            execution.step(next_leaves())
            execution.apply_gradients(optimizer)
            slowest = clock.read().to(device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            readings.append(slowest.cpu())
    usual = torch.stack(readings[1:]).median(0).values
    return {
        name: OperatorTime(*(round(float(usual[place, column]), 6) for column in Column))
        for place, name in enumerate(execution.operators)
    }
