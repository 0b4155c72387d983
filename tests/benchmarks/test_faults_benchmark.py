"""The short version of the benchmark of faults, and the checks that it relies on."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import faults  # noqa: E402
from _fault_checks import Findings, check_trials  # noqa: E402

from perfsearch.core.journal import Journal  # noqa: E402


@pytest.mark.slow
def test_no_fault_loses_or_leaves_anything():
    """morganlinton/VulcanBench#112, cfengine/core#6305, optuna/optuna#4234: one of each kind."""
    command = [sys.executable, str(BENCHMARKS / "faults.py"), "run", "--short"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| trials lost | 0 |" in done.stdout
    assert done.stdout.count(": good\n") == 6


def test_lanes_are_together_all_faults_once():
    whole = faults.planned(60, 240, 0)
    lanes = [whole[faults.lane(f"{place}/12")] for place in range(1, 13)]
    assert sorted(fault.name for lane in lanes for fault in lane) == sorted(f.name for f in whole)
    for text in ("0/12", "13/12", "3", "3/x"):
        with pytest.raises(argparse.ArgumentTypeError, match="such as 3/12"):
            faults.lane(text)


def journal(path, *ends, started=(0, 1)):
    made = Journal(path / "journal.jsonl", {})
    for number in started:
        made.append("started", trial=number)
    for number, status, cost in ends:
        made.append(
            "finished", trial={"number": number, "status": status, "cost": cost, "reason": ""}
        )
    made.append("ended")
    made.close()
    return path


@pytest.mark.parametrize(
    ("ends", "started", "count"),
    [
        ([(0, "ok", 1.0)], (0, 1), "trials_lost"),
        ([(0, "ok", 1.0), (2, "ok", 1.0)], (0, 2), "trials_lost"),
        ([(0, "ok", 1.0), (1, "oom", None)], (0, 1), "wrong_status"),
        ([(0, "ok", 1.0), (1, "ok", None)], (0, 1), "wrong_status"),
        ([(0, "ok", 1.0), (1, "ok", 1.0)], (0, 1), ""),
    ],
)
def test_the_checks_see_what_is_wrong(tmp_path, ends, started, count):
    found = Findings()
    check_trials(journal(tmp_path, *ends, started=started), {}, [], found)
    assert [name for name, value in vars(found).items() if value] == ([count] if count else [])


def test_a_trial_that_had_ended_and_ran_again_is_seen(tmp_path):
    run_dir = journal(tmp_path, (0, "ok", 1.0), started=(0,))
    from _fault_checks import journal_of

    before = journal_of(run_dir)[1]
    again = Journal.reopen(run_dir / "journal.jsonl")
    again.append("started", trial=0)
    again.append("finished", trial={"number": 0, "status": "ok", "cost": 1.0, "reason": ""})
    again.append("ended")
    again.close()
    found = Findings()
    check_trials(run_dir, {}, [before], found)
    assert found.other == ["trial 0 had ended and was run again"]
    assert json.loads((run_dir / "journal.jsonl").read_text().splitlines()[0])["schema"] == 1
