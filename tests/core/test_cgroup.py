"""What the kernel says of memory, in files as both versions of control groups have them."""

from pathlib import Path

import pytest

from perfsearch.core.cgroup import KernelMemory

GIB = 1024**3

EVENTS = "low 0\nhigh 0\nmax 173\noom 1\noom_kill {kills}\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n"


class Host:
    """Files of a host that were recorded while a job ran out of its group's memory."""

    def __init__(self, root: Path, membership: str) -> None:
        self.root = root
        self.write("proc/cgroup", membership)
        self.write("proc/vmstat", "nr_free_pages 81\noom_kill 7\n")

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def read(self) -> KernelMemory:
        proc = self.root / "proc"
        return KernelMemory.read(self.root / "cgroup", proc / "cgroup", proc / "vmstat")


def second(root: Path, place: str = "job/step") -> Host:
    host = Host(root, "0::/job/step\n")
    host.write(f"cgroup/{place}/memory.max", f"{4 * GIB}\n")
    host.write(f"cgroup/{place}/memory.current", f"{3 * GIB}\n")
    host.write(f"cgroup/{place}/memory.peak", f"{4 * GIB - 4096}\n")
    host.write(f"cgroup/{place}/memory.events", EVENTS.format(kills=2))
    return host


def first(root: Path) -> Host:
    host = Host(root, "4:memory:/slurm/job\n3:cpuset:/\n0::/\n")
    host.write("cgroup/memory/memory.oom_control", CONTROL.format(kills=0))
    host.write("cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    host.write("cgroup/memory/memory.usage_in_bytes", f"{9 * GIB}\n")
    host.write("cgroup/memory/slurm/job/memory.limit_in_bytes", f"{2 * GIB}\n")
    host.write("cgroup/memory/slurm/job/memory.usage_in_bytes", f"{GIB}\n")
    host.write("cgroup/memory/slurm/job/memory.max_usage_in_bytes", f"{2 * GIB}\n")
    host.write("cgroup/memory/slurm/job/memory.oom_control", CONTROL.format(kills=5))
    return host


def test_kills_in_the_jobs_own_group_of_version_2(tmp_path):
    """lzhxmu/CPPO#6: a process that the kernel killed in its container."""
    host = second(tmp_path)
    before = host.read()
    assert before.kills_since(before) == 0
    host.write("cgroup/job/step/memory.events", EVENTS.format(kills=3))
    after = host.read()
    assert after.kills_since(before) == 1
    assert str(after) == "peak 4.00 GiB, limit of its control group 4.00 GiB"


def test_kills_in_the_jobs_own_group_of_version_1_and_not_in_the_root(tmp_path):
    host = first(tmp_path)
    before = host.read()
    host.write("cgroup/memory/slurm/job/memory.oom_control", CONTROL.format(kills=6))
    after = host.read()
    assert after.kills_since(before) == 1
    assert (after.peak, after.limit) == (2 * GIB, 2 * GIB)


def test_a_container_sees_its_group_as_the_root(tmp_path):
    host = second(tmp_path, place=".")
    before = host.read()
    host.write("cgroup/memory.events", EVENTS.format(kills=4))
    assert host.read().kills_since(before) == 2


@pytest.mark.parametrize("make", [first, second])
def test_the_hosts_own_count_is_read_beside_it(tmp_path, make):
    host = make(tmp_path)
    before = host.read()
    host.write("proc/vmstat", "nr_free_pages 81\noom_kill 9\n")
    assert host.read().kills_since(before) == 2


def test_without_groups_and_counts_nothing_is_said(tmp_path):
    found = KernelMemory.read(tmp_path, tmp_path / "no", tmp_path / "none")
    assert (found.kills_since(found), str(found)) == (0, "")
    assert KernelMemory.read().kills_since(KernelMemory()) == 0  # this very host
