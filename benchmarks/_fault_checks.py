"""What must hold after a fault, looked up where it is kept: journal, MLflow's tables, /proc."""

from __future__ import annotations

import math
import os
import sqlite3
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from perfsearch.core.journal import read
from perfsearch.core.trial import Status
from perfsearch.tracking.names import mlflow_status, mlflow_status_of_search
from perfsearch.workers import processes

MARK = "PERFSEARCH_FAULT_MARK"
"""Environment variable by which every descendant of a command is found again."""


@dataclass
class Findings:
    """What went wrong, by the counts of the report; empty lists are good."""

    trials_lost: list[str] = field(default_factory=list)
    wrong_status: list[str] = field(default_factory=list)
    processes_left: list[str] = field(default_factory=list)
    not_ended: list[str] = field(default_factory=list)
    running_runs: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(vars(self).values())


def journal_of(run_dir: Path) -> tuple[dict[str, Any], list[Any]]:
    """Header and events."""
    return read(run_dir / "journal.jsonl")


def last_ends(run_dir: Path) -> dict[int, dict[str, Any]]:
    """The last recorded end of each trial, by number."""
    return {e.data["trial"]["number"]: e.data["trial"] for e in _named(run_dir, "finished")}


def attempts(run_dir: Path, trial: int) -> int:
    """How often a trial was started."""
    return sum(e.data["trial"] == trial for e in _named(run_dir, "started"))


def exit_code(trial: int | None, status: str) -> int:
    """Of a search one trial of which ends so: a baseline ends it, but for want of memory."""
    return 1 if trial == 0 and status not in ("ok", "oom") else 0


def _named(run_dir: Path, name: str) -> list[Any]:
    return [e for e in journal_of(run_dir)[1] if e.name == name]


def check_trials(
    run_dir: Path, expected: dict[int, set[str]], before: list[list[Any]], found: Findings
) -> None:
    """Nothing that was started or recorded is lost, and every status is the right one.

    Args:
        run_dir: of a search that ended.
        expected: allowed statuses by trial; every other trial must be ``ok``.
        before: the journal's events at each death of the controller.
        found: what is wrong is added here.

    """
    _, events = journal_of(run_dir)
    started = {e.data["trial"] for e in events if e.name == "started"}
    ends = last_ends(run_dir)
    for number in sorted(started - ends.keys()):
        found.trials_lost.append(f"trial {number} was started and never ended")
    for number in sorted(set(range(len(ends))) - ends.keys()):
        found.trials_lost.append(f"there is no trial {number}")
    if not events or events[-1].name != "ended":
        found.not_ended.append("the journal has no end")
    for known in before:
        if events[: len(known)] != known:
            found.trials_lost.append("events of the journal from before a death have changed")
        done = {
            e.data["trial"]["number"]
            for e in known
            if e.name == "finished" and e.data["trial"]["status"] != "interrupted"
        }
        for event in events[len(known) :]:
            if event.name == "started" and event.data["trial"] in done:
                found.other.append(f"trial {event.data['trial']} had ended and was run again")
    for number, trial in ends.items():
        allowed = expected.get(number, {"ok"})
        if trial["status"] not in allowed:
            found.wrong_status.append(
                f"trial {number} ended {trial['status']}, not {' or '.join(sorted(allowed))}: "
                f"{trial['reason']}"
            )
        cost = trial["cost"]
        if (trial["status"] == "ok") != (cost is not None and math.isfinite(cost)):
            found.wrong_status.append(f"trial {number} ended {trial['status']} with cost {cost}")


def check_view(run_dir: Path, database: Path, exit_code: int, found: Findings) -> None:
    """MLflow's tables say the same as the journal, once, and nothing in them is still running."""
    header, _ = journal_of(run_dir)
    ends = last_ends(run_dir)
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as store:
        runs = store.execute(
            "select r.run_uuid, r.status, role.value, trial.value from runs r"
            " join tags s on s.run_uuid = r.run_uuid and s.key = 'perfsearch.search_id'"
            " join tags role on role.run_uuid = r.run_uuid and role.key = 'perfsearch.role'"
            " left join tags trial on trial.run_uuid = r.run_uuid and trial.key='perfsearch.trial'"
            " where s.value = ?",
            (header["search_id"],),
        ).fetchall()
        scored = dict(
            store.execute("select run_uuid, value from latest_metrics where key='objective/value'")
        )
        broken = store.execute("select count(*) from metrics where is_nan or value > 1e300")
        if broken.fetchone()[0]:
            found.other.append("a NaN or an infinity was logged")
    for _, status, role, trial in runs:
        if status == "RUNNING":
            found.running_runs.append(f"{role} {trial or ''} is RUNNING in MLflow")
    of_search = [status for _, status, role, _ in runs if role == "search"]
    wanted = mlflow_status_of_search(exit_code)
    if of_search != [wanted]:
        found.other.append(f"the search's runs in MLflow are {of_search}, not one {wanted}")
    shown: dict[int, list[tuple[str, str]]] = {}
    for run, status, role, trial in runs:
        if role == "trial":
            shown.setdefault(int(trial), []).append((run, status))
    for number, trial in ends.items():
        entries = shown.pop(number, [])
        if len(entries) != 1:
            found.trials_lost.append(f"trial {number} has {len(entries)} runs in MLflow")
            continue
        run, status = entries[0]
        if status not in ("RUNNING", mlflow_status(Status(trial["status"]))):
            found.wrong_status.append(f"trial {number}, {trial['status']}, is {status} in MLflow")
        if (run in scored) != (trial["status"] == "ok"):
            found.other.append(f"trial {number}, {trial['status']}: objective {scored.get(run)}")
    if shown:
        found.other.append(f"MLflow has trials {sorted(shown)}, the journal does not")


class Watch:
    """Notes every descendant of a process, by pid and start, for as long as it runs."""

    def __init__(self, pid: int, mark: str, run_dir: Path) -> None:
        self._root = pid
        self._mark = mark
        self._run_dir = run_dir
        self._seen: dict[int, float] = {}
        self._tokens: set[str] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            try:
                family = psutil.Process(self._root).children(recursive=True)
            except psutil.NoSuchProcess:
                continue
            for process in family:
                try:
                    self._seen.setdefault(process.pid, processes.started_at(process.pid))
                except psutil.NoSuchProcess:
                    continue
            self._tokens |= {p.stem for p in (self._run_dir / "groups").glob("*.json")}

    def left(self, within_s: float, also: Path | None = None) -> list[str]:
        """Processes that are still there after at most ``within_s``.

        Args:
            within_s: the time that they have.
            also: a file with one more pid.

        """
        self._stop.set()
        self._thread.join()
        deadline = time.monotonic() + within_s
        while True:
            alive = self._alive(also)
            if not alive or time.monotonic() > deadline:
                return alive
            time.sleep(0.1)

    def _alive(self, also: Path | None) -> list[str]:
        pids = {pid for pid, start in self._seen.items() if processes.is_alive(pid, start)}
        for token in self._tokens:
            pids |= {p.pid for p in processes.members(token)}
        pids |= {p.pid for p in psutil.process_iter() if _has_mark(p, self._mark)}
        if also is not None and also.exists():
            pid = int(also.read_text())
            if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                pids.add(pid)
        return [_describe(pid) for pid in sorted(pids)]


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        marked = process.environ().get(MARK) == mark
        return marked and process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid()
    except (psutil.Error, OSError):
        return False


def _describe(pid: int) -> str:
    try:
        return f"{pid} {' '.join(psutil.Process(pid).cmdline())[:120]}"
    except psutil.Error:
        return str(pid)
