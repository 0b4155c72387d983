"""What strikes the processes of a search from outside, at a drawn moment, and how it is over."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from _fault_strikes import fill
from _soak_room import Room

KINDS = ("kill", "disk", "clock", "store", "descriptors", "processes")
_SHARES = (8, 3, 3, 3, 3, 2)
_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
_CONTROLLER = 0.35
"""Share of the kills that meet the controller."""
_MEAN_S = 4.0
"""Mean time between an event of the journal and a strike."""
_PIDS = Path("/sys/fs/cgroup/pids")
_HERE = Path(__file__).parent
_COMPILERS = ("cc", "gcc", "clang")


@dataclass(frozen=True)
class Strike:
    """One fault.

    Attributes:
        kind: one of ``KINDS``.
        at_event: it waits until the journal has so many, however busy the machine is,
        after_s: and then so many seconds.
        lasts_s: after so long it is over, where it can be.
        seed: of what else is drawn for it.

    """

    kind: str
    at_event: int
    after_s: float
    lasts_s: float
    seed: int


def draw_strikes(draw: random.Random, kinds: tuple[str, ...], events: int) -> list[Strike]:
    """One to three strikes of kinds out of ``kinds``, in order, before so many events."""
    shares = [_SHARES[KINDS.index(kind)] for kind in kinds]
    drawn = draw.choices(kinds, shares, k=draw.choice((1, 1, 2, 3)))
    moments = sorted(draw.randrange(events) for _ in drawn)
    return [
        Strike(
            kind,
            event,
            round(draw.expovariate(1 / _MEAN_S), 2),
            round(draw.uniform(0.5, 12.0), 1),
            draw.randrange(2**31),
        )
        for kind, event in zip(drawn, moments, strict=True)
    ]


class Striker:
    """Strikes a command while it runs.

    Attributes:
        done: what was struck, in words.
        kinds: the kind of each; of kills the signal.
        skipped: strikes that are not possible here, and why.
        controller: whether the controller itself was sent a signal.

    """

    def __init__(self, room: Room, pid: int, strikes: list[Strike], clock: Path | None) -> None:
        self.done: list[str] = []
        self.kinds: list[str] = []
        self.skipped: list[str] = []
        self.controller = False
        self._room, self._pid, self._clock_file = room, pid, clock
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(s,)) for s in strikes]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """The command has ended: nothing more is struck, and what goes on is over."""
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _run(self, strike: Strike) -> None:
        while self._events() < strike.at_event:
            if self._ended.wait(0.2):
                return
        if self._ended.wait(strike.after_s):
            return
        draw = random.Random(strike.seed)
        try:
            with getattr(self, f"_{strike.kind}")(draw, strike.lasts_s) as what:
                self.done.append(f"event {strike.at_event} + {strike.after_s:.1f} s: {what}")
                self.kinds.append(what.split()[0] if strike.kind == "kill" else strike.kind)
                self._ended.wait(strike.lasts_s)
        except psutil.NoSuchProcess:
            self.skipped.append(f"{strike.kind}: the process had ended")
        except OSError as error:
            self.skipped.append(f"{strike.kind}: {error}")

    def _events(self) -> int:
        journals = list(self._room.work.glob("run*/journal.jsonl"))
        return max((path.read_bytes().count(b"\n") for path in journals), default=0)

    def _family(self) -> list[psutil.Process]:
        return psutil.Process(self._pid).children(recursive=True)

    def _one(self, draw: random.Random) -> psutil.Process:
        family = sorted(self._family(), key=lambda process: process.pid)
        if not family or draw.random() < _CONTROLLER:
            return psutil.Process(self._pid)
        return draw.choice(family)

    @contextlib.contextmanager
    def _kill(self, draw: random.Random, lasts_s: float) -> Iterator[str]:
        number, target = draw.choice(_SIGNALS), self._one(draw)
        name = self._name(target)
        self.controller |= target.pid == self._pid
        target.send_signal(number)
        yield f"{number.name} to {name}"

    def _name(self, process: psutil.Process) -> str:
        if process.pid == self._pid:
            return "the controller"
        generation, above = 1, process
        while above.ppid() != self._pid and generation < 6:
            above, generation = psutil.Process(above.ppid()), generation + 1
        words = [word.rpartition("/")[2] for word in process.cmdline() if word]
        return f"generation {generation} ({' '.join(words)[:60]})"

    @contextlib.contextmanager
    def _disk(self, draw: random.Random, lasts_s: float) -> Iterator[str]:
        if not self._room.apart:
            raise OSError("a small disk cannot be mounted here")
        place = draw.choice((self._room.work, self._room.work, self._room.temporary))
        fill(place)
        try:
            yield f"{place.name} full for {lasts_s:g} s"
        finally:
            (place / "filler").unlink(missing_ok=True)

    @contextlib.contextmanager
    def _clock(self, draw: random.Random, lasts_s: float) -> Iterator[str]:
        if self._clock_file is None:
            raise OSError("clocks do not jump here")
        jump = round(10 ** draw.uniform(0.5, 6.0)) * draw.choice((-1, 1))
        now = int.from_bytes(self._clock_file.read_bytes(), "little", signed=True)
        with self._clock_file.open("r+b") as file:
            file.write((now + jump).to_bytes(8, "little", signed=True))
        yield f"clock {jump:+d} s"

    @contextlib.contextmanager
    def _store(self, draw: random.Random, lasts_s: float) -> Iterator[str]:
        database = self._room.work / "mlflow.db"
        if draw.random() < 0.5:
            lock = sqlite3.connect(database, timeout=5.0, isolation_level=None)
            try:
                with contextlib.suppress(sqlite3.OperationalError):
                    lock.execute("begin exclusive")
                yield f"store locked for {lasts_s:g} s"
            finally:
                lock.close()
            return
        aside = self._room.work / "mlflow.db-aside"
        database.rename(aside)
        try:
            yield f"store away for {lasts_s:g} s"
        finally:
            aside.rename(database)

    @contextlib.contextmanager
    def _descriptors(self, draw: random.Random, lasts_s: float) -> Iterator[str]:
        target, more = self._one(draw), draw.randrange(6)
        _, hard = resource.prlimit(target.pid, resource.RLIMIT_NOFILE)
        number = max(int(path.name) for path in Path(f"/proc/{target.pid}/fd").iterdir()) + 1
        resource.prlimit(target.pid, resource.RLIMIT_NOFILE, (number + more, hard))
        try:
            yield f"{more} descriptors left to {self._name(target)} for {lasts_s:g} s"
        finally:
            for pid in [self._pid, *(p.pid for p in self._living())]:  # forks have inherited it
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))

    def _living(self) -> list[psutil.Process]:
        try:
            return self._family()
        except psutil.NoSuchProcess:
            return []

    @contextlib.contextmanager
    def _processes(self, draw: random.Random, lasts_s: float) -> Iterator[str]:
        more, group = draw.randrange(4), _PIDS / f"soak-{os.getpid()}-{self._pid}"
        if refused := why_no_limits():
            raise OSError(refused)
        group.mkdir()
        try:
            for pid in [self._pid, *(p.pid for p in self._family())]:
                with contextlib.suppress(OSError):
                    (group / "cgroup.procs").write_text(str(pid))
            there = int((group / "pids.current").read_text())
            (group / "pids.max").write_text(str(there + more))
            yield f"{more} processes and threads left for {lasts_s:g} s"
        finally:
            _dissolve(group)


def why_no_limits() -> str:
    """Why processes cannot be limited here; empty: they can."""
    if not _PIDS.is_dir():
        return f"there is no {_PIDS} (control groups of version 1)"
    return "" if os.access(_PIDS, os.W_OK) else f"{_PIDS} cannot be written"


def _dissolve(group: Path) -> None:
    """Give its processes back to the group above, and remove it."""
    (group / "pids.max").write_text("max")
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (_PIDS / "cgroup.procs").write_text(pid)
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.1)


class NoClockError(Exception):
    """Clocks do not jump here; the text says why."""


def clock_shim(home: Path, given: Path | None = None) -> Path:
    """The library that lets a clock jump: one that is given, or compiled now.

    Raises:
        NoClockError: there is no compiler, or no clock jumps with it.

    """
    library = given or home / "clock.so"
    if not library.exists():
        compiler = next(filter(shutil.which, _COMPILERS), None)
        if compiler is None:
            raise NoClockError(f"there is no C compiler ({', '.join(_COMPILERS)})")
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library)]
        command += [str(_HERE / "_soak_clock.c"), "-ldl"]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            raise NoClockError(f"{compiler}: {made.stderr.strip()[-200:]}")
    _try_clock(library.absolute(), home)
    return library.absolute()


def _try_clock(library: Path, home: Path) -> None:
    """One of another C library is left out by the loader, and the clock would go on as ever."""
    ahead_s, file = 10**6, home / "clock-tried"
    file.write_bytes(ahead_s.to_bytes(8, "little"))
    variables = {**os.environ, "LD_PRELOAD": str(library), "SOAK_CLOCK": str(file)}
    command = [sys.executable, "-S", "-c", "import time; print(time.time())"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode or float(done.stdout) < time.time() + ahead_s / 2:
        raise NoClockError(f"{library} does not change the clock: {done.stderr.strip()[-200:]}")
