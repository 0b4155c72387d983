"""What searches lose and leave behind under random faults, for as long as is wanted.

    python benchmarks/soak.py run --minutes 60 --seed 0 --store STORE.jsonl
    python benchmarks/soak.py run --episode 1234567
    python benchmarks/soak.py report --store STORE.jsonl [STORE.jsonl ...]

An episode is one command (a search of the built-in job, of a script, of a table, or a comparison)
that is struck at drawn moments, and given again until it is done. Each prints one line with the
seed by which all its draws are repeated by ``--episode``; moments are those of the clock, so that
the same seed may meet another line of code. Exit code 1: something was wrong. What was wrong leaves
what its commands printed, and their journals, under ``--keep``.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _environment import set_environment

if __name__ == "__main__":  # and not in whoever imports it
    set_environment()

import subprocess

import _soak_room as rooms
from _fault_checks import (
    Findings,
    Watch,
    check_trials,
    check_view,
    journal_of,
    last_ends,
)
from _fault_common import Fault, Outcome, commit, machine, machines, migrated_database
from _soak_faults import NoClockError, Striker, clock_shim, draw_strikes, why_no_limits
from _soak_jobs import JOBS, Job
from faults import COUNTS

from perfsearch.core.journal import JournalError

_MOST_COMMANDS = 5
_ATTEMPTS = 3
"""How often a trial is started whose failure is none of its configuration's."""
_UPLOAD_S = 600.0
_MOST_KIB = 5.0
"""What a controller may grow by for each trial."""
_ALL_COUNTS = {
    **COUNTS,
    "files_changed": "files of the user's that are not as they were",
    "sockets_left": "sockets left",
    "shared_memory_left": "shared memory left",
    "temporary_left": "temporary files and directories left",
    "tracebacks": "tracebacks on the terminal",
    "memory": f"controllers that grow by {_MOST_KIB:g} KiB a trial or more",
}


@dataclass
class Left(Findings):
    """What went wrong, also beside the search itself."""

    files_changed: list[str] = field(default_factory=list)
    sockets_left: list[str] = field(default_factory=list)
    shared_memory_left: list[str] = field(default_factory=list)
    temporary_left: list[str] = field(default_factory=list)
    tracebacks: list[str] = field(default_factory=list)
    memory: list[str] = field(default_factory=list)


@dataclass
class Episode(Outcome):
    """What came of one.

    Attributes:
        strikes: the kinds of what struck; of kills the signal.
        trials: that were finished, in all its searches.
        kib_per_trial: by which the controller grew; ``None`` where that was not looked at, or the
            store was behind, or the faults were too close to one another.

    """

    strikes: list[str] = field(default_factory=list)
    trials: int = 0
    kib_per_trial: float | None = None


@dataclass
class _Course:
    """The commands of one episode."""

    job: Job
    room: rooms.Room
    arguments: list[str]
    clock: Path
    shim: Path | None
    found: Left
    codes: list[int] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    before: dict[Path, list[list[Any]]] = field(default_factory=dict)
    readings: list[rooms.Reading] = field(default_factory=list)

    def run_dirs(self) -> list[Path]:
        """Those of its searches, oldest first."""
        found = self.room.work.glob("run*/journal.jsonl")
        return sorted((p.parent for p in found), key=lambda p: int("0" + p.name[4:]))

    def command(self, strikes: list[Any]) -> int:
        """Give the command once; note what is on record at its end."""
        variables = {}
        if self.shim is not None:
            variables = {"SOAK_CLOCK": str(self.clock), "LD_PRELOAD": str(self.shim)}
        process = self.room.start(self.arguments, variables)
        watch = Watch(process.pid, self.room.mark, self.room.work / "run")
        striker = Striker(self.room, process.pid, strikes, self.clock if self.shim else None)
        reader = threading.Thread(target=self._read, args=(process, striker))
        if self.job.memory:
            reader.start()
        try:
            code = rooms.wait(process, watch, self.found)
        finally:
            if process.poll() is None:  # the soak itself is ended
                process.kill()
                process.wait()
            striker.stop()
            if self.job.memory:
                reader.join()
        self.done += striker.done
        self.kinds += striker.kinds
        self.skipped += striker.skipped
        self.codes.append(code)
        allowed = {*self.job.good, 1, 3} if strikes else {*self.job.good}
        if striker.controller:  # before it listens to signals it ends as any program
            allowed |= {-9, 130, 143, -2, -15}
        if code not in allowed:
            self.found.other.append(f"exit code {code} after {striker.done or 'nothing'}")
        for run_dir in self.run_dirs():
            try:
                self.before.setdefault(run_dir, []).append(journal_of(run_dir)[1])
            except JournalError as error:
                self.found.other.append(f"{run_dir.name}: {error}")
        return code

    def _read(self, process: subprocess.Popen[bytes], striker: Striker) -> None:
        work = self.room.work
        journal, database = work / "run" / "journal.jsonl", work / "mlflow.db"
        while process.poll() is None:
            reading = rooms.read_memory(process.pid, journal, database, len(striker.done))
            if reading is not None:
                self.readings.append(reading)
            time.sleep(0.5)


def run_episode(
    name: str, seed: int, home: Path, keep: Path | None, shim: Path | None = None
) -> Episode:
    """Strike one command until it is done; say what was wrong.

    Args:
        name: of the job.
        seed: of all its draws.
        home: a directory for its room.
        keep: where what was wrong leaves its logs.
        shim: the library by which clocks jump; ``None``: they do not.

    """
    draw = random.Random(f"{seed}/{name}")
    begin, job = time.monotonic(), JOBS[name]
    with rooms.open_room(home / "room") as room:
        clock = home / "clock"
        clock.write_bytes((0).to_bytes(8, "little"))
        shutil.copy(migrated_database(home / "template"), room.work / "mlflow.db")
        arguments = job.make(room.work, draw)
        if name != "compare":
            arguments += [f"seed={draw.randrange(2**31)}", "run_dir=run"]
        files = rooms.state_of(room.work)
        course = _Course(job, room, arguments, clock, shim, Left())
        for number in range(_MOST_COMMANDS):
            again = number == 0 or (number == 1 and draw.random() < 0.5)
            strikes = draw_strikes(draw, job.kinds, job.events) if again else []
            if course.command(strikes) in job.good:
                break
        else:
            course.found.not_ended.append(f"given {_MOST_COMMANDS} times")
        episode = Episode(Fault(name, "soak", 0, seed), exit_codes=course.codes, machine=machine())
        _check(course, episode, files)
        episode.detail = "; ".join([*course.done, *(f"not {line}" for line in course.skipped)])
        episode.strikes = list(course.kinds)
        episode.findings = {k: v for k, v in vars(course.found).items() if v}
        episode.seconds = time.monotonic() - begin
        if episode.findings and keep is not None:
            _keep(room, keep / f"{name.replace(' ', '-')}-{seed}")
    return episode


def _check(course: _Course, episode: Episode, files: rooms.State) -> None:
    found, run_dirs = course.found, course.run_dirs()
    for number, run_dir in enumerate(run_dirs):
        ends = [e for e in journal_of(run_dir)[1] if e.name == "ended"]
        if not ends and not course.job.resumes and number + 1 < len(run_dirs):
            continue  # a comparison that is broken off begins anew
        check_trials(run_dir, allowed_ends(run_dir), course.before.get(run_dir, []), found)
        episode.trials += len(last_ends(run_dir))
        if ends:
            code = int(ends[-1].data["exit_code"])
            if "perfsearch-sync" in course.room.output():  # as the command asked
                _upload(course, run_dir)
            check_view(run_dir, course.room.work / "mlflow.db", code, found)
    if not run_dirs:
        found.not_ended.append("there is no journal")
    rooms.settle()
    for count, lines in rooms.check_left(course.room, files, run_dirs).items():
        getattr(found, count).extend(lines)
    found.tracebacks += tracebacks(course.room.output())
    slope = rooms.slope_kib(course.readings) if len(course.codes) == 1 else None
    if slope is not None:
        episode.kib_per_trial = round(slope, 2)
        if episode.kib_per_trial >= _MOST_KIB:
            found.memory.append(f"{episode.kib_per_trial} KiB a trial")


def tracebacks(output: str) -> list[str]:
    """The last line of each traceback in what commands printed.

    A Ctrl-C while Python still starts is answered by Python itself: there is none of ours to do so.
    """
    parts = output.split("Traceback (most recent call last)")[1:]
    last = [re.search(r"^\w.*$", part, re.MULTILINE) for part in parts]
    lines = [match.group() if match else "a traceback" for match in last]
    return [line for line in lines if line != "KeyboardInterrupt"]


def allowed_ends(run_dir: Path) -> dict[int, set[str]]:
    """Statuses by trial: what struck it may be named once it was started often enough, and is never
    a fault of its configuration.
    """
    none_of_its = {"ok", "killed", "infrastructure"}
    events = journal_of(run_dir)[1]
    starts = Counter(event.data["trial"] for event in events if event.name == "started")
    return {
        number: none_of_its if starts[number] >= _ATTEMPTS else {"ok"}
        for number in last_ends(run_dir)
    }


def _upload(course: _Course, run_dir: Path) -> None:
    """What a user does where the store was away."""
    command = [sys.executable, "-m", "perfsearch.cli.sync", str(run_dir)]
    try:
        done = subprocess.run(
            command,
            cwd=course.room.work,
            timeout=_UPLOAD_S,
            check=False,
            capture_output=True,
            text=True,
        )
    except subprocess.TimeoutExpired:
        course.found.not_ended.append(f"perfsearch-sync still ran after {_UPLOAD_S:g} s")
        return
    if done.returncode:
        course.found.other.append(f"perfsearch-sync: {(done.stdout + done.stderr)[-300:]}")


def _keep(room: rooms.Room, place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    shutil.copy(room.work / "output.txt", place)
    for journal in room.work.glob("run*/journal.jsonl"):
        shutil.copy(journal, place / f"{journal.parent.name}.jsonl")
        if (journal.parent / "logs").is_dir():
            shutil.copytree(journal.parent / "logs", place / f"{journal.parent.name}-logs")


def line_of(episode: Episode) -> str:
    """One line for people."""
    verdict = f"WRONG: {episode.findings}" if episode.findings else "good"
    memory = "" if episode.kib_per_trial is None else f", {episode.kib_per_trial} KiB a trial"
    return (
        f"{episode.fault.group} {episode.fault.seed} ({episode.detail}): exit "
        f"{' '.join(map(str, episode.exit_codes))}, {episode.trials} trials, "
        f"{episode.seconds:.0f} s{memory}: {verdict}"
    )


def load(stores: Sequence[Path]) -> list[Episode]:
    """The episodes on record."""
    lines = [line for store in stores if store.exists() for line in store.read_text().splitlines()]
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return [Episode.from_json(record) for record in records]  # type: ignore[misc]


def report(episodes: Sequence[Episode], at: str) -> str:
    """The page."""
    struck = Counter(kind for e in episodes for kind in e.strikes)
    codes = Counter(" then ".join(map(str, e.exit_codes)) for e in episodes)
    growth = [e.kib_per_trial for e in episodes if e.kib_per_trial is not None]
    lines = [
        f"At commit {at}, on {machines(episodes)}: {len(episodes)} episodes, "
        f"{sum(len(e.exit_codes) for e in episodes)} commands, "
        f"{sum(e.trials for e in episodes)} trials, {sum(struck.values())} faults; "
        f"{sum(e.seconds for e in episodes) / 60:.0f} minutes.",
        "",
        "| count | |",
        "|---|---|",
    ]
    for key, label in _ALL_COUNTS.items():
        lines.append(f"| {label} | {sum(len(e.findings.get(key, [])) for e in episodes)} |")
    if growth:
        label = f"KiB that a controller grew a trial, at most ({len(growth)} were read)"
        lines.append(f"| {label} | {max(growth)} |")
    lines += ["", "| job | episodes | minutes | faults |", "|---|---|---|---|"]
    for name in JOBS:
        own = [e for e in episodes if e.fault.group == name]
        minutes = sum(e.seconds for e in own) / 60
        faults = sum(len(e.strikes) for e in own)
        lines.append(f"| {name} | {len(own)} | {minutes:.0f} | {faults} |")
    lines += ["", "| fault | times |", "|---|---|"]
    lines += [f"| {kind} | {count} |" for kind, count in struck.most_common()]
    lines += ["", "| exit codes | episodes |", "|---|---|"]
    lines += [f"| {shown} | {count} |" for shown, count in codes.most_common()]
    wrong = [e for e in episodes if e.findings]
    if wrong:
        lines += ["", "What was wrong:", "", *(f"- {line_of(e)}" for e in wrong)]
    return "\n".join(lines) + "\n"


def run(options: argparse.Namespace, home: Path) -> list[Episode]:
    """Episodes until the time is over."""
    home.mkdir(parents=True, exist_ok=True)
    shim = _look_around(home, options.clock)
    draw = random.Random(options.seed)
    names = [options.job] if options.job else list(JOBS)
    shares = [JOBS[name].share for name in names]
    until = time.monotonic() + 60 * options.minutes
    episodes: list[Episode] = []
    while time.monotonic() < until:
        seed = draw.randrange(2**31)
        name = draw.choices(names, shares)[0]
        if options.episode is not None:
            seed = options.episode
        begin = time.monotonic()
        try:
            episode = run_episode(name, seed, home, options.keep, shim)
        except (KeyboardInterrupt, SystemExit):
            seconds = time.monotonic() - begin
            print(f"{name} {seed}: broken off with the soak, after {seconds:.0f} s", flush=True)
            raise
        episodes.append(episode)
        if options.store is not None:
            with options.store.open("a") as file:
                file.write(json.dumps(episode.to_json()) + "\n")
        print(line_of(episode), flush=True)
        if options.episode is not None:
            break
    return episodes


def _look_around(home: Path, given: Path | None) -> Path | None:
    """Say what cannot be tried on this machine; the library by which clocks jump."""
    refused = rooms.why_not_apart(home / "tried")
    if refused:
        print(f"not here: full disks, and a look at shared memory: {refused}", flush=True)
    refused = why_no_limits()
    if refused:
        print(f"not here: processes used up: {refused}", flush=True)
    try:
        return clock_shim(home, given)
    except NoClockError as error:
        print(f"not here: clocks that jump: {error}; or give one as --clock FILE", flush=True)
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run or report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--minutes", type=float, default=60.0, help="no episode begins later")
    running.add_argument("--seed", type=int, default=0)
    running.add_argument("--episode", type=int, help="one alone, by the seed in its line")
    running.add_argument("--job", choices=list(JOBS), help="this one alone")
    running.add_argument("--store", type=Path, help="where episodes are added, a line each")
    running.add_argument("--keep", type=Path, help="where what was wrong leaves its logs")
    running.add_argument("--clock", type=Path, help="_soak_clock.c, compiled elsewhere")
    running.add_argument("--home", type=Path, help="where it all runs, not in /tmp")
    reporting = commands.add_parser("report")
    reporting.add_argument("--store", type=Path, nargs="+", required=True)
    reporting.add_argument("--commit", help="at which the store was made; the present one")
    options = parser.parse_args(arguments)
    if options.command == "report":
        print(report(load(options.store), options.commit or commit()), end="")
        return 0
    if options.home is not None and options.home.absolute().is_relative_to("/tmp"):
        parser.error(f"--home {options.home}: commands have another /tmp; name one elsewhere")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # rooms are left in order
    with tempfile.TemporaryDirectory(prefix="soak-", dir="/var/tmp") as temporary:
        episodes = run(options, (options.home or Path(temporary)).absolute())
    print("\n" + report(episodes, commit()), end="")
    return int(any(e.findings for e in episodes))


if __name__ == "__main__":
    sys.exit(main())
