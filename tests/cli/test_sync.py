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
from support.fake_server import fake_server
from support.search_runs import LocalStore, Search, journal_in, trial

from perfsearch.cli import sync
from perfsearch.core.trial import Status
from perfsearch.pipeline.resume import run_directory_lock
from perfsearch.tracking import mlflow
from perfsearch.tracking.store import is_dead

TRIALS = [trial(0), trial(1, Status.OOM), trial(2)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def searched_while_down(store: LocalStore) -> Path:
    """A search whose store was never there; its journal has everything."""
    search = Search(store, parameters={"seed": 3}, uri=f"http://127.0.0.1:{free_port()}")
    search.trials(*TRIALS)
    search.simulated("simulated/best_ms", (2, 960.0))
    search.summarise({"search/speedup": 3.0}, note="three times")
    search.end(timeout_s=0.1)
    return search.run_dir


def state(store: LocalStore) -> list:
    """Everything that a repeated upload might double."""
    found = []
    for run in store.runs():
        history = {
            key: [(m.step, m.value) for m in store.client.get_metric_history(run.info.run_id, key)]
            for key in ("objective/value", "series/step_time_ms", "simulated/best_ms")
        }
        found.append((run.info.run_name, run.info.status, run.data.params, history))
    return sorted(found, key=str)


def test_what_was_missed_is_uploaded_once_however_often_it_is_asked(store, capsys, monkeypatch):
    """radixark/miles#2571, mlflow/mlflow#4693: after an outage everything is uploaded later."""
    run_dir = searched_while_down(store)
    assert sync.main([str(run_dir), "--uri", store.uri]) == 0
    assert "mlflow.db" in capsys.readouterr().out
    first = state(store)
    assert sync.main([str(run_dir), "--uri", store.uri]) == 0
    assert state(store) == first
    database = Path(store.uri.removeprefix("sqlite:///"))
    monkeypatch.chdir(database.parent)  # from which a path is meant that is given now
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database.name}")
    for relative in (f"sqlite:///{database.name}", "env"):
        assert sync.main([str(run_dir), "--uri", relative]) == 0
        assert str(database) in capsys.readouterr().out
    assert state(store) == first
    parent = store.search()
    assert parent.info.status == "FINISHED"
    curves = {"best/objective": 960.0, "best/speed_up": pytest.approx(3)}
    assert parent.data.metrics == {"search/speedup": 3.0, "simulated/best_ms": 960.0, **curves}
    assert parent.data.params == {"seed": "3"}
    assert parent.data.tags["mlflow.note.content"] == "three times"
    assert {n: r.info.status for n, r in store.trials().items()} == {
        "t0000": "FINISHED",
        "t0001": "FAILED",
        "t0002": "FINISHED",
    }


def test_a_complete_view_is_left_as_it_is(store):
    search = Search(store)
    search.trials(*TRIALS)
    search.simulated("simulated/best_ms", (1, 5.0), (2, 4.0))
    search.summarise({"objective/value": 3.0})
    assert search.end()
    before = state(store)
    assert sync.main([str(search.run_dir)]) == 0
    assert state(store) == before


def test_a_killed_search_gets_its_missing_trials_and_an_end(store):
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "from search_runs import LocalStore, Search, trial\n"
        "search = Search(LocalStore(Path(sys.argv[2])), uri=sys.argv[3]); search.trials(trial(0))\n"
        "assert search.tracker.flush(100)\n"
        "search.journal.followers.clear(); search.trials(trial(1), trial(2))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    arguments = [str(Path(__file__).parents[1] / "support"), str(store.directory), store.uri]
    process = subprocess.run([sys.executable, "-c", code, *arguments], timeout=120, check=False)
    assert process.returncode == -signal.SIGKILL
    assert store.search().info.status == "RUNNING"
    assert set(store.trials()) == {"t0000"}
    with (store.directory / "s1" / "journal.jsonl").open("a") as journal:
        journal.write('{"n": 5, "event": "fini')
    assert sync.main([str(store.directory / "s1")]) == 0
    assert store.search().info.status == "KILLED"
    assert set(store.trials()) == {"t0000", "t0001", "t0002"}


def test_a_resumed_search_shows_what_the_dead_one_did_not(store):
    run_dir = searched_while_down(store)
    resumed = Search(store, run_dir=run_dir)
    resumed.trials(trial(3))
    assert resumed.end()
    assert set(store.trials()) == {"t0000", "t0001", "t0002", "t0003"}
    before = state(store)
    assert sync.main([str(run_dir), "--uri", store.uri]) == 0
    assert state(store) == before


def test_a_resumed_search_that_was_killed_has_no_end(store):
    run_dir = searched_while_down(store)
    resumed = Search(store, run_dir=run_dir)
    assert resumed.tracker.flush(60)
    assert store.search().info.status == "RUNNING"
    resumed.end("KILLED")
    assert sync.main([str(run_dir), "--uri", store.uri]) == 0
    assert store.search().info.status == "KILLED"
    assert store.search().data.metrics["search/speedup"] == 3.0


def test_a_comparison_without_a_difference_is_finished(store):
    """Found by benchmarks/soak.py: FAILED once it was uploaded."""
    search = Search(store, uri=f"http://127.0.0.1:{free_port()}")
    search.tracker.close(timeout_s=0.1)
    search.journal.append("ended", exit_code=4, reason="no difference shown")
    assert sync.main([str(search.run_dir), "--uri", store.uri]) == 0
    assert store.search().info.status == "FINISHED"


def test_a_search_without_a_trial_that_succeeded_has_failed(store):
    search = Search(store, uri=f"http://127.0.0.1:{free_port()}")
    search.tracker.close("FAILED", timeout_s=0.1)
    search.journal.append("ended", exit_code=1, reason="no trial succeeded")
    assert sync.main([str(search.run_dir), "--uri", store.uri]) == 0
    assert store.search().info.status == "FAILED"


def test_a_journal_without_the_parameters_of_the_view_is_enough(store):
    """As a search leaves it that is killed early, or whose tracking is off."""
    journal = journal_in(store.directory / "old", "old")
    for one in TRIALS:
        journal.append("finished", trial=one.to_json())
    found = sync.rebuild(store.directory / "old", store.uri)
    store.client.rename_experiment(found.experiment_id, "exp")
    run = store.trials()["t0002"]
    assert run.data.params == {"knob/bucket_cap_mb": "27", "knob/algorithm": "Ring"}
    assert store.search().data.tags["perfsearch.search_id"] == "old"


def test_a_write_ahead_log_of_an_earlier_version_is_read(store):
    """A ``tracking.jsonl`` beside the journal, a torn line among it."""
    run_dir = store.directory / "s1"
    journal = journal_in(run_dir, "s1")
    journal.append("opened", unix_s=1.0, definition={"knobs": [], "baseline": {}})
    for one in TRIALS:
        journal.append("finished", trial=one.to_json())
    journal.append("ended", exit_code=0, reason="done")
    (run_dir / "report.html").write_text("<p>")
    told = [
        {"kind": "open", "uri": store.uri, "experiment": "exp", "parameters": {"seed": "3"}},
        {"kind": "trial", "number": 0, "time_ms": 7000},
        {"kind": "series", "name": "simulated/best_ms", "step": 4, "value": 2.5},
        {
            "kind": "summary",
            "metrics": {"search/speedup": 2.0},
            "tags": {"a": "b"},
            "note": "twice",
        },
        {"kind": "artifacts", "paths": [str(run_dir / "report.html")]},
        {"kind": "close", "status": "FINISHED"},
    ]
    lines = [json.dumps({"schema": 1, "time_ms": 9000, **record}) + "\n" for record in told]
    (run_dir / "tracking.jsonl").write_text(
        "".join(lines[:2]) + '{"kind": "tr\n' + "".join(lines[2:])
    )
    assert sync.main([str(run_dir)]) == 0
    before = state(store)
    assert sync.main([str(run_dir)]) == 0
    assert state(store) == before
    parent = store.search()
    assert parent.info.status == "FINISHED"
    assert parent.data.params == {"seed": "3"}
    curves = {"best/objective": 960.0, "best/speed_up": pytest.approx(3)}
    assert parent.data.metrics == {"search/speedup": 2.0, "simulated/best_ms": 2.5, **curves}
    assert parent.data.tags["a"] == "b"
    assert parent.data.tags["mlflow.note.content"] == "twice"
    assert [f.path for f in store.client.list_artifacts(parent.info.run_id)] == ["report.html"]
    assert store.trials()["t0000"].info.end_time == 7000


def test_a_running_search_is_not_touched(store, capsys):
    run_dir = searched_while_down(store)
    with run_directory_lock(run_dir):
        assert sync.main([str(run_dir), "--uri", store.uri]) == 2
    assert "is running there" in capsys.readouterr().err


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
    journal_in(tmp_path, "s1")
    assert sync.main([str(tmp_path), "--uri", f"http://127.0.0.1:{free_port()}"]) == 1
    assert "Nothing is lost" in capsys.readouterr().err


def test_a_server_that_answers_503_is_told_in_one_line(tmp_path, capsys):
    """mlflow/mlflow#545"""
    journal_in(tmp_path, "s1")
    with fake_server("is down") as uri:
        assert sync.main([str(tmp_path), "--uri", uri]) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and f"{uri} answers 503 Service Unavailable" in told


def test_a_password_that_was_not_recorded_is_asked_for(store, capsys):
    search = Search(store, uri="http://me:secret@127.0.0.1:1")
    search.end("KILLED", timeout_s=0.1)
    assert "secret" not in (search.run_dir / "journal.jsonl").read_text()
    assert sync.main([str(search.run_dir)]) == 2
    assert "--uri" in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_killed_in_the_middle_loses_and_doubles_nothing(store, monkeypatch, caplog):
    """radixark/miles#2571, mlflow/mlflow#4693, Lightning-AI/pytorch-lightning#12833."""
    monkeypatch.setattr(mlflow, "FIRST_RETRY_S", 0.2)
    port = free_port()
    server = Server(store, port)
    try:
        search = Search(store, uri=server.uri)
        search.trials(TRIALS[0])
        assert search.tracker.flush(120)
        server.kill()
        search.trials(*TRIALS[1:])
        until = time.monotonic() + 60
        while "not available" not in caplog.text and time.monotonic() < until:
            time.sleep(0.1)  # a busy machine may still be at its first retry
        assert not search.end(timeout_s=2)
        assert caplog.text.count("not available") == 1
        server = Server(store, port)
        assert sync.main([str(search.run_dir)]) == 0
        first = state(store)
        assert sync.main([str(search.run_dir)]) == 0
        assert state(store) == first
    finally:
        server.kill()
    assert set(store.trials()) == {"t0000", "t0001", "t0002"}
    assert {r.info.status for r in store.runs()} == {"FINISHED", "FAILED"}
    assert not is_dead(store.search().data.tags)


class Server:
    """A real tracking server on loopback, over the store's database."""

    def __init__(self, store: LocalStore, port: int) -> None:
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
