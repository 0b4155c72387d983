"""The commands where a standard stream is closed, or the current directory is gone."""

import json
import re
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


@pytest.mark.parametrize("command", ["perfsearch", "perfsearch-run"])
def test_output_that_a_disk_has_no_room_for_is_told_in_one_line(tmp_path, command):
    done = start(tmp_path, ">/dev/full", MODULES[command], "--help")
    told = f"{command}: [Errno 28] No space left on device. Free some space, then give the same"
    assert (done.returncode, done.stderr) == (3, f"{told} command again.\n")


WITHOUT_DESCRIPTORS = """
import importlib, json, os, resource, sys
for name in ("search", "run", "sync"):
    importlib.import_module(f"perfsearch.cli.{name}")
for place, (module, *arguments) in enumerate(json.loads(sys.argv[1])):
    pid = os.fork()
    if pid:
        (_, status) = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status))
        continue
    with open(f"errors{place}", "w") as errors:
        os.dup2(errors.fileno(), 2)
    number = max(map(int, os.listdir("/proc/self/fd")))  # that of the listing, which is closed
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, number))
    sys.exit(sys.modules[f"perfsearch.{module}"].main(arguments))
"""

COMMANDS = [
    ("perfsearch", ["cli.search", *REPLAY]),
    ("perfsearch compare", ["cli.search", "compare", "train.py", "train.py --lr 1"]),
    ("perfsearch space", ["cli.search", "space", "--command", "train.py"]),
    ("perfsearch session", ["cli.search", "session", "--command", "train.py"]),
    ("perfsearch try", ["cli.search", "try", "view=true"]),
    ("perfsearch-run", ["cli.run", "--nproc-per-node", "2", "train.py"]),
    ("perfsearch-run", ["cli.run", "--search", "train.py"]),
    ("perfsearch-sync", ["cli.sync", "run"]),
]


def test_every_command_without_descriptors_ends_in_one_line(tmp_path):
    """Found by benchmarks/soak.py (compare 311111475): a traceback."""
    (tmp_path / "train.py").write_text("import torch\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "journal.jsonl").write_text("{}\n")
    asked = json.dumps([arguments for _, arguments in COMMANDS])
    command = [sys.executable, "-c", WITHOUT_DESCRIPTORS, asked]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3"] * len(COMMANDS)
    for place, (named, _) in enumerate(COMMANDS):
        told = (tmp_path / f"errors{place}").read_text()
        assert re.fullmatch(
            rf"{named}: \[Errno 24\] Too many open files.*\. Raise the limit of open files "
            r"\(ulimit -n\), then give the same command again\.\n",
            told,
        ), told
