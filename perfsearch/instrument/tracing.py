"""A Chrome trace of a few steps of a script, by torch's profiler."""

from __future__ import annotations

import gzip
import shutil
import tempfile
from pathlib import Path

import torch

from perfsearch.metrics.guard import Guard
from perfsearch.workers import measure

_WHAT = "profiler"


class Trace:
    """Runs torch's profiler from now until it is stopped; a profiler that fails is no failure.

    Args:
        file: where the trace goes, compressed.
        device: that the script uses.
        steps: to be traced.

    Attributes:
        left: steps that are still to be made.

    """

    def __init__(self, file: Path, device: torch.device, steps: int) -> None:
        from torch.profiler import ProfilerActivity, profile

        self.left = steps
        self._file = file
        self._device = device
        self._guard = Guard()
        activities = [ProfilerActivity.CPU]
        activities += [ProfilerActivity.CUDA] if device.type == "cuda" else []
        self._profiler = profile(activities=activities)
        self._guard.read(_WHAT, self._profiler.start)

    def stop(self) -> str:
        """Write what was seen; why there is nothing, or empty."""
        measure.synchronize(self._device)
        if not self._guard.unsupported:
            self._guard.read(_WHAT, self._write)
        return self._guard.unsupported.get(_WHAT, "")

    def _write(self) -> None:
        self._profiler.stop()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as directory:
            plain = Path(directory) / "trace.json"
            self._profiler.export_chrome_trace(str(plain))
            with plain.open("rb") as source, gzip.open(self._file, "wb") as target:
                shutil.copyfileobj(source, target)
