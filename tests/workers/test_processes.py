import json
import os
import subprocess
import sys
import tempfile
import textwrap
import uuid

import pytest

from perfsearch.workers import processes
from perfsearch.workers import processes as registry
from perfsearch.workers.messages import TOKEN_VARIABLE

TREE = textwrap.dedent(
    """
    import os, subprocess, sys, time
    script = "import os, signal, time; signal.signal(15, signal.SIG_IGN); os.setsid(); "
    script += "print('up', flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    child.stdout.readline()
    bare = {k: v for k, v in os.environ.items() if k != "PERFSEARCH_GROUP"}
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=bare)
    print("up", flush=True)
    time.sleep(600)
    """
)


@pytest.fixture
def tree():
    """A marked process with a child that ignores SIGTERM and one that has lost the mark."""
    token = uuid.uuid4().hex
    root = subprocess.Popen(
        [sys.executable, "-c", TREE],
        env={**os.environ, TOKEN_VARIABLE: token},
        stdout=subprocess.PIPE,
    )
    assert root.stdout.readline()
    yield token, root
    processes.end_all(token, grace_s=0)
    root.kill()
    root.wait()
    root.stdout.close()


def test_every_descendant_is_found_and_ended(tree):
    token, root = tree
    found = processes.members(token)
    assert len(found) == 3
    assert root.pid in {p.pid for p in found}
    assert processes.end_all(token, grace_s=0.5) == 3
    assert processes.members(token) == []
    assert not any(p.is_running() and p.status() != "zombie" for p in found)


def test_orphans_are_found_by_their_mark(tree):
    token, root = tree
    root.kill()
    root.wait()
    assert len(processes.members(token)) == 1  # the one that lost the mark has lost its parent too
    processes.end_all(token, grace_s=0)
    assert processes.members(token) == []


def test_a_reused_pid_is_told_apart():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    started = processes.started_at(child.pid)
    assert processes.is_alive(child.pid, started)
    assert not processes.is_alive(child.pid, started - 1)
    child.kill()
    assert not processes.is_alive(child.pid, started) or child.wait()
    child.wait()
    assert not processes.is_alive(child.pid, started)


@pytest.mark.parametrize(("ending", "code"), [("os._exit(0)", 0), ("os._exit(3)", 3),
                                              ("os.kill(os.getpid(), 9)", -9)])  # fmt: skip
def test_how_a_process_ended_is_known_until_its_parent_asks(ending, code):
    child = subprocess.Popen(
        [sys.executable, "-c", f"import os, sys; sys.stdin.read(); {ending}"], stdin=subprocess.PIPE
    )
    started = processes.started_at(child.pid)
    assert processes.exit_code(child.pid, started) is None
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert processes.exit_code(child.pid, started) == code
    assert processes.exit_code(child.pid, started + 1) is None
    child.wait()
    assert processes.exit_code(child.pid, started) is None


def test_leftovers_on_record_are_reaped(tree, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    token, _root = tree
    control = tmp_path / "perfsearch-control"
    control.mkdir()
    registry.record_group(tmp_path, token, control)
    (tmp_path / "groups" / "torn.json").write_text('{"token": "x')
    assert registry.reap_groups(tmp_path, grace_s=0.2) == 3
    assert processes.members(token) == []
    assert not control.exists()
    assert registry.reap_groups(tmp_path) == 0
    assert not (tmp_path / "groups").exists()


def test_leftovers_of_the_arms_of_a_comparison_are_reaped(tree, tmp_path):
    token, _root = tree
    registry.record_group(tmp_path / "arms" / "1", token, tmp_path / "gone")
    assert registry.reap_groups(tmp_path, grace_s=0.2) == 3
    assert processes.members(token) == []
    assert not (tmp_path / "arms" / "1" / "groups").exists()


def test_a_record_cannot_have_a_directory_removed_elsewhere(tmp_path):
    precious = tmp_path / "perfsearch-results"
    precious.mkdir()
    registry.record_group(tmp_path, uuid.uuid4().hex, precious)
    assert registry.reap_groups(tmp_path) == 0
    assert precious.exists()


def test_a_directory_is_struck_where_that_can_be_written_and_no_run_directory_made_anew(tmp_path):
    """Found by benchmarks/faults.py: on a full disk the end of a group was a traceback."""
    registry.record_group(tmp_path / "run", "token", tmp_path / "perfsearch-control")
    record = tmp_path / "run" / "groups" / "token.json"
    registry.strike_directory(tmp_path / "run", "token")
    assert json.loads(record.read_text())["control_directory"] == "."
    record.unlink()
    record.mkdir()  # which no file can replace
    registry.strike_directory(tmp_path / "run", "token")
    registry.strike_directory(tmp_path / "gone", "token")
    assert record.is_dir() and not (tmp_path / "gone").exists()


def test_groups_of_another_living_controller_are_left_alone(tree, tmp_path):
    token, _root = tree
    registry.record_group(tmp_path, token, tmp_path)
    path = tmp_path / "groups" / f"{token}.json"
    entry = json.loads(path.read_text())
    parent = os.getppid()
    path.write_text(json.dumps({**entry, "controller": [parent, processes.started_at(parent)]}))
    assert registry.reap_groups(tmp_path) == 0
    assert len(processes.members(token)) == 3
    path.write_text(json.dumps({**entry, "controller": [parent, 1.0]}))
    assert registry.reap_groups(tmp_path, grace_s=0.2) == 3


def test_groups_of_other_hosts_are_left_alone(tree, tmp_path, monkeypatch):
    token, _root = tree
    registry.record_group(tmp_path, token, tmp_path)
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    assert registry.reap_groups(tmp_path) == 0
    assert len(processes.members(token)) == 3


def test_what_a_killed_controller_left_among_temporary_files_goes_at_the_next_start(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    killed = "import os; from perfsearch.core.files import make_temporary_directory as make; "
    killed += "print(make(), flush=True); os.kill(os.getpid(), 9)"
    done = subprocess.run(
        [sys.executable, "-c", killed],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    left = done.stdout.strip()
    assert os.path.isdir(left)
    registry.reap_groups(tmp_path / "run")
    assert not os.path.exists(left)


WITHOUT_DESCRIPTORS = """
import os, resource, signal, subprocess, sys, threading, time
from perfsearch.workers import processes

other = subprocess.Popen(["sleep", "600"])
started = processes.started_at(other.pid)
threading.excepthook = lambda failed: os._exit(9)
with processes.ending_with_controller(other.pid, started):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, limits[1]))
    assert processes.is_alive(other.pid, started)
    time.sleep(1.2)  # in which the thread looks twice
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert processes.is_alive(other.pid, started)
    other.kill()
    other.wait()
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, limits[1]))
    assert not processes.is_alive(other.pid, started)
    threading.Event().wait(60)
"""


def test_who_has_no_descriptor_left_still_watches_the_controller():
    """Found by benchmarks/soak.py (ddp 799609893): the watching thread ended by an exception."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_DESCRIPTORS], check=False, timeout=120)
    assert done.returncode == processes.EXIT_ORPHANED
