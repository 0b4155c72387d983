"""The command itself over two gloo processes, ended from outside."""

import json
import multiprocessing
import os
import shutil
import sqlite3
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))

from _fault_checks import MARK, Findings, Watch, check_trials, check_view, journal_of  # noqa: E402

pytestmark = pytest.mark.slow

SEARCH = [
    "runner=ddp", "runner.device=cpu", "workload=custom", "workload.factory=_faulty_job:build",
    "workload.global_batch=8", "~runner.knobs", "+runner.knobs={bucket_cap_mb: [1, 25, 50]}",
    "strategy=random", "budget.trials=2", "budget.seconds=null", "confirm.finalists=0",
    "limits.grace_s=5", "run_dir=run",
]  # fmt: skip


@pytest.fixture
def directory(tmp_path):
    shutil.copy(BENCHMARKS / "_faulty_job.py", tmp_path)
    return tmp_path


def run(directory, fault=None):
    """Exit code, output and processes left, one second after the command's end."""
    (directory / "struck").unlink(missing_ok=True)
    (directory / "fault.json").unlink(missing_ok=True)
    if fault:
        (directory / "fault.json").write_text(json.dumps({"rank": 1, "delay_s": 0.2, **fault}))
    mark = uuid.uuid4().hex
    with (directory / "output.txt").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "perfsearch.cli.search", *SEARCH],
            cwd=directory,
            env={**os.environ, MARK: mark, "MLFLOW_DISABLE_TELEMETRY": "true"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    (directory / "controller.pid").write_text(str(process.pid))
    watch = Watch(process.pid, mark, directory / "run")
    try:
        code = process.wait(200)
    finally:
        process.kill()
    return code, (directory / "output.txt").read_text(), watch.left(within_s=1.0)


def statuses(directory):
    """Status in MLflow by trial, the search's under ``None``."""
    with sqlite3.connect(directory / "mlflow.db") as store:
        return dict(
            store.execute(
                "select t.value, r.status from runs r left join tags t"
                " on t.run_uuid = r.run_uuid and t.key = 'perfsearch.trial'"
            )
        )


def test_a_signal_in_the_middle_of_a_trial(directory):
    """QUARK-framework/QUARK#111, youngwanLEE/CenterMask#58, bghira/SimpleTuner#1901.

    Also hydra-ecosystem/hydra#1126 and hydra-ecosystem/hydra#547: a log for each rank.
    """
    code, output, left = run(directory, {"kind": "SIGINT", "trial": 2})
    assert (code, left) == (130, [])
    assert "interrupted after 2 trials; the same command goes on from here" in output
    assert "baseline" in output and ("best so far" in output or "fastest other" in output)
    assert statuses(directory) == {
        None: "KILLED", "0": "FINISHED", "1": "FINISHED", "2": "KILLED",
    }  # fmt: skip
    before = [journal_of(directory / "run")[1]]
    code, output, left = run(directory, {"kind": "SIGTERM", "trial": 2})
    assert (code, left) == (143, [])
    before.append(journal_of(directory / "run")[1])
    code, output, left = run(directory)
    assert (code, left) == (0, [])
    assert "going on with" in output
    found = Findings()
    check_trials(directory / "run", {}, before, found)
    check_view(directory / "run", directory / "mlflow.db", 0, found)
    assert not found, found
    for rank in (0, 1):
        log = (directory / "run" / "logs" / "0001" / f"rank{rank}.log").read_text()
        assert 'request {"serial": ' in log
    assert "request {" not in output
    assert not (directory / "run" / "groups").exists()


def test_a_daemonic_process_can_run_a_search_with_loader_processes(directory):
    """hydra-ecosystem/hydra#964: joblib's workers are daemonic and may have no children."""

    def child():
        os.chdir(directory)
        from perfsearch.cli.search import main

        arguments = [a for a in SEARCH if not a.startswith(("+runner", "budget.trials"))]
        knobs = "+runner.knobs={dataloader_workers: 1}"
        os._exit(main([*arguments, knobs, "budget.trials=0", "tracking.enabled=false"]))

    process = multiprocessing.get_context("fork").Process(target=child, daemon=True)
    process.start()
    process.join(150)
    assert process.exitcode == 0
    events = journal_of(directory / "run")[1]
    trial = next(e.data["trial"] for e in events if e.name == "finished")
    assert trial["status"] == "ok"
    assert trial["measurement"]["in_force"]["dataloader_workers"] == 1
