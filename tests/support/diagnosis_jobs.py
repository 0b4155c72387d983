"""Measurements of jobs with a known cause, and what is found of them."""

from __future__ import annotations

from typing import Any

from perfsearch.core.trial import Measurement
from perfsearch.metrics.diagnosis import diagnose
from perfsearch.metrics.thresholds import Thresholds

NO_OTHER = Thresholds(other=1.0)


def job(phases: dict[str, float] | None = None, **changes: Any) -> Measurement:
    """A job with steps of 100 ms whose passes were not seen, unless they are given."""
    return Measurement([0.1] * 10, 32, world_size=2, phases_ms=phases or {}, **changes)


def slow(rank: int, error_ms: float = 0.5, **excess_ms: float) -> dict[str, float]:
    """Evidence of one rank that takes longer, as phases on each rank give it."""
    found = {}
    for phase, excess in excess_ms.items():
        found[f"straggler_{phase}_excess_ms"] = excess
        found[f"straggler_{phase}_rank"] = float(rank)
        found[f"{phase}_error_ms"] = error_ms
    return found


def names(measurement: Measurement, limits: Thresholds | None = None) -> list[str]:
    return [finding.name for finding in diagnose(measurement, limits)]


def first(measurement: Measurement, limits: Thresholds | None = None):
    return diagnose(measurement, limits)[0]
