from __future__ import annotations

import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from perfsearch.metrics.reading import Guard
from perfsearch.metrics.slow_steps import THROTTLED
from perfsearch.metrics.system import HostReader, cgroup_headroom_bytes, rates

MIB = 1024**2


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def disk(ios: int, size: int) -> SimpleNamespace:
    return SimpleNamespace(read_count=ios, write_count=ios, read_bytes=size, write_bytes=2 * size)


def net(received: int, sent: int) -> SimpleNamespace:
    return SimpleNamespace(bytes_recv=received, bytes_sent=sent)


def test_disks_are_counted_once_though_raid_and_partitions_repeat_them(tmp_path, monkeypatch):
    names = ["nvme0n1", "nvme1n1", "nvme0n1p1", "md0", "dm-0", "loop1"]
    monkeypatch.setattr(
        psutil, "disk_io_counters", lambda perdisk: {n: disk(10, 1_000_000) for n in names}
    )
    for name in ("nvme0n1", "nvme1n1", "md0", "dm-0", "loop1"):
        (tmp_path / "block" / name).mkdir(parents=True)
    values = HostReader(Guard(), sys_root=tmp_path).counters()
    assert values["disk_iops"] == 40
    assert values["disk_read_megabytes_per_s"] == 2.0
    assert values["disk_write_megabytes_per_s"] == 4.0


def test_the_busiest_disk_is_told(monkeypatch):
    """Of two disks one works nearly all the time; where no disk tells, nothing is said."""

    def read(**busy_ms):
        disks = {n: SimpleNamespace(**vars(disk(1, 0)), busy_time=ms) for n, ms in busy_ms.items()}
        monkeypatch.setattr(psutil, "disk_io_counters", lambda perdisk: disks)
        return HostReader(Guard(), sys_root=Path("/nowhere")).counters()

    before = read(sda=1000, sdb=500)
    found = rates(before, read(sda=2900, sdb=510), 2.0)
    assert found["disk_busy_percentage"] == pytest.approx(95.0)
    monkeypatch.setattr(psutil, "disk_io_counters", lambda perdisk: {"sda": disk(1, 0)})
    silent = HostReader(Guard(), sys_root=Path("/nowhere")).counters()
    assert "disk_busy_percentage" not in rates(silent, silent, 2.0)


def test_without_sysfs_partitions_are_left_out_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(
        psutil, "disk_io_counters", lambda perdisk: {n: disk(1, 0) for n in ("sda", "sda1", "sdb")}
    )
    assert HostReader(Guard(), sys_root=tmp_path).counters()["disk_iops"] == 4


def test_no_disk_counters_is_named_and_ends_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "disk_io_counters", lambda perdisk: None)
    guard = Guard()
    values = HostReader(guard, sys_root=tmp_path).counters()
    assert "disk" in guard.unsupported
    assert not any(name.startswith("disk") for name in values)
    assert "_cpu_total_s" in values


def test_loopback_and_bonds_are_kept_out_of_the_network(tmp_path, monkeypatch):
    links = {"lo": net(9, 7_000_000), "eth0": net(3_000_000, 1_000_000), "bond0": net(3, 1)}
    monkeypatch.setattr(psutil, "net_io_counters", lambda pernic: links)
    (tmp_path / "class/net/eth0/device").mkdir(parents=True)
    values = HostReader(Guard(), sys_root=tmp_path).counters()
    assert values["network_receive_megabytes_per_s"] == 3.0
    assert values["network_transmit_megabytes_per_s"] == 1.0
    assert values["network_loopback_megabytes_per_s"] == 7.0
    assert values["interface/eth0/receive_megabytes_per_s"] == 3.0
    assert "interface/bond0/receive_megabytes_per_s" not in values


def test_a_quota_holds_back_by_what_the_own_group_counts(tmp_path):
    """python/cpython#80235"""
    sys_root, proc_root = tmp_path / "sys", tmp_path / "proc"
    write(proc_root / "self/cgroup", "0::/job\n")

    def read(throttled_us):
        write(sys_root / "fs/cgroup/job/cpu.stat", f"throttled_usec {throttled_us}\n")
        return HostReader(Guard(), sys_root=sys_root, proc_root=proc_root).counters()

    found = rates(read(1_000_000), read(1_500_000), 2.0)
    assert found[THROTTLED] == pytest.approx(25.0)
    (sys_root / "fs/cgroup/job/cpu.stat").unlink()
    without = HostReader(Guard(), sys_root=sys_root, proc_root=proc_root).counters()
    assert THROTTLED not in rates(without, without, 2.0)


def test_infiniband_counts_words_of_four_bytes(tmp_path):
    for device in ("mlx5_0", "mlx5_1"):
        counters = tmp_path / "class/infiniband" / device / "ports/1/counters"
        write(counters / "port_rcv_data", "1000000\n")
        write(counters / "port_xmit_data", "500000\n")
    values = HostReader(Guard(), sys_root=tmp_path).counters()
    assert values["infiniband_receive_megabytes_per_s"] == 8.0
    assert values["infiniband_transmit_megabytes_per_s"] == 4.0


def test_version_2_limit_of_a_parent_group_counts(tmp_path):
    """giampaolo/psutil#2100: in a container the group's limit bounds what is available."""
    write(tmp_path / "self", "0::/job/step\n")
    for level, limit in (("job", 100 * MIB), ("job/step", "max")):
        write(tmp_path / "fs" / level / "memory.max", f"{limit}\n")
        write(tmp_path / "fs" / level / "memory.current", f"{70 * MIB}\n")
        write(tmp_path / "fs" / level / "memory.stat", f"anon 1\ninactive_file {20 * MIB}\n")
    assert cgroup_headroom_bytes(tmp_path / "fs", tmp_path / "self") == 50 * MIB


def test_version_1_limit_counts_and_the_huge_number_means_none(tmp_path):
    write(tmp_path / "self", "4:memory:/box\n0::/\n")
    write(tmp_path / "fs/memory/box/memory.limit_in_bytes", str(64 * MIB))
    write(tmp_path / "fs/memory/box/memory.usage_in_bytes", str(16 * MIB))
    assert cgroup_headroom_bytes(tmp_path / "fs", tmp_path / "self") == 48 * MIB
    write(tmp_path / "fs/memory/box/memory.limit_in_bytes", str(2**63 - 4096))
    assert cgroup_headroom_bytes(tmp_path / "fs", tmp_path / "self") is None


def test_available_memory_is_the_smaller_of_host_and_group(tmp_path):
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    write(tmp_path / "sys/fs/cgroup/memory.max", str(10 * MIB))
    write(tmp_path / "sys/fs/cgroup/memory.current", str(4 * MIB))
    reader = HostReader(Guard(), sys_root=tmp_path / "sys", proc_root=tmp_path / "proc")
    assert reader.instant()["system_memory_available_megabytes"] == pytest.approx(6 * MIB / 1e6)


def test_an_idle_machine_has_a_rate_too(monkeypatch):
    """Nothing but idle time grew; what was left of a sum of floats would have shrunk."""
    times = {"user": 91525.13, "nice": 77936.67, "system": 60887.43, "iowait": 70070.71}
    fields = namedtuple("fields", [*times, "idle"])  # as psutil gives them
    idle = iter([89959.7, 89959.75])
    monkeypatch.setattr(psutil, "cpu_times", lambda: fields(**times, idle=next(idle)))
    reader = HostReader(Guard())
    before, after = reader.counters(), reader.counters()
    assert rates(before, after, 0.05)["cpu_utilization_percentage"] == 0.0


@pytest.mark.parametrize(
    ("allowed", "expected"), [({1}, 100.0), ({0, 1}, 50.0), (set(range(4)), 25.0), ({9}, 25.0)]
)
def test_processors_that_the_job_may_not_use_are_left_out(monkeypatch, allowed, expected):
    """One of four is busy; a job that was given that one has nothing left."""
    fields = namedtuple("fields", ["user", "idle"])

    def times(percpu=False):
        every = [fields(now if n == 1 else 0.0, 0.0 if n == 1 else now) for n in range(4)]
        return every if percpu else fields(now, 3 * now)

    monkeypatch.setattr(psutil, "cpu_times", times)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed, raising=False)
    reader = HostReader(Guard())
    now = 10.0
    before = reader.counters()
    now = 12.0
    found = rates(before, reader.counters(), 2.0)
    assert found["cpu_utilization_percentage"] == pytest.approx(expected)


def test_a_process_that_was_just_started_is_in_the_next_reading():
    reader = HostReader(Guard(), process_ids=[os.getpid()])
    reader.counters()
    busy = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"
    child = subprocess.Popen(
        [sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        child.stdout.readline()
        assert reader.counters()["_process_cpu_s"] >= 0.19
    finally:
        child.kill()
        child.communicate()


class Tree:
    """Processes with the times that a test sets: own, and of children that were waited for."""

    def __init__(self, monkeypatch):
        self.times: dict[int, tuple[float, float]] = {}
        self.reader = HostReader(Guard(), process_ids=[1])
        monkeypatch.setattr(
            self.reader, "_processes", lambda: [self._process(p) for p in self.times]
        )

    def _process(self, pid):
        own, children = self.times[pid]
        times = SimpleNamespace(user=own, system=0.0, children_user=children, children_system=0.0)
        return SimpleNamespace(pid=pid, cpu_times=lambda: times)

    def read(self, **times):
        self.times = {int(name[1:]): value for name, value in times.items()}
        return self.reader.counters()["_process_cpu_s"]


def test_what_was_spent_before_the_first_reading_does_not_count(monkeypatch):
    tree = Tree(monkeypatch)
    assert tree.read(p1=(50.0, 90.0)) == 0.0
    assert tree.read(p1=(51.5, 90.0)) == pytest.approx(1.5)


def test_a_process_born_since_the_last_reading_counts_whole(monkeypatch):
    tree = Tree(monkeypatch)
    tree.read(p1=(5.0, 0.0))
    assert tree.read(p1=(5.0, 0.0), p2=(7.0, 0.5)) == pytest.approx(7.5)
    assert tree.read(p1=(5.0, 0.0), p2=(9.0, 0.5)) == pytest.approx(9.5)


def test_a_process_that_ended_counts_once(monkeypatch):
    tree = Tree(monkeypatch)
    tree.read(p1=(5.0, 0.0))
    tree.read(p1=(5.0, 0.0), p2=(7.0, 0.0))
    assert tree.read(p1=(5.0, 8.0)) == pytest.approx(8.0)  # one more second before it ended
    assert tree.read(p1=(5.0, 10.0)) == pytest.approx(10.0)  # born and ended between readings


def test_one_that_nobody_waited_for_takes_nothing_back(monkeypatch):
    tree = Tree(monkeypatch)
    tree.read(p1=(5.0, 0.0), p2=(7.0, 0.0))
    assert tree.read(p1=(6.0, 0.0)) == pytest.approx(1.0)


def test_other_trees_start_anew(monkeypatch):
    tree = Tree(monkeypatch)
    tree.read(p1=(5.0, 0.0))
    tree.reader.watch([2])
    assert tree.read(p2=(100.0, 0.0)) == 0.0


def test_processes_are_summed_and_one_that_is_gone_is_no_error():
    guard = Guard()
    reader = HostReader(guard, process_ids=[os.getpid(), 2**22 + 1])
    assert reader.instant()["process_memory_megabytes"] > 1
    assert reader.counters()["_process_cpu_s"] == 0.0
    assert guard.unsupported == {}
