"""What a diagnosis is made of: facts of a measurement, thresholds, findings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from perfsearch.core.trial import Measurement

PASSES = ("forward", "backward")
"""Phases in which a rank computes."""


class Severity(StrEnum):
    """How much a finding costs."""

    HIGH = "high"
    MODERATE = "moderate"
    INFO = "info"


@dataclass(frozen=True)
class Thresholds:
    """When a rule fires. Shares are of the mean step time, from 0 to 1.

    Attributes:
        reserved_memory: share of the device's memory that is reserved at the peak.
        input_moderate: waiting for the next batch.
        input_high: the same, when it is called high.
        cpu_busy_percent: processor use above which preprocessing is what the loader waits for.
        iowait_percent: time waiting for disks, over all processors, above which they are.
        disk_busy_percent: share of the time in which the busiest disk works above which it is,
            while anything is read.
        network_megabytes_per_s: received a second above which remote storage may be.
        to_device: copying the batch to the device.
        straggler_excess: what the slowest rank takes longer than the mean of the others.
        comm_moderate: communication that nothing overlaps, or waiting for one another.
        comm_high: the same, when it is called high.
        device_busy: share of the step in which the device works, or waits for something that is
            named, below which launching limits; high where twice as much is missing.
        sync_wait: waiting for values to come back from the device.
        optimizer: the optimizer's step.
        other: what is neither loading, a pass nor the optimizer; high from twice as much on.
        uneven: what long steps add to the mean step, of the mean.
        compute: share in which the devices compute; where that was not seen their utilisation, and
            without a GPU the share of forward and backward.

    """

    reserved_memory: float = 0.95
    input_moderate: float = 0.05
    input_high: float = 0.20
    cpu_busy_percent: float = 90.0
    iowait_percent: float = 30.0
    disk_busy_percent: float = 90.0
    network_megabytes_per_s: float = 50.0
    to_device: float = 0.05
    straggler_excess: float = 0.05
    comm_moderate: float = 0.10
    comm_high: float = 0.25
    device_busy: float = 0.80
    sync_wait: float = 0.05
    optimizer: float = 0.15
    other: float = 0.10
    uneven: float = 0.20
    compute: float = 0.90


@dataclass(frozen=True)
class Finding:
    """One thing that holds the job back.

    Attributes:
        name: short and stable, for tags.
        severity: how much it costs.
        evidence: what was measured, in numbers.
        advice: what to do.
        share: part of the step that it takes, from 0 to 1, where it is a part.

    """

    name: str
    severity: Severity
    evidence: str
    advice: str
    share: float | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.severity}): {self.evidence}. {self.advice}"


@dataclass(frozen=True)
class Facts:
    """A measurement as the rules read it."""

    measurement: Measurement
    limits: Thresholds
    step_ms: float
    evidence: Mapping[str, float] = field(default_factory=dict)

    def phase_ms(self, name: str) -> float:
        """Milliseconds a step of a phase; 0 where it was not seen."""
        return self.measurement.phases_ms.get(name, 0.0)

    def share(self, *phases: str) -> float:
        """Part of the step that phases take together."""
        return sum(self.phase_ms(p) for p in phases) / self.step_ms

    def system(self, name: str) -> float | None:
        """A system metric of the whole cluster."""
        return self.measurement.system.get(name)

    def above(self, name: str, limit: float) -> bool:
        """Whether a system metric is known and above ``limit``."""
        value = self.system(name)
        return value is not None and value > limit

    def said(self, *phases: str) -> str:
        """What phases cost together, in words."""
        return self.said_ms(sum(self.phase_ms(p) for p in phases))

    def said_ms(self, ms: float) -> str:
        """Milliseconds of a step, in words."""
        return f"{ms:.2f} ms of a {self.step_ms:.2f} ms step ({ms / self.step_ms:.0%})"


def saved_ms(evidence: Mapping[str, float], part: str) -> tuple[float, float] | None:
    """What steps took less without a part, and two standard errors of that; ``None``: unknown."""
    names = ("with_everything", f"without_{part}")
    if any(f"{name}_ms" not in evidence for name in names):
        return None
    whole, left = (evidence[f"{name}_ms"] for name in names)
    return whole - left, 2 * math.hypot(*(evidence.get(f"{name}_error_ms", 0.0) for name in names))
