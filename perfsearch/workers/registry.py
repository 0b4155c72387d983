"""A record of the groups that were started, so that a later start can end what is left of them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
from pathlib import Path

from perfsearch.workers import processes

_DIRECTORY = "groups"


def record(run_dir: Path, token: str, control_directory: Path) -> None:
    """Note a group before any of its processes is started."""
    directory = run_dir / _DIRECTORY
    directory.mkdir(parents=True, exist_ok=True)
    entry = {
        "token": token,
        "host": socket.gethostname(),
        "controller": [os.getpid(), processes.started_at(os.getpid())],
        "control_directory": str(control_directory),
    }
    unfinished = directory / f"{token}.tmp"
    unfinished.write_text(json.dumps(entry))
    unfinished.rename(directory / f"{token}.json")


def forget(run_dir: Path, token: str) -> None:
    """Strike a group that has ended; the last one takes the directory with it."""
    _remove(run_dir / _DIRECTORY / f"{token}.json")


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # others are in it, or it is gone
        path.parent.rmdir()


def reap(run_dir: Path, grace_s: float = 2.0) -> int:
    """End the processes that an earlier controller left behind; return how many there were.

    Processes are found by the token in their environment, so that a reused pid is never hit and
    one that was started just before the end is not missed.
    Groups of other hosts that share the directory, and those of another controller that is still
    alive, are left alone.
    """
    ended = 0
    for path in sorted((run_dir / _DIRECTORY).glob("*.json")):
        try:
            entry = json.loads(path.read_text())
            token, host = str(entry["token"]), str(entry["host"])
            control = Path(entry["control_directory"])
            pid, started = entry["controller"]
        except (ValueError, KeyError, TypeError):
            _remove(path)  # nothing can be learnt from it
            continue
        if host != socket.gethostname():
            continue
        if pid != os.getpid() and processes.is_alive(pid, started):
            continue
        ended += processes.end_all(token, grace_s)
        ours = control.parent in (Path(tempfile.gettempdir()), Path("/tmp"))
        if ours and control.name.startswith("perfsearch-"):
            shutil.rmtree(control, ignore_errors=True)
        forget(run_dir, token)
    return ended
