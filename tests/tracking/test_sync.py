from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from support.search_runs import KNOBS, Store, trial, write_journal

from perfsearch.core.trial import Status
from perfsearch.tracking import owner, sync, writer
from perfsearch.tracking.spool import Spool

TRIALS = [trial(0), trial(1, Status.OOM), trial(2)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def searched_while_down(store: Store, ends: bool = True) -> Path:
    """A search whose store was never there; its journal has all trials."""
    tracker = store.tracker(uri=f"http://127.0.0.1:{free_port()}")
    tracker.open({"seed": 3}, {"who": "me"})
    for one in TRIALS:
        tracker.trial(one, KNOBS)
    tracker.series("best/objective", 2, 960.0)
    tracker.summary({"search/speedup": 3.0}, {}, "three times")
    if ends:
        tracker.close("FINISHED", timeout_s=0.1)
    else:
        tracker._spool.close()  # a process that dies gives up its lock
    write_journal(tracker.run_dir, TRIALS, torn='{"event": "fini')
    return tracker.run_dir


def state(store: Store) -> list:
    """Everything that a repeated upload might double."""
    found = []
    for run in store.runs():
        history = {
            key: [(m.step, m.value) for m in store.client.get_metric_history(run.info.run_id, key)]
            for key in ("objective/value", "series/step_time_ms", "best/objective")
        }
        found.append((run.info.run_name, run.info.status, run.data.params, history))
    return sorted(found, key=str)


def test_what_was_missed_is_uploaded_once_however_often_it_is_asked(store, capsys):
    """radixark/miles#2571, mlflow/mlflow#4693: after an outage everything is uploaded later."""
    run_dir = searched_while_down(store)
    assert sync.main([str(run_dir), "--uri", store.uri]) == 0
    assert "mlflow.db" in capsys.readouterr().out
    first = state(store)
    assert sync.main([str(run_dir), "--uri", store.uri]) == 0
    assert state(store) == first
    parent = store.search()
    assert parent.info.status == "FINISHED"
    assert parent.data.metrics == {"search/speedup": 3.0, "best/objective": 960.0}
    assert parent.data.params == {"seed": "3"}
    assert parent.data.tags["mlflow.note.content"] == "three times"
    assert {n: r.info.status for n, r in store.trials().items()} == {
        "t0000": "FINISHED",
        "t0001": "FAILED",
        "t0002": "FINISHED",
    }


def test_a_complete_view_is_left_as_it_is(store):
    tracker = store.tracker()
    tracker.open({})
    for one in TRIALS:
        tracker.trial(one, KNOBS)
    tracker.close("FINISHED", 60)
    assert tracker.complete
    write_journal(tracker.run_dir, TRIALS)
    before = state(store)
    assert sync.main([str(tracker.run_dir)]) == 0
    assert state(store) == before


def test_a_killed_search_gets_its_missing_trials_and_an_end(store):
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "from search_runs import KNOBS, Store, trial\n"
        "store = Store(Path(sys.argv[2])); tracker = store.tracker(); tracker.open({})\n"
        "tracker.trial(trial(0), KNOBS); assert tracker.flush(100)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    arguments = [str(Path(__file__).parents[1] / "support"), str(store.directory)]
    process = subprocess.run([sys.executable, "-c", code, *arguments], timeout=120, check=False)
    assert process.returncode == -signal.SIGKILL
    assert store.search().info.status == "RUNNING"
    write_journal(store.directory / "s1", TRIALS)
    assert sync.main([str(store.directory / "s1")]) == 0
    assert store.search().info.status == "KILLED"
    assert len(store.trials()) == 3


def test_a_resumed_search_shows_what_the_dead_one_did_not(store):
    run_dir = searched_while_down(store, ends=False)
    resumed = store.tracker(run_dir=run_dir)
    resumed.open({})
    resumed.trial(trial(3), KNOBS)
    resumed.close("FINISHED", 60)
    assert resumed.complete
    assert set(store.trials()) == {"t0000", "t0001", "t0002", "t0003"}
    before = state(store)
    write_journal(run_dir, [*TRIALS, trial(3)])
    assert sync.main([str(run_dir), "--uri", store.uri]) == 0
    trials = [entry for entry in state(store) if entry[0].startswith("t0")]
    assert trials == [entry for entry in before if entry[0].startswith("t0")]


def test_without_a_record_of_the_view_the_journal_is_enough(store):
    write_journal(store.directory / "old", TRIALS)
    mirror = sync.rebuild(store.directory / "old", store.uri)
    store.client.rename_experiment(mirror.experiment_id, "exp")
    run = store.trials()["t0002"]
    assert run.data.params == {"knob/bucket_cap_mb": "27", "knob/algorithm": "Ring"}
    assert store.search().data.tags["perfsearch.search_id"] == "old"


def test_a_running_search_is_not_touched(store, capsys):
    run_dir = searched_while_down(store)
    alive = Spool(run_dir)
    assert alive.lock()
    assert sync.main([str(run_dir), "--uri", store.uri]) == 2
    assert "is running there" in capsys.readouterr().err
    alive.close()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        ('{"schema": 99}\n', "journal schema 99"),
        ('{"schema": 1}\nrubbish\n{"event": "asked"}\n', "line 2 is damaged"),
        ('{"schema": 1}\n{"n": 1, "event": "finished", "trial": {}}\n', "line 2 (finished)"),
    ],
)
def test_bad_input_is_told_and_ends_with_2(tmp_path, capsys, content, message):
    if content is not None:
        (tmp_path / "journal.jsonl").write_text(content)
    assert sync.main([str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_a_store_that_is_down_ends_with_1(tmp_path, capsys):
    write_journal(tmp_path, TRIALS)
    assert sync.main([str(tmp_path), "--uri", f"http://127.0.0.1:{free_port()}"]) == 1
    assert "Nothing is lost" in capsys.readouterr().err


def test_a_later_record_of_a_trial_replaces_the_earlier(tmp_path):
    write_journal(tmp_path, [trial(0, Status.CRASH), trial(1), trial(0)])
    assert [(t.number, t.status) for t in sync.read_trials(tmp_path)] == [(0, "ok"), (1, "ok")]


def test_a_password_that_was_not_recorded_is_asked_for(store, capsys):
    run_dir = searched_while_down(store)
    path = run_dir / "tracking.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["uri"] = "http://***@host:1"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert sync.main([str(run_dir)]) == 2
    assert "--uri" in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_killed_in_the_middle_loses_and_doubles_nothing(store, monkeypatch, caplog):
    """radixark/miles#2571, mlflow/mlflow#4693, Lightning-AI/pytorch-lightning#12833."""
    monkeypatch.setattr(writer, "FIRST_RETRY_S", 0.2)
    port = free_port()
    server = Server(store, port)
    try:
        tracker = store.tracker(uri=server.uri)
        tracker.open({})
        tracker.trial(TRIALS[0], KNOBS)
        assert tracker.flush(120)
        server.kill()
        for one in TRIALS[1:]:
            tracker.trial(one, KNOBS)
        until = time.monotonic() + 60
        while "not available" not in caplog.text and time.monotonic() < until:
            time.sleep(0.1)  # a busy machine may still be at its first retry
        tracker.close("FINISHED", timeout_s=2)
        assert not tracker.complete
        assert caplog.text.count("not available") == 1
        write_journal(tracker.run_dir, TRIALS)
        server = Server(store, port)
        assert sync.main([str(tracker.run_dir)]) == 0
        first = state(store)
        assert sync.main([str(tracker.run_dir)]) == 0
        assert state(store) == first
    finally:
        server.kill()
    assert set(store.trials()) == {"t0000", "t0001", "t0002"}
    assert {r.info.status for r in store.runs()} == {"FINISHED", "FAILED"}
    assert not owner.is_dead(store.search().data.tags)


class Server:
    """A real tracking server on loopback, over the store's database."""

    def __init__(self, store: Store, port: int) -> None:
        self.uri = f"http://127.0.0.1:{port}"
        artifacts = f"file://{store.directory}/server-artifacts"
        options = f"--host 127.0.0.1 --port {port} --workers 1 --backend-store-uri {store.uri}"
        options += f" --default-artifact-root {artifacts}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *options.split()],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + 150
        while True:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=2).close()
                return
            except OSError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    self.kill()
                    raise
                time.sleep(0.5)

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)
