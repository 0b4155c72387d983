"""When the rules of the diagnosis fire. A file of its own, as every command reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from perfsearch.core.option import option


def _share(default: float) -> Any:
    return option(default, low=0, high=1)


def _percent(default: float) -> Any:
    return option(default, low=0, high=100)


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
        uneven: what slow steps take longer than others, of the time of all.
        compute: share in which the devices compute; where that was not seen their utilisation, and
            without a GPU the share of forward and backward.

    """

    reserved_memory: float = _share(0.95)
    input_moderate: float = _share(0.05)
    input_high: float = _share(0.20)
    cpu_busy_percent: float = _percent(90.0)
    iowait_percent: float = _percent(30.0)
    disk_busy_percent: float = _percent(90.0)
    network_megabytes_per_s: float = option(50.0, above=0)
    to_device: float = _share(0.05)
    straggler_excess: float = _share(0.05)
    comm_moderate: float = _share(0.10)
    comm_high: float = _share(0.25)
    device_busy: float = _share(0.80)
    sync_wait: float = _share(0.05)
    optimizer: float = _share(0.15)
    other: float = _share(0.10)
    uneven: float = _share(0.20)
    compute: float = _share(0.90)

    def __post_init__(self) -> None:
        for name in ("input", "comm"):
            moderate, high = getattr(self, f"{name}_moderate"), getattr(self, f"{name}_high")
            if moderate > high:
                raise ValueError(
                    f"metrics.thresholds.{name}_moderate={moderate:g}: allowed is at most "
                    f"{name}_high={high:g}. Lower the one or raise the other."
                )
