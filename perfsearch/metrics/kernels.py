"""What a device's own timeline says: how long it worked, and how long it only communicated.

Reads the Chrome trace that torch's profiler writes. Nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

Span = tuple[float, float]
"""Begin and end."""

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_COMMUNICATION = ("nccl", "rccl")


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
    busy = covered([*computing, *communicating])
    return DeviceTime(
        busy,
        covered(communicating),
        busy - covered(computing),
        len(computing) + len(communicating),
    )


def covered(spans: Iterable[Span]) -> float:
    """Length of the union of ``spans``."""
    total, end = 0.0, float("-inf")
    for begin, until in sorted(spans):
        if until > end:
            total += until - max(begin, end)
            end = until
    return total
