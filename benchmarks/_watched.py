"""A command that is started, ended at its time, and leaves no process behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_MARK = "PERFSEARCH_BENCHMARK_START"


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        rc: its exit code; ``None``: it had to be ended.
        seconds: from its start until then.
        left: processes that it left behind, which were killed.
        lines: what it printed.

    """

    rc: int | None
    seconds: float
    left: int
    lines: list[str]


def watched(
    command: Sequence[str], cwd: Path, environment: Mapping[str, str], log: Path, limit_s: float
) -> Ended:
    """Start a command, wait for its end or end it, and kill what it left."""
    mark, begun = uuid.uuid4().hex, time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=cwd, env={**environment, _MARK: mark}, stdout=out,
            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            timed_out = _outlasts(process, limit_s)
            seconds = time.monotonic() - begun
            time.sleep(0.5)  # processes that are about to end are none that were left
        finally:
            left = _end_marked(mark)
    process.wait(10)
    if timed_out:
        return Ended(None, seconds, 0, lines_of(log))
    return Ended(process.returncode, seconds, left, lines_of(log))


def lines_of(log: Path) -> list[str]:
    """The lines of a log, without colours, of a progress bar only its last state."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", log.read_text(errors="replace"))
    text = text.replace(f"{log.absolute().parent}/", "")
    lines = (line.rsplit("\r", 1)[-1].rstrip() for line in text.split("\n"))
    return [line[:400] for line in lines if line]


def _outlasts(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Wait for the end; where it does not come in time, interrupt the process, and say so."""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        return True
    return False


def _end_marked(mark: str) -> int:
    """Kill what a start has left behind, told by the variable that it inherited."""
    left = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(_MARK) == mark:
                process.kill()
                left += 1
    return left
