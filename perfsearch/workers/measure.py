"""Time steps and their phases without waiting for the device inside the window."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from perfsearch.workers.settling import is_steady as is_steady
from perfsearch.workers.settling import steps_to_fill as steps_to_fill

LOADING = ("dataloader_next", "to_device")
PHASES = (*LOADING, "forward", "backward", "optimizer")


class Clock(ABC):
    """Points in time of one window, read as seconds once it is over."""

    def __init__(self) -> None:
        self._points: list[tuple[str, Any]] = []

    @abstractmethod
    def now(self) -> Any:
        """A point in time, to be understood by ``between``."""

    @abstractmethod
    def between(self, earlier: Any, later: Any) -> float:
        """Seconds from one point to another, the window being over."""

    @property
    def is_open(self) -> bool:
        """Whether the window has begun."""
        return bool(self._points)

    def mark(self, phase: str) -> None:
        """Note that ``phase`` ends here; ``step`` ends a step, ``start`` opens the window."""
        self._points.append((phase, self.now()))

    def read(self) -> tuple[list[float], dict[str, float]]:
        """Seconds of each step, and mean seconds a step of each phase."""
        steps, by_step = self.read_steps()
        totals: dict[str, float] = {}
        for phases in by_step:
            for phase, seconds in phases.items():
                totals[phase] = totals.get(phase, 0.0) + seconds
        return steps, {p: total / max(1, len(steps)) for p, total in totals.items()}

    def read_steps(self) -> tuple[list[float], list[dict[str, float]]]:
        """Seconds of each step, and of each phase in it."""
        steps: list[float] = []
        by_step: list[dict[str, float]] = []
        phases: dict[str, float] = {}
        step_start = previous = self._points[0][1]
        for phase, point in self._points[1:]:
            if phase == "step":
                steps.append(self.between(step_start, point))
                by_step.append(phases)
                step_start, phases = point, {}
            else:
                phases[phase] = phases.get(phase, 0.0) + self.between(previous, point)
            previous = point
        return steps, by_step


class HostClock(Clock):
    """Where operations end before the call returns."""

    def now(self) -> Any:
        """Seconds on the host."""
        return time.perf_counter()

    def between(self, earlier: Any, later: Any) -> float:
        """Seconds on the host."""
        return float(later - earlier)


class DeviceClock(Clock):
    """Where operations are queued: events on the current stream.

    So waiting for the loader is what the device waits for it: a batch that the host fetches while
    the device is at work costs the step nothing.
    """

    def now(self) -> Any:
        """An event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, earlier: Any, later: Any) -> float:
        """Seconds on the stream."""
        return float(earlier.elapsed_time(later)) / 1e3


def make_clock(device: torch.device) -> Clock:
    """The clock that fits ``device``."""
    return DeviceClock() if device.type == "cuda" else HostClock()


def synchronize(device: torch.device) -> None:
    """Wait for queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def slowest(values: list[float], device: torch.device) -> list[float]:
    """Elementwise maximum over ranks."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return [float(v) for v in tensor.tolist()]


def mean_over_ranks(values: torch.Tensor) -> list[float]:
    """Elementwise mean over ranks."""
    values = values.double()
    dist.all_reduce(values)
    return [float(v) / dist.get_world_size() for v in values.tolist()]


def reset_peaks(device: torch.device) -> None:
    """Forget how much memory was used before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.reset_accumulated_memory_stats(device)
        return
    # 5 resets the peak resident set (proc(5)); where there is no such file peaks are the process's
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")


def read_peaks(device: torch.device) -> dict[str, float | None]:
    """Peaks since ``reset_peaks`` in GiB: of the caching allocator, or the resident set."""
    if device.type == "cuda":
        return {
            "peak_allocated_gib": torch.cuda.max_memory_allocated(device) / 2**30,
            "peak_reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
            "allocator_retries": float(torch.cuda.memory_stats(device).get("num_alloc_retries", 0)),
        }
    return {"peak_allocated_gib": _peak_resident_gib(), "peak_reserved_gib": None}


def _peak_resident_gib() -> float:
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return float(line.split()[1]) / 2**20
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak) / (2**30 if sys.platform == "darwin" else 2**20)
