"""A script that perfsearch-run is given without a word on ranks: started as python starts it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "data" / "scripts"
KNOBS = ["--knobs", "knobs.yaml"]
NAME = "runner.knobs.optimizer_implementation"


def run(directory, *words):
    (directory / "knobs.yaml").write_text("optimizer_implementation: foreach\n")
    return subprocess.run(
        [sys.executable, "-m", "perfsearch.cli.run", *words], cwd=directory, capture_output=True,
        text=True, timeout=120, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "nothing was changed"),
        (KNOBS, "in force: optimizer_implementation=foreach"),
        ([*KNOBS, "-o", f"{NAME}=fused"], "in force: optimizer_implementation=fused"),
        ([*KNOBS, "-o", f"~{NAME}"], "nothing was changed"),
    ],
)
def test_it_has_no_rank(tmp_path, options, says):
    done = run(tmp_path, *options, SCRIPTS / "refuses_a_rank.py", "--log", "a 'b'", "--")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained --log a 'b' --\n"
    assert says in done.stderr


@pytest.mark.slow
def test_an_option_of_torchrun_gives_it_one(tmp_path):
    done = run(tmp_path, "--nproc-per-node=1", "--standalone", SCRIPTS / "refuses_a_rank.py")
    assert done.returncode == 1
    assert "rank 0 has no GPU" in done.stderr


@pytest.mark.slow
def test_one_that_needs_a_rank_is_given_one(tmp_path):
    done = run(tmp_path, *KNOBS, SCRIPTS / "needs_a_rank.py", "at once")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "begins\nbegins\ntrained as rank 0\n"
    assert "the script is one for torchrun (KeyError: 'RANK')" in done.stderr
    assert "Traceback" not in done.stderr and "os.exec" not in done.stderr
    assert "in force: optimizer_implementation=foreach" in done.stderr


def test_what_has_trained_is_not_trained_again(tmp_path):
    done = run(tmp_path, SCRIPTS / "needs_a_rank.py", "late")
    assert done.returncode == 1
    assert done.stdout == "begins\n"
    assert "KeyError: 'RANK'" in done.stderr and "one for torchrun" not in done.stderr
