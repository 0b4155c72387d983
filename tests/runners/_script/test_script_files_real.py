"""The user's files before and after a search over a script, a kill of it, and a resume."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.file_states import state_of

from perfsearch.instrument.user_files import ROOM, UserFiles

pytestmark = pytest.mark.slow

SUPPORT = Path(__file__).parents[2] / "support"
SCRIPTS = Path(__file__).parents[2] / "data" / "scripts"
QUICK = ("budget.trials=2", "confirm.finalists=1", "confirm.max_repeats=1", "run_dir=run")
KNOBS = "runner.knobs={bucket_cap_mb:[1.0,25.0],dataloader_workers:[0,1]}"


class Work:
    """A working directory with a script and files of the user's."""

    def __init__(self, path, temporary, script):
        self.path, self.script = path, script.name
        self.temporary = temporary  # where searches wait for one another
        path.mkdir()
        shutil.copy(script, path)
        for name in ("ckpt.pt", "best.pt", "old.pt", "train.log"):
            (path / name).write_text(f"{name} of the user's")
        (path / "runs" / "first").mkdir(parents=True)
        (path / "runs" / "first" / "args.json").write_text("{}")
        for file in path.rglob("*"):
            os.utime(file, ns=(10**18, 10**18))
        self.before = self.state()

    def state(self):
        return state_of(self.path, "run", ROOM, "__pycache__")

    def search(self, nproc=2):
        words = [
            sys.executable,
            "-m",
            "perfsearch.cli.run",
            "--search",
            f"--nproc-per-node={nproc}",
        ]
        for option in (*QUICK, KNOBS, "tracking.enabled=false"):
            words += ["-o", option]
        with (self.path / "run.log").open("ab") as log:
            return subprocess.Popen(
                [*words, self.script], cwd=self.path, stdout=log, stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary)},
            )  # fmt: skip

    @property
    def said(self):
        return (self.path / "run.log").read_text()

    def check(self):
        state = self.state()
        state.pop("run.log", None)
        assert state == self.before, self.said
        assert not (self.path / ROOM).exists()

    def wait_until(self, holds, process=None, limit_s=180):
        deadline = time.monotonic() + limit_s
        while not holds():
            assert time.monotonic() < deadline and (process is None or process.poll() is None), (
                self.said
            )
            time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_search_leaves_the_files_as_they_were_also_one_that_is_killed(
    tmp_path, short_tmp, number
):
    """The same command goes on with a killed one, to its end."""
    work = Work(tmp_path / "work", short_tmp, SUPPORT / "script_files.py")
    running = work.search()
    work.wait_until(lambda: (work.path / "snapshot.pt").exists(), running)
    running.send_signal(number)
    running.wait(60)
    work.wait_until(lambda: not (work.path / ROOM).exists(), limit_s=30)
    work.check()
    if number == signal.SIGINT:
        return  # what is left is the same, and so is what goes on from there
    running = work.search()
    work.wait_until(lambda: (work.path / "snapshot.pt").exists(), running)
    assert running.wait(400) == 0, work.said
    assert "diverged" not in work.said and "an earlier start's" not in work.said
    assert "changed while starts" not in work.said
    work.check()


def kill_all_in(directory):
    """Kill all processes of a search at once, by their working directory."""

    def found():
        for link in Path("/proc").glob("[0-9]*/cwd"):
            with contextlib.suppress(OSError):
                if os.readlink(link) == str(directory):
                    yield int(link.parent.name)

    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in list(found()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    while list(found()):
        time.sleep(0.05)


def test_a_directory_that_goes_elsewhere_after_a_kill_of_all_is_put_back_there(
    tmp_path, short_tmp, monkeypatch
):
    """First a copy of it, which leaves the original alone, and then the original."""
    work = Work(tmp_path / "work", short_tmp, SUPPORT / "script_files.py")
    running = work.search(nproc=1)
    work.wait_until(lambda: (work.path / "snapshot.pt").exists(), running)
    kill_all_in(work.path)
    running.wait(60)
    assert work.state() != work.before and (work.path / ROOM).exists()
    original, left = work.path, state_of(work.path)
    for command, name in (("cp -a", "copy"), ("mv", "elsewhere")):
        work.path = tmp_path / name
        subprocess.run([*command.split(), original, work.path], check=True)
        monkeypatch.chdir(work.path)
        (said,) = UserFiles([work.path / "run"]).open()
        assert said.startswith("put back what a killed search had changed: ")
        if command == "mv":
            work.check()
            assert not original.exists()
        else:
            assert without_inodes(work.state()) == without_inodes(work.before)
            assert state_of(original) == left


def without_inodes(state):
    """A state with what a copy of a file has too; the log of the search is none of the user's."""
    return {
        path: seen if seen[0] == "directory" else seen[:-1]
        for path, seen in state.items()
        if path != "run.log"
    }


CHANGES = """import subprocess
subprocess.run("echo more >> train.log", shell=True, check=True)
"""

TRAINS = """import torch
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("raise RuntimeError('no data')", 1),
        (TRAINS.replace("while True", "for _ in range(6)"), 2),
        (TRAINS, 130),
    ],
)
def test_what_is_not_undone_is_named_however_the_search_ends(tmp_path, short_tmp, ending, code):
    (tmp_path / "train.py").write_text(CHANGES + ending)
    work = Work(tmp_path / "work", short_tmp, tmp_path / "train.py")
    running = work.search(nproc=1)
    if code == 130:
        work.wait_until(lambda: "\n    0  " in work.said, running)
        running.send_signal(signal.SIGINT)
    assert running.wait(100) == code, work.said
    assert "in a way that is not undone or by others: train.log" in work.said


def test_a_snapshot_of_one_start_is_none_of_the_next(tmp_path, short_tmp):
    work = Work(tmp_path / "work", short_tmp, SCRIPTS / "resumes_from_own_snapshot.py")
    assert work.search().wait(400) == 0, work.said
    logs = [log.read_text() for log in work.path.glob("run/logs/*/rank0.log")]
    assert logs and not any("resuming at epoch" in text for text in logs)
    work.check()


def test_a_checkpoint_is_not_overwritten(tmp_path, short_tmp):
    work = Work(tmp_path / "work", short_tmp, SCRIPTS / "overwrites_checkpoint.py")
    (work.path / "out").mkdir()
    (work.path / "out" / "ckpt.pt").write_text("weeks of training")
    work.before = work.state()
    assert work.search(nproc=1).wait(400) == 0, work.said
    work.check()
