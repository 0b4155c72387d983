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
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
    with contextlib.ExitStack() as stack:
        refused = [stack.enter_context(small_disk(place, _DISK)) for place in places]
        room = Room(*places, apart=not any(refused) and _may_mount())
        room.temporary.chmod(0o1777)
        yield room


def _may_mount() -> bool:
    if any(Path(place).resolve().is_relative_to("/tmp") for place in (sys.prefix, __file__)):
        return False  # another /tmp would hide them
    try:
        command = ["unshare", "--mount", "true"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


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


def slope_kib(readings: Sequence[tuple[int, float]]) -> float:
    """KiB a trial, by least squares over what follows the first quarter of the trials.

    What comes after the last one does not count: the record loads libraries of its own.

    Args:
        readings: trials that had finished, and the memory in KiB.

    """
    if not readings:
        return 0.0
    most = max(trials for trials, _ in readings)
    kept = [(trials, kib) for trials, kib in readings if most / 4 < trials < most]
    mean_trials = sum(trials for trials, _ in kept) / max(1, len(kept))
    mean_kib = sum(kib for _, kib in kept) / max(1, len(kept))
    spread = sum((trials - mean_trials) ** 2 for trials, _ in kept)
    if not spread:
        return 0.0
    return sum((t - mean_trials) * (kib - mean_kib) for t, kib in kept) / spread


def read_memory(pid: int, journal: Path) -> tuple[int, float] | None:
    """Trials that have finished, and KiB of memory that are the process's own."""
    import psutil

    try:
        kib = psutil.Process(pid).memory_full_info().uss / 1024
        return journal.read_bytes().count(b'"event":"finished"'), kib
    except (psutil.Error, OSError):
        return None


def settle() -> None:
    """Let ended processes be reaped before what they held is looked at."""
    time.sleep(0.5)
