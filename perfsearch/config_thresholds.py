"""The schema of ``metrics.thresholds``: the diagnosis's own thresholds, with their ranges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from perfsearch.config_options import option
from perfsearch.metrics.diagnosis import Thresholds


def _share(default: float) -> Any:
    return option(default, low=0, high=1)


def _percent(default: float) -> Any:
    return option(default, low=0, high=100)


@dataclass(frozen=True)
class ThresholdSettings(Thresholds):
    """When a rule of the diagnosis fires, checked; meanings and defaults are ``Thresholds``'."""

    reserved_memory: float = _share(Thresholds.reserved_memory)
    input_moderate: float = _share(Thresholds.input_moderate)
    input_high: float = _share(Thresholds.input_high)
    cpu_busy_percent: float = _percent(Thresholds.cpu_busy_percent)
    iowait_percent: float = _percent(Thresholds.iowait_percent)
    disk_busy_percent: float = _percent(Thresholds.disk_busy_percent)
    network_megabytes_per_s: float = option(Thresholds.network_megabytes_per_s, above=0)
    to_device: float = _share(Thresholds.to_device)
    straggler_excess: float = _share(Thresholds.straggler_excess)
    comm_moderate: float = _share(Thresholds.comm_moderate)
    comm_high: float = _share(Thresholds.comm_high)
    device_busy: float = _share(Thresholds.device_busy)
    sync_wait: float = _share(Thresholds.sync_wait)
    optimizer: float = _share(Thresholds.optimizer)
    other: float = _share(Thresholds.other)
    uneven: float = _share(Thresholds.uneven)
    compute: float = _share(Thresholds.compute)

    def __post_init__(self) -> None:
        for name in ("input", "comm"):
            moderate, high = getattr(self, f"{name}_moderate"), getattr(self, f"{name}_high")
            if moderate > high:
                raise ValueError(
                    f"metrics.thresholds.{name}_moderate={moderate:g}: allowed is at most "
                    f"{name}_high={high:g}. Lower the one or raise the other."
                )
