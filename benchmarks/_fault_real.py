"""Faults in real searches: the command itself, over two gloo processes that train on a CPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _fault_checks import (
    MARK,
    Findings,
    Watch,
    attempts,
    check_trials,
    check_view,
    exit_code,
    journal_of,
)
from _fault_common import (
    OOM_TEXTS,
    Fault,
    Outcome,
    Server,
    check_codes,
    free_port,
    fresh_directory,
    small_disk,
    tear,
)

HERE = Path(__file__).parent
KINDS = (
    "exception",
    "exit code",
    "SIGKILL of a rank",
    "SIGKILL of the launcher",
    "SIGKILL of the controller",
    "hang",
    "OOM text on stderr",
    "OOM by rlimit",
    "full disk",
    "tracking server killed",
    "port taken",
    "torn journal",
    "grandchild holding a pipe",
    "SIGINT",
    "SIGTERM",
)
FIRST_CONFIRM = 5
"""Number of the first confirmation trial: baseline, three search trials and a sentinel precede."""

_RECORDED_AS = {
    "exception": "crash",
    "exit code": "crash",
    "hang": "timeout",
    "OOM text on stderr": "oom",
    "OOM by rlimit": "oom",
    "grandchild holding a pipe": "timeout",
}
_FIRST_EXIT = {
    "SIGKILL of the controller": -9,
    "torn journal": -9,
    "full disk": 3,
    "SIGINT": 130,
    "SIGTERM": 143,
}
_SEARCH = (
    "runner=ddp",
    "runner.device=cpu",
    "workload=custom",
    "workload.factory=_faulty_job:build",
    "workload.global_batch=8",
    "~runner.knobs",
    "+runner.knobs={dataloader_workers: [0, 1], bucket_cap_mb: [1, 25]}",
    "numerics=altering",
    "strategy=random",
    "budget.trials=3",
    "budget.seconds=null",
    "sentinel_every=2",
    "confirm.finalists=1",
    "confirm.max_repeats=2",
    "limits.startup_s=120",
    "limits.trial_s=10",
    "limits.grace_s=4",
)
_LONGEST_S = 240.0
_ORPHANS_S = 20.0
"""Time for ranks to notice that their controller was killed; they look twice a second."""


@dataclass
class _Case:
    fault: Fault
    directory: Path
    run_dir: Path
    arguments: list[str]
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    may_go_on: bool = False
    codes: list[int] = field(default_factory=list)
    found: Findings = field(default_factory=Findings)

    @property
    def struck_at(self) -> int | None:
        struck = self.directory / "struck"
        return int(struck.read_text()) if struck.exists() else None

    def command(self) -> int:
        """Run the search once; note its exit code and what it left behind."""
        environment = {**os.environ, MARK: self.mark, "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (self.directory / "output.txt").open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "perfsearch.cli.search", *self.arguments],
                cwd=self.directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        (self.directory / "controller.pid").write_text(str(process.pid))
        watch = Watch(process.pid, self.mark, self.run_dir)
        try:
            code = process.wait(_LONGEST_S)
        except subprocess.TimeoutExpired:
            self.found.not_ended.append(f"the command still ran after {_LONGEST_S:g} s")
            process.kill()
            code = process.wait()
        within_s = _ORPHANS_S if code == -9 else 1.0
        left = watch.left(within_s, self.directory / "grandchild.pid")
        self.found.processes_left += left
        self.codes.append(code)
        return code


def run(fault: Fault, home: Path, database: Path) -> Outcome:
    """Run one search with one fault, and whatever it takes to end it; say what was wrong."""
    draw = fault.generator()
    directory = fresh_directory(home / fault.name, database)
    shutil.copy(HERE / "_faulty_job.py", directory)
    begin = time.monotonic()
    on_small_disk = fault.kind == "full disk"
    run_dir = directory / ("disk/run" if on_small_disk else "run")
    told: dict[str, Any] = {
        "kind": fault.kind,
        "trial": draw.choice((0, 1, 2, 3, 4, FIRST_CONFIRM, FIRST_CONFIRM + 1)),
        "rank": draw.randrange(2),
        "word": f"{draw.getrandbits(32):08x}",
        "code": draw.randrange(1, 100),
        "text": draw.choice(OOM_TEXTS),
        "delay_s": draw.random(),
        "generation": draw.randrange(2),
        "hidden": bool(draw.randrange(2)),
        "directory": str(directory / "disk"),
    }
    (directory / "fault.json").write_text(json.dumps(told))
    arguments = [*_SEARCH, f"seed={draw.randrange(2**31)}", f"run_dir={run_dir}"]
    arguments.append(f"limits.lock_directory={directory / 'locks'}")  # it waits for no other search
    case = _Case(fault, directory, run_dir, arguments)
    case.may_go_on = fault.kind == "SIGKILL of the launcher" and told["generation"] == 1
    outcome = Outcome(fault, f"trial {told['trial']}, rank {told['rank']}")
    if on_small_disk:
        with small_disk(directory / "disk", "2m") as reason:
            outcome.skipped = reason
            if not reason:
                _through(case, draw)
    elif fault.kind == "tracking server killed":
        _without_server(case)
    else:
        _through(case, draw)
    outcome.exit_codes = case.codes
    outcome.struck = case.struck_at is not None
    outcome.findings = {k: v for k, v in vars(case.found).items() if v}
    outcome.seconds = time.monotonic() - begin
    if not outcome.findings:
        shutil.rmtree(directory, ignore_errors=True)
    return outcome


def _through(case: _Case, draw: Any) -> None:
    first = _FIRST_EXIT.get(case.fault.kind, 0)
    before = []
    case.command()
    wanted = [exit_code(case.struck_at, _RECORDED_AS.get(case.fault.kind, "ok"))]
    if first and case.struck_at is not None:
        wanted = [first, 0]
        (case.directory / "disk" / "filler").unlink(missing_ok=True)
        if case.fault.kind == "torn journal":
            tear(case.run_dir / "journal.jsonl", draw)
        before.append(journal_of(case.run_dir)[1])
        case.command()
    check_codes(case.codes, wanted, case.found)
    _check(case, before, case.directory / "mlflow.db")


def _without_server(case: _Case) -> None:
    database, port = case.directory / "server.db", free_port()
    shutil.move(case.directory / "mlflow.db", database)
    server = Server(database, port)
    case.arguments.append(f"tracking.uri={server.uri}")
    (case.directory / "server.pid").write_text(str(server.process.pid))
    try:
        case.command()
        check_codes(case.codes, [0], case.found)
        server.kill()
        server = Server(database, port)
        sync = [sys.executable, "-m", "perfsearch.cli.sync", str(case.run_dir)]
        uploaded = subprocess.run(sync, timeout=_LONGEST_S, check=False, capture_output=True)
        if uploaded.returncode:
            case.found.other.append(f"perfsearch-sync: {uploaded.stderr.decode()[-300:]}")
    finally:
        server.kill()
    _check(case, [], database)


def _check(case: _Case, before: list[list[Any]], database: Path) -> None:
    struck, kind = case.struck_at, case.fault.kind
    if not (case.run_dir / "journal.jsonl").exists():
        case.found.not_ended.append("it never began: there is no journal")
        return
    expected: dict[int, set[str]] = {}
    if struck is not None and kind in _RECORDED_AS:
        expected = {struck: {_RECORDED_AS[kind]}}
    check_trials(case.run_dir, expected, before, case.found)
    check_view(case.run_dir, database, case.codes[-1], case.found)
    retried = kind in ("SIGKILL of a rank", "SIGKILL of the launcher", "port taken")
    retried = retried and not case.may_go_on
    if struck is not None and retried and attempts(case.run_dir, struck) < 2:
        case.found.wrong_status.append(f"trial {struck} was not started again")
