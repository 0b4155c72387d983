"""One sampler a node: system metrics over any window of time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perfsearch.metrics.gpu import GpuReader
from perfsearch.metrics.guard import Guard
from perfsearch.metrics.host import DISK_BUSY_S, HostReader
from perfsearch.metrics.nvlink import NvlinkReader

KEPT_SAMPLES = 4096
"""Above this the older half is thinned by joining neighbours, so that memory stays bounded."""

_SHORTEST_S = 0.01
"""Totals tick in hundredths of a second: rates over less say nothing."""

_FIRST_RATE_S = 0.05

_SLOW_EVERY = 4

_BY_INTERFACE = "interface/"
"""A network interface's own rates; beside their sum they say something where there are several."""


@dataclass(frozen=True)
class Sample:
    """What was read at one moment.

    Attributes:
        since_s: the sample before it, on the monotonic clock.
        time_s: when it was taken, on the monotonic clock.
        instant: values of that moment.
        interval: means over the time from ``since_s`` to ``time_s``.

    """

    since_s: float
    time_s: float
    instant: dict[str, float] = field(default_factory=dict)
    interval: dict[str, float] = field(default_factory=dict)


class SystemSampler:
    """Samples a node in a thread of its own; any thread may ask for the means of a window.

    Args:
        interval_s: time between samples.
        device_uuids: the job's GPUs; ``None`` goes by ``CUDA_VISIBLE_DEVICES``.
        process_ids: processes whose trees are summed apart.
        node: rank of the node, the number in ``node_<int>``.
        clock: monotonic seconds, the clock of ``window``.

    """

    def __init__(
        self,
        interval_s: float = 0.5,
        device_uuids: Sequence[str] | None = None,
        process_ids: Sequence[int] = (),
        *,
        node: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if interval_s <= 0:
            raise ValueError(f"metrics.interval_s={interval_s}: must be above 0 seconds")
        self.interval_s = interval_s
        self.node = node
        self._guard = Guard()
        self._device_uuids = device_uuids
        self._host = HostReader(self._guard, process_ids)
        self._gpus: GpuReader | None = None
        self._nvlink: NvlinkReader | None = None
        self._clock = clock
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._samples: list[Sample] = []
        self._totals: tuple[float, dict[str, float]] | None = None
        self._count = 0

    @property
    def unsupported(self) -> dict[str, str]:
        """Readings that are not to be had here, with the reason."""
        return dict(self._guard.unsupported)

    def start(self) -> None:
        """Begin sampling."""
        if self._thread is not None:
            raise RuntimeError("the sampler is running already")
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="system-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End sampling; what was read stays available. Safe to call twice."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=max(5.0, 2 * self.interval_s))
            self._thread = None
        if self._nvlink is not None:
            self._nvlink.close()

    def watch(self, process_ids: Sequence[int]) -> None:
        """Sum the trees of these processes from now on."""
        with self._lock:
            self._host.watch(process_ids)

    def sample(self) -> float:
        """Take a sample now, whatever the interval, and return its time.

        Taken at both edges of a window it makes the window's rates exact.
        """
        with self._lock:
            return self._sample()

    def window(self, begin_monotonic: float, end_monotonic: float) -> dict[str, float]:
        """Mean values over a window of the clock's seconds, by MLflow key without ``system/``.

        Values of a moment are averaged over the samples inside; rates are weighted by how long
        their intervals overlap the window. A window shorter than the interval is served by a
        sample taken for it. What could not be read is left out.

        Raises:
            ValueError: the window ends before it begins.

        """
        if end_monotonic < begin_monotonic:
            raise ValueError(f"a window from {begin_monotonic} to {end_monotonic} ends too early")
        with self._lock:
            last = self._samples[-1].time_s if self._samples else float("-inf")
            if last < end_monotonic:
                self._sample()
            if not any(s.interval for s in self._samples):
                # Asked right after the start: rates need a second reading of the totals.
                time.sleep(_FIRST_RATE_S)
                self._sample()
            samples = list(self._samples)
        means = {**_instants(samples, begin_monotonic, end_monotonic)}
        means.update(_intervals(samples, begin_monotonic, end_monotonic))
        # two rates each
        several = sum(name.startswith(_BY_INTERFACE) for name in means) > 2
        node = {
            f"node_{self.node}/{name}": value
            for name, value in means.items()
            if several or not name.startswith(_BY_INTERFACE)
        }
        return {**node, **aggregates(node)}

    def series(self) -> list[dict[str, Any]]:
        """Every sample that is kept, oldest first: ``time_s``, ``node``, and each reading."""
        with self._lock:
            samples = list(self._samples)
        return [{"time_s": s.time_s, "node": self.node, **s.instant, **s.interval} for s in samples]

    def _run(self) -> None:
        due = self._clock()
        while not self._stop.is_set():
            self.sample()
            due = max(due + self.interval_s, self._clock())
            self._stop.wait(max(0.0, due - self._clock()))

    def _sample(self) -> float:
        if self._gpus is None or self._nvlink is None:
            # Opening NVML takes a while, so it is left to the first sample.
            self._gpus = GpuReader(self._device_uuids, self._guard)
            self._nvlink = NvlinkReader(self._gpus.devices, self._guard, self._clock)
        now = self._clock()
        if self._totals is not None and now - self._totals[0] < _SHORTEST_S:
            return now
        totals = self._host.counters()
        instant = {**self._host.instant(), **self._gpus.instant(), **self._nvlink.rates()}
        if self._count % _SLOW_EVERY == 0:
            instant.update(self._gpus.slow())
        self._count += 1
        since = now if self._totals is None else self._totals[0]
        interval = {} if self._totals is None else rates(self._totals[1], totals, now - since)
        self._totals = (now, totals)
        self._samples.append(Sample(since, now, instant, interval))
        if len(self._samples) > KEPT_SAMPLES:
            half = KEPT_SAMPLES // 2
            old = self._samples[:half]
            joined = [_join(a, b) for a, b in zip(old[::2], old[1::2], strict=True)]
            self._samples = joined + self._samples[half:]
        return now


def rates(
    before: Mapping[str, float], after: Mapping[str, float], seconds: float
) -> dict[str, float]:
    """Turn two readings of growing totals into rates.

    A total that is missing in one of them, or that went backwards (a counter was reset), gives no
    rate. Processor seconds become percentages: of all cores for the node, of one core for the
    job's processes, and what these are of all that is used.
    """
    deltas = {k: after[k] - before[k] for k in after if k in before and after[k] >= before[k]}
    found = {k: d / seconds for k, d in deltas.items() if not k.startswith("_")}
    total = deltas.get("_cpu_total_s", 0.0)
    if total > 0:
        for name, part in (
            ("cpu_utilization_percentage", "_cpu_busy_s"),
            ("cpu_iowait_percentage", "_cpu_iowait_s"),
        ):
            if part in deltas:
                found[name] = min(100.0, 100.0 * deltas[part] / total)
    busy = [d for name, d in deltas.items() if name.startswith(DISK_BUSY_S)]
    if busy:
        found["disk_busy_percentage"] = min(100.0, 100.0 * max(busy) / seconds)
    if "_process_cpu_s" in deltas:
        found["process_cpu_percentage"] = 100.0 * deltas["_process_cpu_s"] / seconds
        busy_s = deltas.get("_cpu_busy_s", 0.0)
        if busy_s > 0:
            share = 100.0 * deltas["_process_cpu_s"] / busy_s
            found["process_cpu_share_percentage"] = min(100.0, share)
    return found


_WORST = {
    "system_memory_available_megabytes": min,
    "memory_free_megabytes": min,
    "temperature_celsius": max,
}


def aggregates(nodes: Mapping[str, float]) -> dict[str, float]:
    """Values of the cluster from values of its nodes: means, but the least free memory and the
    highest temperature. Per-GPU values are taken together as ``gpu_<name>``, those of network
    interfaces are left out.
    """
    groups: dict[str, list[float]] = {}
    for key, value in nodes.items():
        _, _, name = key.partition("/")
        if name.startswith(_BY_INTERFACE):
            continue  # names of interfaces mean nothing beyond their node
        if name.startswith("gpu_"):
            name = "gpu_" + name.split("_", 2)[2]
        groups.setdefault(name, []).append(value)
    return {
        name: float(_WORST.get(name.removeprefix("gpu_"), _mean)(values))
        for name, values in groups.items()
    }


def merge_nodes(windows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """One mapping from the windows of several nodes' samplers, the aggregates made anew."""
    nodes = {k: v for window in windows for k, v in window.items() if k.startswith("node_")}
    return {**nodes, **aggregates(nodes)}


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def _instants(samples: Sequence[Sample], begin: float, end: float) -> dict[str, float]:
    inside: dict[str, list[float]] = {}
    nearest: dict[str, tuple[float, float]] = {}
    for sample in samples:
        distance = max(begin - sample.time_s, sample.time_s - end, 0.0)
        for name, value in sample.instant.items():
            if distance == 0.0:
                inside.setdefault(name, []).append(value)
            elif name not in nearest or distance < nearest[name][0]:
                nearest[name] = (distance, value)
    return {**{n: v for n, (_, v) in nearest.items()}, **{n: _mean(v) for n, v in inside.items()}}


def _intervals(samples: Sequence[Sample], begin: float, end: float) -> dict[str, float]:
    weighted: dict[str, list[tuple[float, float]]] = {}
    nearest: dict[str, tuple[float, float]] = {}
    for sample in samples:
        overlap = min(end, sample.time_s) - max(begin, sample.since_s)
        for name, value in sample.interval.items():
            if overlap > 0:
                weighted.setdefault(name, []).append((overlap, value))
            elif name not in nearest or -overlap < nearest[name][0]:
                nearest[name] = (-overlap, value)
    means = {
        name: sum(w * v for w, v in pairs) / sum(w for w, _ in pairs)
        for name, pairs in weighted.items()
    }
    return {**{n: v for n, (_, v) in nearest.items()}, **means}


def _join(first: Sample, second: Sample) -> Sample:
    """One sample for two neighbours: means, the intervals' weighted by their lengths."""
    begin, end = first.since_s, second.time_s
    middle = [first, second]
    return Sample(begin, end, _instants(middle, begin, end), _intervals(middle, begin, end))
