"""Where a result comes from: code, versions, hardware."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perfsearch.core.version import version
from perfsearch.metrics import gpu

_PACKAGES = ("torch", "numpy", "nevergrad", "scikit-learn", "hydra-core", "mlflow", "deepspeed")
_NCCL_PREFIX = "nvidia-nccl-"
_GIT_TIMEOUT_S = 10


def provenance(
    directory: Path | None = None, device_uuids: Sequence[str] | None = None
) -> dict[str, Any]:
    """What is needed to judge, and to repeat, a result. What is not known is left out.

    Args:
        directory: the user's code, whose commit is looked up; the current directory.
        device_uuids: the job's GPUs; ``None`` goes by ``CUDA_VISIBLE_DEVICES``.

    Returns:
        Plain values: ``perfsearch``, ``versions``, ``host``, ``devices``, ``driver``, and ``code``
        with ``commit`` and ``dirty``. No environment variable and no command line is in it.

    """
    seen = gpu.environment(device_uuids)
    found: dict[str, Any] = {
        "perfsearch": version(),
        "versions": versions(),
        "host": {
            "name": platform.node(),
            "system": platform.platform(),
            "python": platform.python_version(),
            "cpus": _cpus(),
        },
        "devices": [
            {k: d[k] for k in ("uuid", "name", "index", "mig") if k in d} for d in seen["devices"]
        ],
    }
    if "driver" in seen:
        found["driver"] = seen["driver"]
    code = commit(directory or Path.cwd())
    if code:
        found["code"] = dict(code)
    return found


def versions() -> dict[str, str]:
    """Installed versions of what decides speed and results."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"] or ""
        if name.startswith(_NCCL_PREFIX):
            found["nccl"] = distribution.version
    return found


def commit(directory: Path) -> Mapping[str, Any]:
    """Commit of the repository around ``directory`` and whether files differ from it.

    Empty outside of a repository, before its first commit, and without git.
    """
    head = _git(directory, "rev-parse", "HEAD")
    if head is None:
        return {}
    changes = _git(directory, "status", "--porcelain", "--untracked-files=no")
    return {"commit": head, "dirty": None if changes is None else bool(changes)}


def _git(directory: Path, *arguments: str) -> str | None:
    program = shutil.which("git")
    if program is None:
        return None
    try:
        result = subprocess.run(
            # Without optional locks a look at the state never disturbs the user's own git.
            [program, "--no-optional-locks", "-C", str(directory), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _cpus() -> int | None:
    import psutil

    count: int | None = psutil.cpu_count()
    return count
