"""What goes wrong in a replayed search, done for real where it can be without ranks."""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from _fault_common import OOM_TEXTS

from perfsearch.core.journal import Journal
from perfsearch.core.trial import Outcome as Measured
from perfsearch.runners.base import Plan
from perfsearch.runners.replay import Replay
from perfsearch.workers.failures import Evidence, ProcessEnd, classify, is_out_of_memory
from perfsearch.workers.messages import RankError


def failures(kind: str, rank: int, draw: random.Random) -> tuple[str, Callable[[], Measured]]:
    """The status that is wanted, and what produces the failure in the middle of a trial."""
    code, text = draw.randrange(1, 100), draw.choice(OOM_TEXTS)

    def told(**evidence: Any) -> Measured:
        failure = classify(Evidence(**evidence))
        return Measured(failure.status, reason=failure.reason)

    def end(code: int, log: str = "") -> Measured:
        return told(ends=[ProcessEnd(rank, code, 1.0)], log_tails={rank: log})

    known: dict[str, tuple[str, Callable[[], Measured]]] = {
        "exception": ("crash", _raise),
        "exit code": ("crash", lambda: end(code)),
        "SIGKILL of a rank": ("killed", lambda: end(-signal.SIGKILL)),
        "SIGKILL of the launcher": (
            "killed",
            lambda: told(launcher_error="it was ended by SIGKILL"),
        ),
        "hang": ("timeout", lambda: told(timed_out=10.0)),
        "OOM text on stderr": ("oom", lambda: end(1, f"step 3\n{text}\n")),
        "OOM by rlimit": ("oom", lambda: told(errors=[_beyond_limit(rank)])),
        "port taken": ("infrastructure", _bind_twice),
    }
    return known[kind]


def _raise() -> NoReturn:
    raise RuntimeError("boom")


def _beyond_limit(rank: int) -> RankError:
    import numpy as np

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, hard))
    try:
        np.zeros(2**32)
    except MemoryError as error:
        ran_out = is_out_of_memory(error)
        return RankError(rank, time.time(), type(error).__name__, str(error), out_of_memory=ran_out)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    raise AssertionError("the limit did not hold")


def _bind_twice() -> NoReturn:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        first.listen(1)
        second.bind(first.getsockname())
    raise AssertionError("a port was bound twice")


def fill(directory: Path) -> None:
    """Write until the disk is full."""
    with (directory / "filler").open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(1024))
        except OSError:
            return


def signal_and_wait(number: int) -> None:
    """Send this process a signal in the middle of a trial."""
    os.kill(os.getpid(), number)
    time.sleep(60)


def at_trial(trial: int, strike: Callable[[], None]) -> Callable[[], None]:
    """Do something when a trial is measured."""

    def prepare() -> None:
        measure = Replay.measure

        def striking(self: Replay, configuration: Any, plan: Plan) -> Measured:
            if plan.number == trial:
                strike()
            return measure(self, configuration, plan)

        Replay.measure = striking  # type: ignore[method-assign]

    return prepare


def at_attempts(trial: int, times: int, failure: Callable[[], Measured]) -> Callable[[], None]:
    """Let the first attempts at a trial fail."""

    def prepare() -> None:
        measure = Replay.measure

        def failing(self: Replay, configuration: Any, plan: Plan) -> Measured:
            if plan.number == trial and plan.attempt < times:
                return failure()
            return measure(self, configuration, plan)

        Replay.measure = failing  # type: ignore[method-assign]

    return prepare


def at_event(place: int, phase: str) -> Callable[[], None]:
    """Kill this process before, in the middle of, or after the journal's event ``place``."""

    def prepare() -> None:
        write = Journal._write

        def killing(self: Journal, record: Any) -> None:
            here = record.get("n") == place
            if here and phase == "middle":
                os.write(self._file, repr(record).encode()[:40])
            if here and phase != "after":
                os.kill(os.getpid(), signal.SIGKILL)
            write(self, record)
            if here:
                os.kill(os.getpid(), signal.SIGKILL)

        Journal._write = killing  # type: ignore[method-assign]

    return prepare
