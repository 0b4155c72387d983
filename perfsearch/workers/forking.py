"""A process that has imported what takes long, and forks launchers from what it has in hand."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from perfsearch.workers import processes
from perfsearch.workers.messages import EXIT_FILE
from perfsearch.workers.watch import EXIT_ORPHANED

_ORPHAN_CHECK_S = 2.0
_PR_SET_CHILD_SUBREAPER = 36

Request = Mapping[str, Any]
"""A line on standard input: ``directory`` of a group, its ``environment``, the variables to
``unset``, the ``log``, and whatever ``run`` wants."""


def serve_forks(
    controller_pid: int,
    controller_started: float,
    run: Callable[[Request], int],
    prepare: Callable[[Request], None] = lambda request: None,
) -> int:
    """Fork for each line on standard input, until it closes or the controller is gone.

    Args:
        controller_pid: whose end ends this.
        controller_started: when that process was started.
        run: called in the fork; gives its exit code.
        prepare: called before the fork, which then begins with what that left.

    """
    _adopt_orphans()
    directories: dict[int, Path] = {}
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    unread = b""
    while True:
        ready, _, _ = select.select([0, wake_read], [], [], _ORPHAN_CHECK_S)
        if wake_read in ready:
            os.read(wake_read, 4096)
        _reap(directories)
        if not processes.is_alive(controller_pid, controller_started):
            return EXIT_ORPHANED
        if 0 not in ready:
            continue
        chunk = os.read(0, 65_536)
        if not chunk:
            return 0
        *lines, unread = (unread + chunk).split(b"\n")
        for line in lines:
            request = json.loads(line)
            prepare(request)
            pid = os.fork()
            if pid == 0:
                os.close(wake_read)
                os.close(wake_write)
                _become(request, run)
            directories[pid] = Path(request["directory"])
            answer = {"pid": pid, "started": processes.started_at(pid)}
            os.write(1, json.dumps(answer).encode() + b"\n")


def _become(request: Request, run: Callable[[Request], int]) -> NoReturn:
    """In the fork: a session, environment and log of its own, then ``run``; never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.environ.update(request["environment"])
        for name in request["unset"]:
            os.environ.pop(name, None)
        nothing = os.open(os.devnull, os.O_RDONLY)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        code = run(request)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # taking torch's modules down costs a second and frees nothing


def _reap(directories: dict[int, Path]) -> None:
    """Leave the exit code of each fork that ended where the controller looks for it."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        directory = directories.pop(pid, None)  # none of an orphan that was adopted
        if directory is not None and directory.exists():
            unfinished = directory / f"{EXIT_FILE}.tmp"
            unfinished.write_text(str(os.waitstatus_to_exitcode(status)))
            unfinished.rename(directory / EXIT_FILE)


def _adopt_orphans() -> None:
    """Become the parent of every descendant that loses its own, so that none gets out of sight.

    One that has also lost its environment could not be found by the group's token.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
