"""What a fault is, what came of it, and the parts that both kinds of search share."""

from __future__ import annotations

import contextlib
import os
import platform
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from _fault_checks import Findings

OOM_TEXTS = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.11 GiB",
    "HIP out of memory. Tried to allocate 20.00 MiB",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried",
    "NCCL WARN Cuda failure 2 'out of memory'",
    "terminate called after throwing an instance of 'std::bad_alloc'",
)


@dataclass(frozen=True)
class Fault:
    """One seeded fault.

    Attributes:
        group: ``real`` (two gloo processes) or ``replay``.
        kind: what goes wrong.
        index: its place in the group.
        seed: of everything that is drawn for it.

    """

    group: str
    kind: str
    index: int
    seed: int

    @property
    def name(self) -> str:
        """Unique among the faults of a run."""
        return f"{self.group}-{self.index:03d}"

    def generator(self) -> random.Random:
        """The fault's own draws."""
        return random.Random(f"{self.seed}/{self.name}/{self.kind}")


@dataclass
class Outcome:
    """What came of a fault.

    Attributes:
        fault: which.
        detail: what was drawn.
        exit_codes: of the commands, in order.
        seconds: wall time of it all.
        struck: whether the fault happened.
        skipped: why it was not tried; empty when it was.
        findings: what is wrong, by count of the report.
        machine: where it was tried.

    """

    fault: Fault
    detail: str = ""
    exit_codes: list[int] = field(default_factory=list)
    seconds: float = 0.0
    struck: bool = True
    skipped: str = ""
    findings: dict[str, list[str]] = field(default_factory=dict)
    machine: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values for the store."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Outcome:
        """Rebuild it."""
        return cls(**{**record, "fault": Fault(**record["fault"])})


def machine() -> str:
    """The present one, in words; of its CPU cores those that this process may use."""
    may, there = len(os.sched_getaffinity(0)), os.cpu_count()
    cores = f"{may} CPU cores" if may == there else f"{may} of {there} CPU cores"
    words = f"{cores} ({platform.machine()}), Python {platform.python_version()}"
    return f"{words}, torch {version('torch')}, without a GPU"


def machines(outcomes: Sequence[Outcome]) -> str:
    """Those on which they were tried."""
    return "; ".join(sorted({o.machine or "a machine that was not noted" for o in outcomes}))


def commit() -> str:
    """That of the checkout; a machine may have neither git nor the history."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def check_codes(codes: list[int], wanted: list[int], found: Findings) -> None:
    """Exit codes are those of INTERFACE.md."""
    if codes != wanted:
        found.other.append(f"exit codes {codes}, not {wanted}")


@contextlib.contextmanager
def small_disk(directory: Path, size: str) -> Iterator[str]:
    """A tmpfs at ``directory``; yields why there is none, or nothing."""
    directory.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)]
    try:
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        reason = made.stderr.strip() if made.returncode else ""
    except FileNotFoundError as error:
        reason = str(error)
    if reason:
        yield f"a small disk cannot be mounted here: {reason}"
        return
    try:
        yield ""
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A real MLflow tracking server on loopback over a SQLite file."""

    def __init__(self, database: Path, port: int) -> None:
        self.uri = f"http://127.0.0.1:{port}"
        self.database = database
        options = f"--host 127.0.0.1 --port {port} --workers 1"
        options += f" --backend-store-uri sqlite:///{database}"
        options += f" --default-artifact-root file://{database.parent}/server-artifacts"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *options.split()],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=2).close()
                return
            except OSError:
                if time.monotonic() > deadline:
                    self.kill()
                    raise
                time.sleep(0.3)

    def kill(self) -> None:
        """SIGKILL to the server and its workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


def migrated_database(directory: Path) -> Path:
    """A store with its tables: making them takes seconds, copying it none."""
    from perfsearch.tracking.client import connect
    from perfsearch.tracking.location import locate

    path = directory / "mlflow.db"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        connect(locate(None, directory))
    return path


def fresh_directory(path: Path, database: Path) -> Path:
    """An empty directory with a store of its own."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    shutil.copy(database, path / "mlflow.db")
    return path


def tear(journal: Path, draw: random.Random) -> None:
    """Cut the last line somewhere, as a kill in the middle of a write does."""
    raw = journal.read_bytes()
    begin = raw.rstrip(b"\n").rfind(b"\n") + 1
    journal.write_bytes(raw[: draw.randrange(begin + 1, len(raw))])
