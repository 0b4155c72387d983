"""Memory that a process of this host may still take: the host's own, or less under a cgroup."""

from __future__ import annotations

from pathlib import Path


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
    if not membership.exists():
        return None
    headroom: list[float] = []
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names = ("memory.max", "memory.current", "inactive_file")
            roots = [cgroup_root, cgroup_root / "unified"]
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            roots = [cgroup_root / "memory"]
        else:
            continue
        for root in roots:
            headroom += _along(root, path, *names)
    return min(headroom) if headroom else None


def _along(root: Path, path: str, limit: str, usage: str, inactive: str) -> list[float]:
    """Headroom at each level from ``path`` up to ``root``; inside a container often the root."""
    found = []
    level = root / path.lstrip("/")
    for directory in [level, *level.parents]:
        if directory != root and root not in directory.parents:
            break
        if not ((directory / limit).exists() and (directory / usage).exists()):
            continue
        bound = (directory / limit).read_text().strip()
        if bound == "max" or int(bound) >= 1 << 60:
            continue
        used = int((directory / usage).read_text())
        statistics = directory / "memory.stat"
        pairs = statistics.read_text().split("\n") if statistics.exists() else []
        cache = next((int(p.split()[1]) for p in pairs if p.startswith(f"{inactive} ")), 0)
        found.append(float(max(0, int(bound) - max(0, used - cache))))
    return found
