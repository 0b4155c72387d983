"""The phases of a window's steps, as one rank saw them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def phases_of(
    seconds: Sequence[float], by_step: Sequence[dict[str, float]]
) -> tuple[dict[str, float], dict[str, float]]:
    """Mean milliseconds a step of each phase, and what is known of them.

    Args:
        seconds: of each step.
        by_step: of each phase in it.

    Returns:
        The phases, and evidence: ``PHASE_error_ms``, the standard error of each where there is more
        than one step, and ``phases_step_ms``, this rank's mean step, to which phases sum at most.

    """
    phases_ms, evidence = {}, {"phases_step_ms": statistics.fmean(seconds) * 1e3}
    for name in dict.fromkeys(name for phases in by_step for name in phases):
        spent = [phases.get(name, 0.0) * 1e3 for phases in by_step]
        phases_ms[name] = statistics.fmean(spent)
        if len(spent) > 1:
            evidence[f"{name}_error_ms"] = statistics.stdev(spent) / math.sqrt(len(spent))
    return phases_ms, evidence


def least_wait(by_step: Sequence[dict[str, float]], device: torch.device) -> dict[str, float]:
    """How long the rank that comes last to each step's communication waits: ``comm_least_ms``.

    Every rank must call it; empty where steps do not say how long they wait, on all ranks alike.
    """
    from perfsearch.workers import measure

    waits = [phases["comm_exposed"] for phases in by_step if "comm_exposed" in phases]
    if not waits or len(waits) < len(by_step):
        return {}
    least = measure.slowest([-wait for wait in waits], device)
    return {"comm_least_ms": -statistics.fmean(least) * 1e3}
