"""The commands ``perfsearch session`` and ``perfsearch try``, in processes of their own."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from perfsearch.cli import search as cli
from perfsearch.pipeline.session_socket import SOCKET

TABLE = """bucket,algorithm,status,samples_per_s,step_ms,peak_allocated_gib
1,ring,ok,10,9 9 9,1
2,ring,ok,20,4.5 4.5 4.5,1
4,ring,oom,,,
1,tree,ok,10,9 9 9,1
2,tree,ok,10,9 9 9,1
"""


class Opened:
    """A session in a process of its own, once it can be asked."""

    def __init__(self, directory: Path, *words: str) -> None:
        self.run_dir = directory / "outputs" / "session"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "perfsearch.cli.search", "session", *words],
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.said: list[str] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)
            if line.startswith("in another terminal:"):
                return
        raise AssertionError("".join(self.said))

    def end(self, number: int = signal.SIGINT) -> int:
        """Send it a signal and wait; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.said.append(self.process.communicate(timeout=120)[0])
        return self.process.returncode

    @property
    def text(self) -> str:
        return "".join(self.said)


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """Opens a session in a new current directory, and ends it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.csv").write_text(TABLE)
    found = []

    def open_one(*words):
        found.append(Opened(tmp_path, *words, "tracking.enabled=false"))
        return found[-1]

    yield open_one
    for one in found:
        if one.process.poll() is None:
            one.end(signal.SIGTERM)


@pytest.fixture
def tried(capsys):
    """Runs ``perfsearch try``; its exit code, output and errors."""

    def run(*words):
        code = cli.main(["try", *words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


REPLAY = ("runner=replay", "runner.table=table.csv")


def test_a_session_is_asked_from_another_process_and_ends_by_ctrl_c(opened, tried):
    session = opened(*REPLAY)
    code, out, _ = tried("bucket=2")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["baseline", "tried"]
    assert "one reading of each: it shows no gain" in out
    code, out, _ = tried("--json", "--repeats", "3", "runner.knobs.bucket=2")
    assert code == 0
    assert json.loads(out)["interval"]["pairs"] == 3
    code, out, _ = tried("bucket=4")
    assert code == 1 and "tried: oom: " in out
    code, _, err = tried("bucket=3.5")
    assert code == 2 and err.startswith("perfsearch try: runner.knobs.bucket=3.5: allowed: ")
    assert session.end() == 0, session.text
    assert "session ended: Ctrl-C; 3 tries" in session.text
    assert not (session.run_dir / SOCKET).exists()
    assert (session.run_dir / "report.html").exists()
    code, _, err = tried("bucket=2")
    assert code == 2 and "no session is open below outputs" in err


def test_a_session_is_ended_from_the_other_terminal(opened, tried):
    session = opened(*REPLAY)
    assert tried("--end")[0] == 0
    assert session.process.wait(timeout=120) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bucket"], "bucket"),
        (["bucket=1,2"], "one value at a time"),
        (["bucket=[1,2]"], "one value at a time"),
        (["+bucket=1"], "knobs"),
        (["seed.x=1"], "knobs alone can be tried"),
        (["--repeats", "0", "bucket=1"], "--repeats: '0': allowed: a whole number >= 1"),
        (["--end", "bucket=1"], "give KEY=VALUE ..., or --end"),
        (["--json"], "give KEY=VALUE ..., or --end"),
        (["bucket=1"], "no session is open below outputs"),
    ],
)
def test_what_cannot_be_asked_is_said_in_one_line(tried, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    code, out, err = tried(*words)
    assert (code, out) == (2, "")
    assert err.startswith("perfsearch try: ") and said in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["mode=profile"], "mode=profile: a session has only mode=search"),
        (["-m", "seed=1,2"], "--multirun: a session is of one job"),
        (["--idle-minutes", "0"], "--idle-minutes: '0': allowed: a number > 0"),
        (["sed=1"], "Did you mean 'seed'?"),
    ],
)
def test_a_session_refuses_before_anything_starts(command, tmp_path, words, said):
    from support.front_fakes import PREFIX

    code, _, err = command("session", *PREFIX, *words, prefix=False)
    assert code == 2 and said in err
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_real_job_stays_warm_between_two_tries(opened, tried, short_tmp, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(short_tmp))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    session = opened(
        "runner=ddp", "runner.device=cpu", "nproc=2", "workload=mlp", "workload.size=tiny"
    )
    replies = []
    for knobs in ("bucket_cap_mb=4", "bucket_cap_mb=8", "dataloader_workers=0"):
        code, out, err = tried("--json", knobs)
        assert code == 0, err + out
        replies.append(json.loads(out))
    arms = [reply[name] for reply in replies for name in ("baseline", "tried")]
    assert not any(arm["new_processes"] for arm in arms)
    assert all(reply["ratio"] > 0 for reply in replies)
    code, _, err = tried("bucket_cap_mb=4000")
    assert code == 2 and "runner.knobs.bucket_cap_mb=4000: allowed is 1 to 512 MiB" in err
    assert session.end() == 0, session.text
    assert not _left_running(session.process.pid), "nothing is left running"


def _left_running(parent: int) -> list[int]:
    """Processes in the current directory, which is this test's own."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if os.path.realpath(process.cwd()) == os.path.realpath(os.getcwd()):
                found.append(process.pid)
        except psutil.Error:
            continue
    return [pid for pid in found if pid not in (os.getpid(), parent)]
