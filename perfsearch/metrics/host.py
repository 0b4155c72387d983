"""Readings of the host: processor, memory, disks, networks."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perfsearch.metrics.guard import Guard
from perfsearch.metrics.host_memory import available_bytes

MEGA = 1e6

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
