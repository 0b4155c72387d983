"""Step times, and how near a job comes to what its device can do."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from perfsearch.core.trial import Measurement


def step_time_summary(step_seconds: Sequence[float]) -> dict[str, float]:
    """Mean, percentiles and spread of the step times, by MLflow name below ``step_time/``.

    The coefficient of variation is a pure number, the others are milliseconds; without steps the
    summary is empty, with a single one it has no spread.
    """
    finite = [s for s in step_seconds if math.isfinite(s)]
    if not finite:
        return {}
    mean = statistics.fmean(finite)
    summary = {
        "mean_ms": mean * 1e3,
        "p50_ms": percentile(finite, 0.5) * 1e3,
        "p90_ms": percentile(finite, 0.9) * 1e3,
        "p99_ms": percentile(finite, 0.99) * 1e3,
    }
    if len(finite) > 1 and mean > 0:
        summary["cv"] = statistics.stdev(finite) / mean
    return summary


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics; ``share`` from 0 to 1.

    Raises:
        ValueError: there are no values.

    """
    if not values:
        raise ValueError("a percentile of no values")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def mfu_of(measurement: Measurement) -> float | None:
    """Model FLOP utilisation of a measurement; ``None`` without a count or a known peak."""
    stated = measurement.environment.get("peak_flops_per_s")
    if stated is None:
        devices = measurement.environment.get("devices") or [{}]
        precision = str(measurement.environment.get("precision", ""))
        stated = peak_flops(str(devices[0].get("name", "")), precision)
    if stated is None or measurement.flops_per_step is None:
        return None
    return model_flops_utilization(
        measurement.flops_per_step, measurement.step_time_s, measurement.world_size, float(stated)
    )


def model_flops_utilization(
    flops_per_step: float, step_seconds: float, devices: int, peak_flops_per_s: float
) -> float:
    """Share of the devices' peak, 0 to 1, that the model's own operations reach (MFU).

    Args:
        flops_per_step: operations of the model over all devices; recomputation does not count.
        step_seconds: time of the step.
        devices: number of devices.
        peak_flops_per_s: peak of one device.

    """
    return flops_per_step / step_seconds / devices / peak_flops_per_s


def peak_flops(device_name: str, precision: str) -> float | None:
    """Peak FLOP/s of a device; ``None`` for a device or precision that is not in the table.

    So it is for a MIG instance, which bears the name of the card and is only a part of it.

    Args:
        device_name: as the driver gives it, such as ``NVIDIA H100 80GB HBM3``.
        precision: ``bf16``, ``fp16``, ``tf32`` or ``fp32``.

    """
    words = device_name.replace("-", " ").lower().split()
    if "mig" in words:
        return None
    for name, by_precision in PEAK_FLOPS.items():
        if all(word in words for word in name.lower().split()):
            return by_precision.get(precision)
    return None


PEAK_FLOPS: dict[str, dict[str, float]] = {
    "H200 NVL": {"bf16": 835e12, "fp16": 835e12, "tf32": 417e12, "fp32": 60e12},
    "H200": {"bf16": 989e12, "fp16": 989e12, "tf32": 494e12, "fp32": 67e12},
    "H100 NVL": {"bf16": 835e12, "fp16": 835e12, "tf32": 417e12, "fp32": 60e12},
    "H100 PCIe": {"bf16": 756e12, "fp16": 756e12, "tf32": 378e12, "fp32": 51e12},
    "H100": {"bf16": 989e12, "fp16": 989e12, "tf32": 494e12, "fp32": 67e12},
    "B200": {"bf16": 2250e12, "fp16": 2250e12, "tf32": 1125e12},
    "A100": {"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12},
    "L40S": {"bf16": 362e12, "fp16": 362e12, "tf32": 183e12, "fp32": 91.6e12},
    "L4": {"bf16": 121e12, "fp16": 121e12, "tf32": 60e12, "fp32": 30.3e12},
    "V100 PCIe": {"fp16": 112e12, "fp32": 14e12},
    "V100": {"fp16": 125e12, "fp32": 15.7e12},
    "T4": {"fp16": 65e12, "fp32": 8.1e12},
    "MI300X": {"bf16": 1307e12, "fp16": 1307e12, "tf32": 653e12, "fp32": 163e12},
}
"""Peak FLOP/s of one device without sparsity, from the vendors' data sheets (NVIDIA; MI300X: AMD).
H100 stands for the SXM board, V100 for its SXM2 board.
"""


# -----------------------------------------------------------------------------
# What a device's own timeline says: how long it worked, and how long it only communicated.
#
# Reads the Chrome trace that torch's profiler writes. Nothing here imports torch.


_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


_COMMUNICATION = ("nccl", "rccl")


Span = tuple[float, float]
"""Begin and end."""


@dataclass(frozen=True)
class DeviceTime:
    """A device's time over some steps, in milliseconds.

    Attributes:
        busy_ms: at least one kernel or copy runs.
        communication_ms: at least one collective's kernel runs; waiting for peers counts.
        exposed_ms: collectives run and nothing else does.
        kernels: number of kernels and copies.

    """

    busy_ms: float
    communication_ms: float
    exposed_ms: float
    kernels: int

    def per_step(self, steps: int) -> DeviceTime:
        """The same for one of ``steps`` steps."""
        return DeviceTime(
            self.busy_ms / steps,
            self.communication_ms / steps,
            self.exposed_ms / steps,
            self.kernels // steps,
        )


def device_time(trace: Path, after_read: bool = False) -> DeviceTime | None:
    """Read a trace of one process; ``None`` where it shows nothing of a device.

    Args:
        trace: torch's profiler's.
        after_read: leave out all that began before the host first read something from the device,
            as ranks do when they have waited for one another.

    Raises:
        OSError, ValueError: it cannot be read.

    """
    events = json.loads(trace.read_text())["traceEvents"]
    events = [e for e in events if e.get("cat") in _ON_DEVICE and "dur" in e]
    reads = (float(e["ts"]) + float(e["dur"]) for e in events if "DtoH" in str(e["name"]))
    first = min(reads, default=float("-inf")) if after_read else float("-inf")
    computing: list[Span] = []
    communicating: list[Span] = []
    for event in events:
        if float(event["ts"]) < first:
            continue
        span = (float(event["ts"]) / 1e3, (float(event["ts"]) + float(event["dur"])) / 1e3)
        collective = any(word in str(event["name"]).lower() for word in _COMMUNICATION)
        (communicating if collective else computing).append(span)
    if not computing and not communicating:
        return None
    busy = union_length([*computing, *communicating])
    return DeviceTime(
        busy,
        union_length(communicating),
        busy - union_length(computing),
        len(computing) + len(communicating),
    )


def union_length(spans: Iterable[Span]) -> float:
    """Length of the union of ``spans``."""
    total, end = 0.0, float("-inf")
    for begin, until in sorted(spans):
        if until > end:
            total += until - max(begin, end)
            end = until
    return total
