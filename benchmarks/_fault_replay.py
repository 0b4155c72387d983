"""Faults in replayed searches: the command's own code in a process of its own, on a table.

The process is forked from one that has imported everything, so that hundreds of them take minutes.
Where there are no ranks to fail, the runner answers as the workers would, through the same
classification; what can really be done without ranks (signals, disks, ports, servers) is done.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from _fault_checks import (
    Findings,
    attempts,
    check_trials,
    check_view,
    exit_code,
    journal_of,
    last_ends,
)
from _fault_common import (
    Fault,
    Outcome,
    Server,
    check_codes,
    free_port,
    fresh_directory,
    small_disk,
    tear,
)
from _fault_strikes import at_attempts, at_event, at_trial, failures, fill, signal_and_wait

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
    "SIGINT",
    "SIGTERM",
)
_TRIALS = 8
"""Baseline, six search trials and a sentinel; confirmation comes after them."""
_EVENTS = 40
"""A search has at least so many events, and half of that many more."""
_LONGEST_S = 120.0
_PROXY = """
import selectors, socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
target = ("127.0.0.1", int(sys.argv[2]))
print("ready", flush=True)
ends, pairs = selectors.DefaultSelector(), {}
ends.register(listener, selectors.EVENT_READ)
while True:
    for key, _ in ends.select():
        if key.fileobj is listener:
            near, far = listener.accept()[0], socket.create_connection(target)
            pairs[near], pairs[far] = far, near
            ends.register(near, selectors.EVENT_READ), ends.register(far, selectors.EVENT_READ)
            continue
        try:
            data = key.fileobj.recv(65536)
        except OSError:
            data = b""
        if data:
            pairs[key.fileobj].sendall(data)
        elif key.fileobj in pairs:
            other = pairs.pop(key.fileobj)
            pairs.pop(other, None)
            for end in (key.fileobj, other):
                ends.unregister(end), end.close()
"""


@dataclass
class _Case:
    fault: Fault
    directory: Path
    run_dir: Path
    arguments: list[str]
    codes: list[int] = field(default_factory=list)
    found: Findings = field(default_factory=Findings)

    def command(self, prepare: Callable[[], None] = lambda: None) -> int:
        """Run the search once in a fork; ``prepare`` puts the fault into it."""
        pid = os.fork()
        if pid == 0:
            _be_command(self.directory, self.arguments, prepare)
        deadline = time.monotonic() + _LONGEST_S
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                break
            if time.monotonic() > deadline:
                self.found.not_ended.append(f"the command still ran after {_LONGEST_S:g} s")
                os.killpg(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
                break
            time.sleep(0.01)
        try:
            os.killpg(pid, 0)  # its own session: whatever it started and left is in this group
            self.found.processes_left.append(f"process group {pid}")
        except ProcessLookupError:
            pass
        self.codes.append(os.waitstatus_to_exitcode(status))
        return self.codes[-1]


def _be_command(directory: Path, arguments: list[str], prepare: Callable[[], None]) -> NoReturn:
    code = 70
    try:
        os.setsid()
        os.closerange(3, 4096)
        os.chdir(directory)
        output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        prepare()
        from perfsearch.cli import search as cli

        code = int(cli.main(arguments))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def make_table(path: Path, draw: random.Random) -> None:
    """36 configurations with step times; the baseline is the slowest."""
    lines = ["bucket,view,algorithm,status,samples_per_s,step_ms"]
    for bucket in (1, 2, 4, 8, 16, 32):
        for view in ("false", "true"):
            for place, algorithm in enumerate(("ring", "tree", "direct")):
                slow = 100 - 8 * bucket.bit_length() - 9 * (view == "true") - 5 * place
                steps = " ".join(f"{slow * (1 + draw.uniform(-0.01, 0.01)):.4f}" for _ in range(5))
                lines.append(f"{bucket},{view},{algorithm},ok,{32e3 / slow:.3f},{steps}")
    path.write_text("\n".join(lines) + "\n")


def run(fault: Fault, home: Path, database: Path, server: Callable[[], Server]) -> Outcome:
    """Run one search with one fault, and whatever it takes to end it; say what was wrong."""
    draw = fault.generator()
    directory = fresh_directory(home / fault.name, database)
    make_table(directory / "table.csv", draw)
    begin = time.monotonic()
    run_dir = directory / ("disk/run" if fault.kind == "full disk" else "run")
    baseline = "{bucket: 1, view: false, algorithm: ring}"
    arguments = [
        "runner=replay",
        "runner.table=table.csv",
        f"runner.baseline={baseline}",
        f"strategy={draw.choice(('random', 'bayes', 'mcmc', 'nevergrad'))}",
        f"seed={draw.randrange(2**31)}",
        "budget.trials=6",
        "budget.seconds=null",
        "sentinel_every=4",
        "confirm.max_repeats=3",
        "confirm.seconds=null",
    ]
    case = _Case(fault, directory, run_dir, [*arguments, f"run_dir={run_dir}"])
    trial = draw.randrange(_TRIALS)
    outcome = Outcome(fault, f"{arguments[3]}, trial {trial}")
    if fault.kind == "full disk":
        with small_disk(directory / "disk", "512k") as outcome.skipped:
            if not outcome.skipped:
                _broken_off(case, 3, at_trial(trial, lambda: fill(directory / "disk")))
    elif fault.kind in ("SIGKILL of the controller", "torn journal"):
        place, phase = draw.randrange(1, _EVENTS), draw.choice(("before", "middle", "after"))
        outcome.detail = f"{arguments[3]}, {phase} event {place}"
        torn = draw if fault.kind == "torn journal" else None
        _broken_off(case, -9, at_event(place, phase), torn)
    elif fault.kind in ("SIGINT", "SIGTERM"):
        number = getattr(signal, fault.kind)
        code = {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
        _broken_off(case, code, at_trial(trial, lambda: signal_and_wait(number)))
    elif fault.kind == "tracking server killed":
        _without_server(case, trial, server())
    else:
        _failing(case, trial, draw)
    outcome.exit_codes = case.codes
    outcome.findings = {k: v for k, v in vars(case.found).items() if v}
    outcome.seconds = time.monotonic() - begin
    if not outcome.findings:
        shutil.rmtree(directory, ignore_errors=True)
    return outcome


def _broken_off(
    case: _Case, code: int, prepare: Callable[[], None], torn: random.Random | None = None
) -> None:
    """A search that ends early and is started again; it must come to the same as a calm one."""
    before = []
    case.command(prepare)
    (case.directory / "disk" / "filler").unlink(missing_ok=True)
    journal = case.run_dir / "journal.jsonl"
    if journal.exists():  # a kill may come before there is one
        if torn is not None and journal.read_bytes().count(b"\n") > 1:
            tear(journal, torn)
        before.append(journal_of(case.run_dir)[1])
    case.command()
    check_codes(case.codes, [code, 0], case.found)
    _check(case, {}, before, case.directory / "mlflow.db")
    calm = _Case(case.fault, case.directory, case.directory / "calm", [])
    calm.arguments = [*case.arguments[:-1], f"run_dir={calm.run_dir}", "tracking.enabled=false"]
    calm.command()
    check_codes(calm.codes, [0], case.found)
    if _story(case.run_dir) != _story(calm.run_dir):
        case.found.other.append("it came to something else than an undisturbed search")


def _story(run_dir: Path) -> list[Any]:
    keys = ("configuration", "purpose", "status", "cost")
    summary = json.loads((run_dir / "best" / "summary.json").read_text())
    best = [summary[key] for key in ("trial", "knobs", "verdict", "speed_up")]
    return [best, [(n, [t[k] for k in keys]) for n, t in sorted(last_ends(run_dir).items())]]


def _without_server(case: _Case, trial: int, server: Server) -> None:
    port = free_port()
    proxy = _start_proxy(port, server)
    case.arguments.append(f"tracking.uri=http://127.0.0.1:{port}")
    try:
        case.command(at_trial(trial, lambda: os.kill(proxy.pid, signal.SIGKILL)))
        check_codes(case.codes, [0], case.found)
        proxy.wait(10)
        proxy = _start_proxy(port, server)
        sync = [sys.executable, "-m", "perfsearch.cli.sync", str(case.run_dir)]
        uploaded = subprocess.run(sync, timeout=_LONGEST_S, check=False, capture_output=True)
        if uploaded.returncode:
            case.found.other.append(f"perfsearch-sync: {uploaded.stderr.decode()[-300:]}")
    finally:
        proxy.kill()
        proxy.wait(10)
    _check(case, {}, [], server.database)


def _start_proxy(port: int, server: Server) -> subprocess.Popen[bytes]:
    """A process that stands for the server, so that one server serves every fault."""
    command = [sys.executable, "-S", "-c", _PROXY, str(port), server.uri.rpartition(":")[2]]
    proxy = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert proxy.stdout is not None
    proxy.stdout.readline()
    proxy.stdout.close()
    return proxy


def _failing(case: _Case, trial: int, draw: random.Random) -> None:
    """A trial that fails as the workers would tell it, once or at every attempt."""
    kind, times = case.fault.kind, draw.choice((1, 3))
    rank = draw.randrange(2)
    wanted, failure = failures(kind, rank, draw)
    if wanted in ("killed", "infrastructure"):
        wanted = wanted if times == 3 else "ok"
        counts = times
    else:
        counts = 1
    case.command(at_attempts(trial, counts, failure))
    check_codes(case.codes, [exit_code(trial, wanted)], case.found)
    _check(case, {trial: {wanted}}, [], case.directory / "mlflow.db")
    if attempts(case.run_dir, trial) != min(3, counts + (wanted == "ok")):
        case.found.wrong_status.append(f"{attempts(case.run_dir, trial)} attempts")


def _check(
    case: _Case, expected: dict[int, set[str]], before: list[list[Any]], database: Path
) -> None:
    check_trials(case.run_dir, expected, before, case.found)
    check_view(case.run_dir, database, case.codes[-1], case.found)
