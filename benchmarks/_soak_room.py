"""Where the searches of an episode run, and what is left in it after them.

A room has its own small disks for the working directory, for temporary files and for shared memory,
and its commands see the last two as ``/tmp`` and ``/dev/shm``: what is found there is theirs alone.
Where this may not be mounted, or the commands themselves lie below ``/tmp``, they are plain
directories, shared memory is not looked at, and disks are not filled.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression

from _fault_checks import MARK, Findings, Watch
from _fault_common import small_disk

from perfsearch.pipeline.resume import LOCKS, LOCKS_VARIABLE

_DISK = "64m"
_LONGEST_S = 600.0
_ORPHANS_S = 30.0
"""Time for ranks to notice that their controller was killed, and to end one another."""

_OURS = ("mlflow.db", "mlruns", "run", "outputs", "output.txt", "__pycache__")
"""What a command makes in the directory it was started in, by the start of its name."""


@dataclass
class Room:
    """Directories of one episode.

    Attributes:
        work: where commands are started; holds the user's files.
        temporary: what commands have as ``/tmp``.
        shared: what they have as ``/dev/shm``.
        apart: whether they really do, each on a disk of its own.

    """

    work: Path
    temporary: Path
    shared: Path
    apart: bool
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def start(
        self, arguments: Sequence[str], variables: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start ``perfsearch`` with these arguments; its process is the controller."""
        command = [sys.executable, "-m", "perfsearch.cli.search", *arguments]
        if self.apart:
            binds = 'mount --bind "$0" /tmp && mount --bind "$1" /dev/shm && shift && exec "$@"'
            places = [str(self.temporary), str(self.shared)]
            command = ["unshare", "--mount", "sh", "-c", binds, *places, *command]
        temporary = "/tmp" if self.apart else str(self.temporary)
        environment = {
            **os.environ,
            **variables,
            MARK: self.mark,
            "TMPDIR": temporary,
            LOCKS_VARIABLE: f"{temporary}/{LOCKS.name}",  # and not where whoever runs this has them
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        with (self.work / "output.txt").open("ab") as output:
            return subprocess.Popen(
                command,
                cwd=self.work,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def output(self) -> str:
        """What its commands have printed."""
        return (self.work / "output.txt").read_text(errors="replace")


@contextlib.contextmanager
def open_room(directory: Path) -> Iterator[Room]:
    """Make the directories, and remove them with what is mounted there."""
    shutil.rmtree(directory, ignore_errors=True)
    places = [directory / name for name in ("work", "tmp", "shm")]
    apart = not why_not_apart(directory / "tried")
    with contextlib.ExitStack() as stack:
        for place in places:
            if apart:
                apart = not stack.enter_context(small_disk(place, _DISK))
            place.mkdir(parents=True, exist_ok=True)
        room = Room(*places, apart=apart)
        room.temporary.chmod(0o1777)
        yield room


def why_not_apart(directory: Path) -> str:
    """Why commands cannot have disks, ``/tmp`` and ``/dev/shm`` of their own; empty: they can."""
    shutil.rmtree(directory, ignore_errors=True)
    with small_disk(directory, "1m") as refused:
        return refused or _why_not_bound()


def _why_not_bound() -> str:
    for place in (sys.prefix, sys.base_prefix, __file__):
        if Path(place).resolve().is_relative_to("/tmp"):
            return f"another /tmp would hide {place}"
    try:
        binds = "mount --bind /tmp /tmp && mount --bind /dev/shm /dev/shm"
        command = ["unshare", "--mount", "sh", "-c", binds]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        return str(error)
    return done.stderr.strip() if done.returncode else ""


def wait(process: subprocess.Popen[bytes], watch: Watch, found: Findings) -> int:
    """The command's exit code, once it and all that it started have ended."""
    try:
        code = process.wait(_LONGEST_S)
    except subprocess.TimeoutExpired:
        found.not_ended.append(f"the command still ran after {_LONGEST_S:g} s")
        process.kill()
        code = process.wait()
    found.processes_left += watch.left(_ORPHANS_S if code == -9 else 2.0)
    return code


# -----------------------------------------------------------------------------
# What is left.

State = dict[str, tuple[object, ...]]


def state_of(work: Path) -> State:
    """Kind, content, mode and time of the user's files, by path; of directories the mode."""
    found: State = {}
    for above, directories, files in os.walk(work):
        if Path(above) == work:
            directories[:] = [name for name in directories if not name.startswith(_OURS)]
            files = [name for name in files if not name.startswith(_OURS)]
        for name in [*directories, *files]:
            path = Path(above, name)
            now = path.lstat()
            if path.is_dir():
                seen: tuple[object, ...] = ("directory", now.st_mode)
            else:
                seen = (path.read_bytes(), now.st_mode, now.st_mtime_ns)
            found[str(path.relative_to(work))] = seen
    return found


def differences(before: State, after: State) -> list[str]:
    """What has been made, is gone, or is not as it was."""
    lines = [f"{path} was made" for path in sorted(after.keys() - before.keys())]
    lines += [f"{path} is gone" for path in sorted(before.keys() - after.keys())]
    for path in sorted(before.keys() & after.keys()):
        if before[path] != after[path]:
            content = "content" if before[path][0] != after[path][0] else "mode or time"
            lines.append(f"{path}: another {content}")
    return lines


def left_in(directory: Path, spared: Sequence[str] = ()) -> list[tuple[str, bool]]:
    """Paths below that do not begin with a spared name, and whether each is a socket."""
    found = []
    for above, directories, files in os.walk(directory):
        for name in [*directories, *files]:
            path = Path(above, name)
            shown = str(path.relative_to(directory))
            if not shown.startswith(tuple(spared)):
                with contextlib.suppress(FileNotFoundError):
                    found.append((shown, stat.S_ISSOCK(path.lstat().st_mode)))
    return found


def check_left(room: Room, before: State, run_dirs: Sequence[Path]) -> dict[str, list[str]]:
    """What commands that have all ended have left, by the counts of the report."""
    kept = (LOCKS.name, f"perfsearch-{os.getuid()}", "torchinductor_")  # the last: torch's cache
    temporary = left_in(room.temporary, (*kept, "filler"))
    shared = left_in(room.shared, ("filler",)) if room.apart else []
    groups = [f"{d.name}/{name}" for d in run_dirs for name, _ in left_in(d) if "groups" in name]
    sockets = [name for d in run_dirs for name, is_socket in left_in(d) if is_socket]
    return {
        "files_changed": differences(before, state_of(room.work)),
        "sockets_left": sockets + [name for name, is_socket in temporary if is_socket],
        "shared_memory_left": [name for name, _ in shared],
        "temporary_left": [name for name, is_socket in temporary if not is_socket] + groups,
    }


# -----------------------------------------------------------------------------
# How much memory a controller takes for each trial.


_START_TRIALS = 60
"""In these libraries are still loaded: MLflow's, and those that begin a strategy."""
_LAST = 0.85
"""Share of the trials after which confirmation begins, which loads libraries of its own."""
_BACKLOG_TRIALS = 3
"""So many that the store does not have yet are none that wait for it."""
_SPAN_TRIALS = 100
"""A slope over fewer trials is noise."""


@dataclass(frozen=True)
class Reading:
    """A controller at one moment.

    Attributes:
        trials: that had finished.
        behind: of these, those that its store did not have yet.
        struck: faults that had struck.
        kib: memory that is the process's own.

    """

    trials: int
    behind: int
    struck: int
    kib: float


def slope_kib(readings: Sequence[Reading]) -> float | None:
    """KiB a trial, by least squares over the longest stretch in which nothing struck.

    Three things are no growth by trials, and do not count: what the start loads, trials that wait
    for the store, and what the end of a search loads. ``None``: no such stretch is long enough.
    """
    most = max((reading.trials for reading in readings), default=0)
    stretches: dict[int, list[Reading]] = {}
    for reading in readings:
        if _START_TRIALS <= reading.trials < _LAST * most and reading.behind <= _BACKLOG_TRIALS:
            stretches.setdefault(reading.struck, []).append(reading)
    kept = max(stretches.values(), key=_span, default=[])
    if _span(kept) < _SPAN_TRIALS:
        return None
    return linear_regression([r.trials for r in kept], [r.kib for r in kept]).slope


def _span(stretch: Sequence[Reading]) -> int:
    trials = [reading.trials for reading in stretch]
    return max(trials) - min(trials) if trials else 0


def read_memory(pid: int, journal: Path, database: Path, struck: int) -> Reading | None:
    """Look at a controller; ``None`` where it, its journal or its store is not there."""
    try:
        trials = journal.read_bytes().count(b'"event":"finished"')
        store = sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=0.0)
        with contextlib.closing(store):
            query = "select count(*) from tags where key = 'perfsearch.trial'"
            shown = int(store.execute(query).fetchone()[0])
        # of its own, also while it shares them with a child: what a fork shares comes and goes
        pages = Path(f"/proc/{pid}/smaps_rollup").read_text()
        kib = next(int(n.split()[1]) for n in pages.splitlines() if n.startswith("Anonymous:"))
    except (OSError, StopIteration, sqlite3.Error):
        return None
    return Reading(trials, trials - shown, struck, float(kib))


def settle() -> None:
    """Let ended processes be reaped before what they held is looked at."""
    time.sleep(0.5)
