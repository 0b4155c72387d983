"""The commands where a standard stream is closed, or the current directory is gone."""

import subprocess
import sys
from pathlib import Path

import pytest

from perfsearch.core.journal import read

TABLE = Path(__file__).parents[1] / "data" / "ddp_gpt2small_4xh100_tcp.csv"
REPLAY = [
    "runner=replay", f"runner.table={TABLE}", "strategy=random", "budget.trials=2",
    "confirm.max_repeats=2", "tracking.enabled=false", "run_dir=run",
]  # fmt: skip
SYNC = "cli.sync"
MODULES = {"perfsearch": "cli.search", "perfsearch-run": "cli.run", "perfsearch-sync": SYNC}


def start(directory, redirection, module, *arguments):
    command = [sys.executable, "-m", f"perfsearch.{module}", *arguments]
    shell = ["sh", "-c", f'exec "$@" {redirection}', "sh", *command]
    return subprocess.run(shell, cwd=directory, capture_output=True, text=True, timeout=120)


def test_a_search_runs_with_every_standard_stream_closed(tmp_path):
    """What is printed must not end up in a file that was opened under the number of a stream."""
    done = start(tmp_path, "<&- >&- 2>&-", "cli.search", *REPLAY)
    assert done.returncode == 0
    _, events = read(tmp_path / "run" / "journal.jsonl")
    assert events[-1].name == "ended"


@pytest.mark.parametrize("command", MODULES)
def test_every_command_runs_with_its_output_closed(tmp_path, command):
    done = start(tmp_path, ">&-", MODULES[command], "--help")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", MODULES)
def test_every_command_says_that_its_directory_is_gone(tmp_path, command):
    arguments = {"perfsearch": REPLAY, "perfsearch-run": ["train.py"], "perfsearch-sync": ["run"]}
    (tmp_path / "gone").mkdir()
    code = f"import os, perfsearch.{MODULES[command]} as c; os.rmdir(os.getcwd()); exit(c.main())"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments[command]],
        cwd=tmp_path / "gone",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"{command}: the current directory cannot be used (No such file")
    assert done.stderr.count("\n") == 1
