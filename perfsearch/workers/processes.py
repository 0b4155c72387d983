"""Find and end every process of a group, however far it has wandered."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shutil
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import psutil

from perfsearch.core.files import remove_left_directories, write_text
from perfsearch.workers.messages import TOKEN_VARIABLE

_KILL_ROUNDS = 50
_START_TIME_FIELD = 19  # of /proc/PID/stat, counted from the state that follows the name
_EXIT_CODE_FIELD = 49


def started_at(pid: int) -> float:
    """When the process ``pid`` was started: a number that tells it from a later one of that pid.

    On Linux in clock ticks since boot, which no change of the system's clock can move.

    Raises:
        psutil.NoSuchProcess: there is none.
        OSError: this process has no descriptor or memory left to look.

    """
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
        return float(after_name.split()[_START_TIME_FIELD])
    except (OSError, IndexError) as error:
        if isinstance(error, OSError) and error.errno in _CANNOT_LOOK:
            raise  # psutil's number is another one
        return float(psutil.Process(pid).create_time())


_CANNOT_LOOK = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def is_alive(pid: int, started: float) -> bool:
    """Whether the process that had ``pid`` when it was started at ``started`` still runs.

    Where this process has no descriptor left to look closer, any process of that pid counts:
    whoever watches another goes on watching.
    """
    try:
        return started_at(pid) == started and not _is_zombie(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False
    except OSError:
        return _is_there(pid)


def _is_there(pid: int) -> bool:
    """Whether some process has the number ``pid``, which takes no descriptor to tell."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno == errno.EPERM
    return True


def exit_code(pid: int, started: float) -> int | None:
    """How the process that had ``pid`` when it was started at ``started`` ended, negative for a
    signal, as long as its parent has not asked; ``None`` where it runs or that is not known.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] != "Z" or float(fields[_START_TIME_FIELD]) != started:
            return None
        return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE_FIELD]))
    except (OSError, IndexError, ValueError):
        return None


def members(token: str, exclude: Iterable[int] = ()) -> list[psutil.Process]:
    """Processes marked with ``token``, and their descendants, which may have lost the mark.

    Looking at environments finds those that were re-parented or opened their own session. The
    calling process is never among them.
    """
    left_out = {os.getpid(), *exclude}
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        if process.pid not in found and _marked(process, token):
            found[process.pid] = process
            for child in _children(process):
                found.setdefault(child.pid, child)
    return [p for pid, p in found.items() if pid not in left_out and not _is_zombie(p)]


def end_all(token: str, grace_s: float, exclude: Iterable[int] = ()) -> int:
    """End every member: SIGTERM, ``grace_s`` to comply, then SIGKILL until none is left.

    Returns:
        How many were found at first.

    """
    first = members(token, exclude)
    if grace_s > 0:
        for process in first:
            _send(process, "terminate")
        psutil.wait_procs(first, timeout=grace_s)
    for _ in range(_KILL_ROUNDS):
        left = members(token, exclude)
        if not left:
            break
        for process in left:
            _send(process, "kill")
        psutil.wait_procs(left, timeout=0.2)
        time.sleep(0.01)
    return len(first)


def _marked(process: psutil.Process, token: str) -> bool:
    try:
        return bool(process.environ().get(TOKEN_VARIABLE) == token)
    except (psutil.Error, OSError):
        return False


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.Error:
        return []


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return True


def _send(process: psutil.Process, signal_name: str) -> None:
    try:
        getattr(process, signal_name)()
    except psutil.NoSuchProcess:
        return


# -----------------------------------------------------------------------------
# A record of the groups that were started, so that a later start can end what is left of them.

_DIRECTORY = "groups"


def record_group(run_dir: Path, token: str, control_directory: Path) -> None:
    """Note a group before any of its processes is started."""
    entry = {
        "token": token,
        "host": socket.gethostname(),
        "controller": [os.getpid(), started_at(os.getpid())],
        "control_directory": str(control_directory),
    }
    write_text(run_dir / _DIRECTORY / f"{token}.json", json.dumps(entry))


def strike_directory(run_dir: Path, token: str) -> None:
    """Note that a group's directory is gone, while processes of it stay.

    Nothing is made of it where that cannot be written: a later start passes over the directory. The
    disk may be full, or the run directory gone.
    """
    with contextlib.suppress(OSError):
        if (run_dir / _DIRECTORY / f"{token}.json").exists():
            record_group(run_dir, token, Path())


def forget_group(run_dir: Path, token: str) -> None:
    """Strike a group that has ended; the last one takes the directory with it."""
    _remove(run_dir / _DIRECTORY / f"{token}.json")


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # others are in it, or it is gone
        path.parent.rmdir()


def reap_groups(run_dir: Path, grace_s: float = 2.0, *, of_others: bool = False) -> int:
    """End the processes that an earlier controller left behind; return how many there were.

    Processes are found by the token in their environment, so that a reused pid is never hit and
    one that was started just before the end is not missed.
    Groups of other hosts that share the directory, and those of another controller that is still
    alive, are left alone; also this process's own, where only those ``of_others`` are meant.
    Temporary directories of killed processes go, whatever they ran.
    """
    ended = 0
    remove_left_directories()
    records = (run_dir.glob(f"{above}{_DIRECTORY}/*.json") for above in ("", "arms/*/"))
    for path in sorted(itertools.chain.from_iterable(records)):
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
        if (of_others or pid != os.getpid()) and is_alive(pid, started):
            continue
        ended += end_all(token, grace_s)
        ours = control.parent in (Path(tempfile.gettempdir()), Path("/tmp"))
        if ours and control.name.startswith("perfsearch-"):
            shutil.rmtree(control, ignore_errors=True)
        _remove(path)
    return ended


class OtherPrograms:
    """Processes of a program that is not ours, and whatever it starts, for as long as a search.

    Args:
        run_dir: of the search, where a later start finds what a kill has left of them.

    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._token = ""

    def environment(self) -> dict[str, str]:
        """Environment variables to start one with."""
        if not self._token:
            self._token = uuid.uuid4().hex
            record_group(self._run_dir, self._token, Path())  # no directory goes with them
        return {**os.environ, TOKEN_VARIABLE: self._token}

    def end(self) -> None:
        """End all of them."""
        if self._token:
            end_all(self._token, grace_s=0.0)
            forget_group(self._run_dir, self._token)
            self._token = ""


# -----------------------------------------------------------------------------
# End this process when the controller is gone.

EXIT_ORPHANED = 113
"""Exit code of a process that ended because its controller did."""

_INTERVAL_S = 0.5


def watch_controller(
    pid: int, started: float, token: str, directory: Path, spare: Sequence[int] = ()
) -> None:
    """Start a thread that ends the whole group once the controller no longer runs.

    It polls the process table: a closed connection alone proves nothing, since a fork of the
    controller may hold its end open.

    Args:
        pid: of the controller.
        started: when that process was started.
        token: the mark of the group's processes.
        directory: the group's own, removed then.
        spare: processes with that mark that see it by themselves, and end after it.

    """

    def loop() -> None:
        while is_alive(pid, started):
            time.sleep(_INTERVAL_S)
        shutil.rmtree(directory, ignore_errors=True)
        end_all(token, grace_s=0.0, exclude=[os.getpid(), *spare])
        os._exit(EXIT_ORPHANED)

    threading.Thread(target=loop, name="watch-controller", daemon=True).start()


@contextlib.contextmanager
def ending_with_controller(
    pid: int, started: float, first: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """End this process alone once the controller no longer runs, while the block does.

    For a block that takes long and asks for nothing itself. No thread is left of it, so that forks
    may follow. A signal at the parent's death would come at the end of the thread that started this
    process, and a controller measures in several.

    Args:
        pid: of the controller.
        started: when that process was started.
        first: done before the end.

    """
    over = threading.Event()

    def loop() -> None:
        while not over.wait(_INTERVAL_S):
            if not is_alive(pid, started):
                first()
                os._exit(EXIT_ORPHANED)

    thread = threading.Thread(target=loop, name="watch-controller", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
