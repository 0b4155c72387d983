"""The control groups that this process is in with those that it starts, and their memory.

Both versions are read. A group's directory lies below the mount by the path in
``/proc/self/cgroup``; inside a container that path often is the host's, and the mount itself is the
container's group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")

MEMBERSHIP = Path("/proc/self/cgroup")

_UNLIMITED = 1 << 60
"""Version 1 writes the largest number of pages where there is no limit."""


@dataclass(frozen=True)
class MemoryFiles:
    """Names of a version's files.

    Attributes:
        limit: bytes that the group may take.
        usage: bytes that it takes.
        peak: the most that it took.
        events: where the kernel counts processes that it ended.
        inactive: page cache in ``memory.stat`` that the kernel gives back.

    """

    limit: str
    usage: str
    peak: str
    events: str
    inactive: str


_SECOND = MemoryFiles(
    "memory.max", "memory.current", "memory.peak", "memory.events", "inactive_file"
)

_FIRST = MemoryFiles(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "memory.max_usage_in_bytes",
    "memory.oom_control",
    "total_inactive_file",
)


def memory_groups(
    mount: Path = MOUNT, membership: Path = MEMBERSHIP
) -> Iterator[tuple[Path, MemoryFiles]]:
    """The groups that account for memory, from this process's own up, with their files' names."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            roots, files = [mount, mount / "unified"], _SECOND
        elif "memory" in controllers.split(","):
            roots, files = [mount / "memory"], _FIRST
        else:
            continue
        for root in roots:
            level = root / path.lstrip("/")
            for directory in (level, *level.parents):
                if directory == root or root in directory.parents:
                    yield directory, files


def number(file: Path, name: str = "") -> int | None:
    """A file's number, or that of a line ``NAME NUMBER`` in it; ``None`` where there is none."""
    try:
        text = file.read_text()
    except OSError:
        return None
    for line in text.splitlines():
        key, _, value = line.rpartition(" ")
        if key.strip() == name and value.strip().isdigit():
            return int(value)
    return None


def limit(directory: Path, files: MemoryFiles) -> int | None:
    """Bytes that a group may take; ``None`` where it has no limit."""
    bound = number(directory / files.limit)
    return None if bound is None or bound >= _UNLIMITED else bound


@dataclass(frozen=True)
class KernelMemory:
    """What the kernel says of memory, to be compared with what it said before.

    Attributes:
        kills: processes that its OOM killer has ended so far, by where that is counted: this
            process's groups, and ``/proc/vmstat`` for the whole host.
        peak: the most bytes that the tightest limited group took, where that is known.
        limit: its limit, if any group has one.

    """

    kills: dict[str, int] = field(default_factory=dict)
    peak: int | None = None
    limit: int | None = None

    @classmethod
    def read(
        cls,
        mount: Path = MOUNT,
        membership: Path = MEMBERSHIP,
        vmstat: Path = Path("/proc/vmstat"),
    ) -> KernelMemory:
        """Read it as it is now."""
        groups = list(memory_groups(mount, membership))
        counts = {str(d / f.events): number(d / f.events, "oom_kill") for d, f in groups}
        counts[str(vmstat)] = number(vmstat, "oom_kill")
        limited = [(bound, d, f) for d, f in groups if (bound := limit(d, f)) is not None]
        kills = {place: count for place, count in counts.items() if count is not None}
        if not limited:
            return cls(kills)
        bound, directory, files = min(limited, key=lambda group: group[0])
        peak = number(directory / files.peak)
        return cls(kills, number(directory / files.usage) if peak is None else peak, bound)

    def kills_since(self, before: KernelMemory) -> int:
        """Processes that were ended since; the same one is counted in several places."""
        new = [count - before.kills.get(place, count) for place, count in self.kills.items()]
        return max(0, *new) if new else 0

    def __str__(self) -> str:
        """Peak and limit in words; empty without a limit."""
        if self.limit is None:
            return ""
        peak = "" if self.peak is None else f"peak {self.peak / 1024**3:.2f} GiB, "
        return f"{peak}limit of its control group {self.limit / 1024**3:.2f} GiB"
