"""``perfsearch compare`` on real starts of a small script."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import venv
from pathlib import Path

import psutil
import pytest
from support.compared import SCRIPT, git

pytestmark = pytest.mark.slow

EVERYTHING = (0, 4, 5)
"""Exit codes of jobs that compute the same."""


@pytest.fixture
def here(tmp_path, short_tmp, monkeypatch):
    """A directory with the script; ``TMPDIR`` is one of its own."""
    monkeypatch.setenv("TMPDIR", str(short_tmp))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.py").write_text(SCRIPT)
    return tmp_path / "work"


def started(here, *words):
    """The command, under way."""
    return subprocess.Popen(
        [sys.executable, "-m", "perfsearch.cli.search", "compare", *words],
        cwd=here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def compared(here, *words):
    """Exit code and output."""
    process = started(here, *words)
    output, _ = process.communicate(timeout=500)
    assert not left_of_worktrees(), output
    return process.returncode, output


def left_of_worktrees():
    return list(Path(os.environ["TMPDIR"]).glob("perfsearch-*/owner.lock"))


def left_of(here):
    """Processes that run here."""
    seen = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    there = [process for process in psutil.process_iter() if _directory(process) == str(here)]
    return there + [line for line in seen.splitlines() if str(here) in line]


def _directory(process):
    try:
        return process.cwd()
    except psutil.Error:
        return ""


def trials_of(here):
    lines = journal_of(here).splitlines()
    return [json.loads(line)["trial"] for line in lines if '"finished"' in line]


def journal_of(here):
    return (here / "outputs" / "compare" / "journal.jsonl").read_text()


def found(here):
    return json.loads((here / "outputs" / "compare" / "comparison.json").read_text())


def rounds_of(trials):
    """Of each pair of starts that were measured in turns, whose windows were made, in order."""
    pairs = [t for t in trials if "turns" in t["measurement"]["environment"]]
    rounds = []
    for pair in zip(pairs[::2], pairs[1::2], strict=True):
        made = [
            (at, trial["configuration"]["arm"])
            for trial in pair
            for at, _ in trial["measurement"]["environment"]["turns"]
        ]
        rounds.append([arm for _, arm in sorted(made)])
    return rounds


def test_a_commit_that_is_slower_is_found_and_everything_is_as_it_was(here):
    """A loop made more than twice as slow; it also overwrites a file of the user's.

    Both are alive at a time, and their windows alternate.
    """
    saves = SCRIPT.replace("for epoch", "open('state.txt', 'w').write('trial')\nfor epoch")
    (here / "train.py").write_text(saves)
    (here / "state.txt").write_text("mine")
    git(here, "init", "-q")
    git(here, "add", ".")
    git(here, "commit", "-qm", "first")
    (here / "train.py").write_text(saves.replace("default=0.010", "default=0.030"))
    file = here / "perf.yaml"
    file.write_text("reference: git:HEAD\ncommand: train.py\nallowed_slowdown: 0.05\n")
    code, output = compared(here, "--baseline", "perf.yaml", "--json", "out.json")
    assert code == 5, output
    assert "train.py: at least " in output and " slower than git:HEAD (about " in output
    assert (here / "state.txt").read_text() == "mine"
    assert json.loads((here / "out.json").read_text()) == found(here)
    assert "mlflow ui" in output
    status = subprocess.run(
        ["git", "status", "--short"], cwd=here, capture_output=True, text=True, check=True
    ).stdout.split()
    assert {"state.txt"}.isdisjoint(status)
    assert not (here / ".perfsearch-undo").exists()
    trials = trials_of(here)
    rounds = rounds_of(trials)
    assert len(rounds) == len(found(here)["arms"][1]["rates"]) >= 3
    for names in rounds:
        assert len(names) >= 4 and len(names) % 4 == 0
        for at in range(0, len(names), 4):
            one, other = names[at : at + 2]
            assert one != other and names[at : at + 4] == [one, other, other, one]
    for trial in trials[2:]:
        measured = trial["measurement"]
        made = sum(steps for _, steps in measured["environment"]["turns"])
        assert made == len(measured["step_seconds"])


def test_starts_that_cannot_be_alive_together_are_measured_one_at_a_time(here):
    """Both want one port; one is of an environment that has torch and no perfsearch."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    venv.create(here.parent / "other", with_pip=False, symlinks=True)
    python = here.parent / "other" / "bin" / "python"
    packages = Path(__import__("torch").__file__).parent.parent
    (place,) = (here.parent / "other" / "lib").glob("python*/site-packages")
    (place / "torch.pth").write_text(f"{packages}\n")
    says = "import sys, os\nprint('it is', sys.prefix, os.environ.get('MARK'), flush=True)\n"
    takes = f"import socket\nheld = socket.socket()\nheld.bind(('127.0.0.1', {port}))\n"
    (here / "train.py").write_text(says + takes + SCRIPT)
    arms = f"python:{python}", "MARK=7 train.py --sleep 0.012"
    code, output = compared(
        here, *arms, "--command", "train.py", "--max-starts", "2", "--no-tracking"
    )
    assert code in EVERYTHING, output
    said = "starts are measured one at a time from now on, as trial "
    assert output.count(said) == 1 and "Address already in use" in output, output
    assert [len(row["rates"]) for row in found(here)["arms"]] == [2, 2]
    assert not rounds_of([t for t in trials_of(here) if t["status"] == "ok"])
    logs = {row["name"]: Path(row["log"]).read_text() for row in found(here)["arms"]}
    assert f"it is {here.parent / 'other'} None" in logs[arms[0]]
    assert f"it is {sys.prefix} 7" in logs[arms[1]]
    assert not left_of(here)


def test_another_computation_is_found_out(here):
    rate, width = "train.py --rate 0.5", "train.py --width 32"
    code, output = compared(here, "train.py", rate, width, "--no-tracking")
    assert code == 6, output
    assert f"{rate}: not the same computation: loss of step " in output
    assert f"{width}: not the same computation: trained parameters: 321, and 161 in " in output


def test_a_configuration_that_a_search_found_is_put_into_force(here):
    """Inside one start, as a running script can be switched to it."""
    knobs = {"optimizer_implementation": "foreach"}
    plain = {
        "runner": {"name": "ddp", "device": "cpu", "knobs": knobs},
        "strategy": {"name": "random"},
        "workload": {"name": "script", "command": ["train.py"], "draws_in_loader": False},
    }
    (here / "config.yaml").write_text(json.dumps(plain))
    code, output = compared(
        here, "train.py", "config.yaml", "--max-starts", "2", "--min-gain", "0.2", "--no-tracking",
    )  # fmt: skip
    assert code in EVERYTHING, output
    assert "all are measured inside one start" in output
    trials = trials_of(here)
    (name,) = knobs
    of = {"train.py": set(), "config.yaml": set()}
    for trial in trials:
        of[trial["configuration"]["arm"]].add(trial["measurement"]["in_force"][name])
    assert of["config.yaml"] == set(knobs.values())
    assert of["train.py"].isdisjoint(of["config.yaml"]) and len(of["train.py"]) == 1
    fresh = [trial["fresh_process"] for trial in trials]
    assert fresh[:4] == [True, False, False, False]  # the script may come to its end later on


def test_an_interrupt_says_what_is_known_and_leaves_nothing(here):
    git(here, "init", "-q")
    git(here, "add", ".")
    git(here, "commit", "-qm", "first")
    process = started(here, "git:HEAD", "train.py", "--command", "train.py", "--no-tracking")
    lines = []
    try:
        for line in process.stdout:
            lines.append(line)
            if line.startswith("    1  "):
                break
        while journal_of(here).count('"started"') < 4:  # both of the first block
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, lines
    assert "no verdict" in rest
    assert not left_of_worktrees()
    assert not (here / ".perfsearch-undo").exists()
    assert not left_of(here)
