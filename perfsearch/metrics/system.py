"""One sampler a node: system metrics over any window of time."""

from __future__ import annotations

import os
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfsearch.core import cgroup
from perfsearch.core.units import MEGA
from perfsearch.metrics.gpu import GpuReader, NvlinkReader
from perfsearch.metrics.reading import Guard
from perfsearch.metrics.slow_steps import THROTTLED

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
    if "_throttled_s" in deltas:  # each processor that is held back counts
        found[THROTTLED] = min(100.0, 100.0 * deltas["_throttled_s"] / seconds)
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
        name: float(_WORST.get(name.removeprefix("gpu_"), statistics.fmean)(values))
        for name, values in groups.items()
    }


def merge_nodes(windows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """One mapping from the windows of several nodes' samplers, the aggregates made anew."""
    nodes = {k: v for window in windows for k, v in window.items() if k.startswith("node_")}
    return {**nodes, **aggregates(nodes)}


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
    return {
        **{n: v for n, (_, v) in nearest.items()},
        **{n: statistics.fmean(v) for n, v in inside.items()},
    }


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


# -----------------------------------------------------------------------------
# Readings of the host: processor, memory, disks, networks.

DISK_BUSY_S = "_disk_busy_s/"
"""Before a disk's name: a total of the disk alone, of which the busiest one's rate is shown."""

_NOT_A_DISK = re.compile(r"^(dm-|md\d|loop|ram|zram|sr\d|fd\d|nbd|drbd|bcache)")
_BEHIND_ANOTHER = re.compile(
    r"^(bond|team|br-|docker|virbr|veth|vlan|ifb|tun|tap|cni|flannel|cali)"
)


class HostReader:
    """Reads the host, in values of the moment and in totals that grow.

    Args:
        guard: keeps what could not be read.
        process_ids: processes whose trees are summed apart.
        sys_root: where ``sysfs`` is mounted.
        proc_root: where ``procfs`` is mounted.

    """

    def __init__(
        self,
        guard: Guard,
        process_ids: Sequence[int] = (),
        sys_root: Path = Path("/sys"),
        proc_root: Path = Path("/proc"),
    ) -> None:
        self.guard = guard
        self.process_ids = tuple(process_ids)
        self._sys = sys_root
        self._proc = proc_root
        self._trees: dict[int, Any] = {}
        self._seen: set[int] = set()
        self._spent_s = 0.0
        self._last: dict[int, tuple[float, float]] | None = None

    def instant(self) -> dict[str, float]:
        """Values of this moment."""
        values: dict[str, float] = {}
        available = self.guard.read("system_memory_available_megabytes", self._available_bytes)
        if available is not None:
            values["system_memory_available_megabytes"] = available / MEGA
        if self.process_ids:
            resident = self.guard.read("process_memory_megabytes", self._resident_bytes)
            if resident is not None:
                values["process_memory_megabytes"] = resident / MEGA
        return values

    def counters(self) -> dict[str, float]:
        """Totals that grow, each under the name of the rate that it becomes."""
        values: dict[str, float] = {}
        for name, reading in (
            ("cpu_utilization_percentage", self._cpu),
            (THROTTLED, self._throttled),
            ("disk", self._disk),
            ("network", self._network),
            ("infiniband", self._infiniband),
        ):
            values.update(self.guard.read(name, reading) or {})
        if self.process_ids:
            values.update(self.guard.read("process_cpu_percentage", self._process_cpu) or {})
        return values

    def watch(self, process_ids: Sequence[int]) -> None:
        """Sum the trees of these processes from now on."""
        self.process_ids, self._trees, self._seen = tuple(process_ids), {}, set()
        self._last = None

    def _cpu(self) -> dict[str, float]:
        # Summed over processors by field; the fields differ between systems.
        fields: dict[str, float] = {}
        for times in _processor_times():
            for name, seconds in times._asdict().items():
                fields[name] = fields.get(name, 0.0) + seconds
        # Guest time is contained in user time, guest_nice in nice. Busy time is summed, not what is
        # left of the total: rounding would let it go backwards while a machine idles.
        waiting = fields.get("iowait", 0.0)
        not_busy = ("guest", "guest_nice", "idle", "iowait")
        busy = sum(v for k, v in fields.items() if k not in not_busy)
        totals = {"_cpu_total_s": busy + fields["idle"] + waiting, "_cpu_busy_s": busy}
        if "iowait" in fields:
            totals["_cpu_iowait_s"] = waiting
        return totals

    def _throttled(self) -> dict[str, float]:
        found = cgroup_throttled_s(self._sys / "fs/cgroup", self._proc / "self/cgroup")
        return {} if found is None else {"_throttled_s": found}

    def _disk(self) -> dict[str, float]:
        import psutil

        disks = psutil.disk_io_counters(perdisk=True)
        if not disks:
            raise OSError("the system shows no disk counters")
        block = self._sys / "block"
        listed = {p.name for p in block.iterdir()} if block.is_dir() else set()
        # Partitions, device mapper and RAID repeat the bytes of the disks that they lie on.
        whole = {n: c for n, c in disks.items() if n in listed and not _NOT_A_DISK.match(n)}
        if not whole:
            whole = {n: c for n, c in disks.items() if not _NOT_A_DISK.match(n)}
            whole = {n: c for n, c in whole.items() if not _is_partition(n, whole)}
        if not whole:
            raise OSError(f"no whole disk among {', '.join(sorted(disks))}")
        # How long each disk worked, which not every system tells.
        busy = {
            f"{DISK_BUSY_S}{n}": c.busy_time / 1e3
            for n, c in whole.items()
            if hasattr(c, "busy_time")
        }
        return {
            **busy,
            "disk_iops": float(sum(c.read_count + c.write_count for c in whole.values())),
            "disk_read_megabytes_per_s": sum(c.read_bytes for c in whole.values()) / MEGA,
            "disk_write_megabytes_per_s": sum(c.write_bytes for c in whole.values()) / MEGA,
        }

    def _network(self) -> dict[str, float]:
        import psutil

        links = psutil.net_io_counters(pernic=True) or {}
        loopback = {n: c for n, c in links.items() if n == "lo" or n.startswith("lo0")}
        rest = {n: c for n, c in links.items() if n not in loopback}
        # Bonds, bridges and virtual pairs repeat the bytes of the cards behind them.
        cards = {n: c for n, c in rest.items() if (self._sys / "class/net" / n / "device").exists()}
        chosen = cards or {n: c for n, c in rest.items() if not _BEHIND_ANOTHER.match(n)}
        values: dict[str, float] = {}
        for name, link in chosen.items():
            values[f"interface/{name}/receive_megabytes_per_s"] = link.bytes_recv / MEGA
            values[f"interface/{name}/transmit_megabytes_per_s"] = link.bytes_sent / MEGA
        if chosen:
            received = sum(c.bytes_recv for c in chosen.values())
            values["network_receive_megabytes_per_s"] = received / MEGA
            values["network_transmit_megabytes_per_s"] = (
                sum(c.bytes_sent for c in chosen.values()) / MEGA
            )
        else:
            self.guard.missing("network", "the system shows no interface but loopback")
        if loopback:
            sent = sum(c.bytes_sent for c in loopback.values())
            values["network_loopback_megabytes_per_s"] = sent / MEGA
        return values

    def _infiniband(self) -> dict[str, float]:
        ports = sorted((self._sys / "class/infiniband").glob("*/ports/*/counters"))
        totals: dict[str, float] = {}
        for port in ports:
            for word, file in (("receive", "port_rcv_data"), ("transmit", "port_xmit_data")):
                name = f"infiniband_{word}_megabytes_per_s"
                lanes = int((port / file).read_text())  # counted in words of four bytes
                totals[name] = totals.get(name, 0.0) + lanes * 4 / MEGA
        return totals

    def _available_bytes(self) -> float:
        return available_bytes(self._sys, self._proc)

    def _processes(self) -> list[Any]:
        """Processes of the trees now.

        Only of processes that are new since the last call the parent is read: ranks come and go
        between two readings, and a node may have thousands of processes.
        """
        import psutil

        now = set(psutil.pids())
        self._trees = {pid: process for pid, process in self._trees.items() if pid in now}
        parents: dict[int, tuple[int, Any]] = {}
        for pid in now - self._seen:
            try:
                process = psutil.Process(pid)
                parents[pid] = process.ppid(), process
            except psutil.Error:
                continue
        self._seen = now
        found = True
        while found:
            found = False
            for pid, (parent, process) in parents.items():
                if pid not in self._trees and (pid in self.process_ids or parent in self._trees):
                    self._trees[pid], found = process, True
        return list(self._trees.values())

    def _resident_bytes(self) -> float:
        import psutil

        total = 0.0
        for process in self._processes():
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return total

    def _process_cpu(self) -> dict[str, float]:
        """Processor seconds that the trees spent since they were watched.

        One that was born since the last reading counts with all that it spent. One that ended is
        in its parent's children, and counts with what it had not spent at the last reading.
        """
        import psutil

        now: dict[int, tuple[float, float]] = {}
        for process in self._processes():
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            children_s = times.children_user + times.children_system
            now[process.pid] = times.user + times.system, children_s
        if self._last is not None:
            before = self._last
            nothing = (0.0, 0.0)
            grown = [
                (
                    max(0.0, own - before.get(pid, nothing)[0]),
                    children - before.get(pid, nothing)[1],
                )
                for pid, (own, children) in now.items()
            ]
            ended_s = sum(sum(times) for pid, times in before.items() if pid not in now)
            reaped_s = sum(max(0.0, children) for _, children in grown)
            self._spent_s += sum(own for own, _ in grown) + max(0.0, reaped_s - ended_s)
        self._last = now
        return {"_process_cpu_s": self._spent_s}


def _processor_times() -> list[Any]:
    """Times of the node's processors, in one sum, or one by one of those that the job may use.

    A job that was given 8 processors of 128 (a cpuset, ``taskset``) has none left when these are
    busy.
    """
    import psutil

    if hasattr(os, "sched_getaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        if len(allowed) < (os.cpu_count() or 1):
            every = psutil.cpu_times(percpu=True)
            if allowed[-1] < len(every):  # else some are offline, and places are not numbers
                return [every[number] for number in allowed]
    return [psutil.cpu_times()]


def _is_partition(name: str, disks: dict[str, Any]) -> bool:
    return any(
        other != name and name.startswith(other) and re.fullmatch(r"p?\d+", name[len(other) :])
        for other in disks
    )


# -----------------------------------------------------------------------------
# Memory that a process of this host may still take: the host's own, or less under a cgroup.


def available_bytes(sys_root: Path = Path("/sys"), proc_root: Path = Path("/proc")) -> float:
    """Memory that this process may still take: the host's, or less under a cgroup's limit."""
    import psutil

    available = float(psutil.virtual_memory().available)
    headroom = cgroup_headroom_bytes(sys_root / "fs/cgroup", proc_root / "self/cgroup")
    return available if headroom is None else min(available, headroom)


def cgroup_headroom_bytes(cgroup_root: Path, membership: Path) -> float | None:
    """Bytes left under the tightest memory limit above this process; ``None`` without a limit.

    Reads version 2 (``memory.max``) and version 1 (``memory.limit_in_bytes``). Inactive page cache
    counts as free, as the kernel gives it back.
    """
    headroom: list[float] = []
    for directory, files in cgroup.memory_groups(cgroup_root, membership):
        bound = cgroup.limit(directory, files)
        used = cgroup.number(directory / files.usage)
        if bound is None or used is None:
            continue
        cache = cgroup.number(directory / "memory.stat", files.inactive) or 0
        headroom.append(float(max(0, bound - max(0, used - cache))))
    return min(headroom, default=None)


# -----------------------------------------------------------------------------
# Time in which a container's CPU quota was used up.


def cgroup_throttled_s(cgroup_root: Path, membership: Path) -> float | None:
    """Seconds for which processes were held back so far; ``None`` where there is no quota.

    Reads ``cpu.stat`` of version 2 (``throttled_usec``) and version 1 (``throttled_time``, in
    nanoseconds), of every group from this process's own up.
    """
    if not membership.exists():
        return None
    found: list[float] = []
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for root in (cgroup_root, cgroup_root / "unified", cgroup_root / "cpu"):
            level = root / path.lstrip("/")
            inside = [d for d in (level, *level.parents) if d == root or root in d.parents]
            found += [s for d in inside if (s := _throttled_s(d / "cpu.stat")) is not None]
    return max(found, default=None)


def _throttled_s(stat: Path) -> float | None:
    if not stat.exists():
        return None
    values = dict(line.split() for line in stat.read_text().splitlines() if line)
    if "throttled_usec" in values:
        return int(values["throttled_usec"]) / 1e6
    return int(values["throttled_time"]) / 1e9 if "throttled_time" in values else None
