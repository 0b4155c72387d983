from __future__ import annotations

import logging
import math
import socket
import threading
from pathlib import Path

import pytest
from support.search_runs import KNOBS, measurement, trial

from perfsearch.core.knob import Kind, Knob
from perfsearch.core.trial import Status
from perfsearch.tracking import mirror, owner, writer
from perfsearch.tracking import mlflow as module
from perfsearch.tracking.client import Client
from perfsearch.tracking.mirror import Mirror


def show(store, trials, search_id="s1", **changes):
    tracker = store.tracker(search_id, **changes)
    tracker.open({"runner": {"name": "ddp"}})
    for one in trials:
        tracker.trial(one, KNOBS)
    tracker.close("FINISHED", 60)
    assert tracker.complete
    return tracker


def test_each_trial_is_a_child_of_one_search_run(store):
    """optuna/optuna-integration#153: each trial has tag mlflow.parentRunId of one search run."""
    show(store, [trial(0), trial(1)])
    parent = store.search()
    assert parent.data.params["runner.name"] == "ddp"
    assert parent.info.status == "FINISHED"
    assert set(store.trials()) == {"t0000", "t0001"}
    for run in store.trials().values():
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert set(run.data.params) == {"knob/bucket_cap_mb", "knob/algorithm"}
    assert store.trials()["t0001"].data.metrics["objective/value"] == 640


def test_sorting_by_objective_puts_a_real_trial_first(store):
    """mlflow/mlflow#3406, microsoft/nni#2775: failed trials and NaN lack the metric."""
    show(store, [trial(0, objective=math.nan), trial(1, Status.OOM), trial(2), trial(3)])
    best = store.runs("trial", order_by=["metrics.`objective/value` DESC"])
    assert [r.info.run_name for r in best[:2]] == ["t0003", "t0002"]
    assert "objective/value" not in store.trials()["t0001"].data.metrics
    assert "objective/value" not in store.trials()["t0000"].data.metrics
    assert store.trials()["t0001"].data.tags["perfsearch.reason"] == "it ended as oom"


def test_a_long_value_is_kept_whole_and_hinders_nothing(store):
    """mlflow/mlflow#6183, #10512, microsoft/qlib#1317: truncated param, full text as artifact."""
    long = "x" * 10_000
    show(store, [trial(0, configuration={"bucket_cap_mb": 1, "algorithm": long}), trial(1)])
    run = store.trials()["t0000"]
    assert run.data.params["knob/algorithm"].startswith("xxx")
    assert len(run.data.params["knob/algorithm"]) <= 500
    text = Path(store.client.download_artifacts(run.info.run_id, "long/knob_algorithm.txt"))
    assert text.read_text() == long
    assert run.data.metrics["objective/value"] == 320
    assert store.trials()["t0001"].info.status == "FINISHED"


def test_statuses_of_runs_tell_how_trials_ended(store):
    """optuna/optuna#3524: failed trials are FAILED, our own interruption is KILLED."""
    ends = [Status.OK, Status.PRUNED, Status.OOM, Status.TIMEOUT, Status.INTERRUPTED]
    show(store, [trial(i, status) for i, status in enumerate(ends)])
    shown = [store.trials()[f"t{i:04d}"].info.status for i in range(5)]
    assert shown == ["FINISHED", "FINISHED", "FAILED", "FAILED", "KILLED"]
    assert store.trials()["t0003"].data.tags["perfsearch.status"] == "timeout"


def test_three_searches_of_a_multirun_share_one_experiment(store, tmp_path, monkeypatch):
    """hydra-ecosystem/hydra#830, ashleve/lightning-hydra-template#268: one store, one experiment,
    though each job may run in a directory of its own.
    """
    for job in range(3):
        directory = tmp_path / f"multirun/{job}"
        directory.mkdir(parents=True)
        monkeypatch.chdir(directory)
        show(store, [trial(0)], f"s{job}", uri=None, directory=tmp_path)
    assert len(store.runs("search")) == 3
    assert len(store.runs("trial")) == 3
    assert list((tmp_path / "multirun").rglob("mlruns")) == []
    assert len(store.client.search_experiments(filter_string="name = 'exp'")) == 1


def test_a_store_that_is_down_costs_one_warning_and_no_time(tmp_path, caplog, store):
    """radixark/miles#2571, mlflow/mlflow#4693, Lightning-AI/pytorch-lightning#12833."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    caplog.set_level(logging.WARNING)
    tracker = store.tracker(uri=f"http://127.0.0.1:{port}")
    tracker.open({})
    for number in range(20):
        tracker.trial(trial(number), KNOBS)
    tracker.close("FINISHED", timeout_s=0.5)
    assert not tracker.complete
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len([w for w in warnings if "not available" in w]) == 1
    assert len(warnings) == 2
    assert f"perfsearch-sync {tracker.run_dir}" in warnings[1]
    assert tracker.how_to_open() == ""


def test_a_store_that_hangs_keeps_no_caller_waiting(store, monkeypatch, caplog):
    monkeypatch.setattr(module, "SLOW_S", 0.0)
    entered, go_on, real = threading.Event(), threading.Event(), Mirror.apply

    def hang(self, record, trial=None):
        entered.set()
        assert go_on.wait(60)
        real(self, record, trial)

    monkeypatch.setattr(Mirror, "apply", hang)
    tracker = store.tracker()
    tracker.open({})
    assert entered.wait(60)
    for number in range(5):
        tracker.trial(trial(number), KNOBS)
    assert not tracker.flush(0.05)
    assert caplog.text.count("has not answered") == 1
    go_on.set()
    tracker.close("FINISHED", 60)
    assert tracker.complete
    assert len(store.trials()) == 5


def test_the_end_does_not_wait_for_a_store_that_hangs(store, monkeypatch):
    entered, go_on = threading.Event(), threading.Event()

    def hang(self, record, trial=None):
        entered.set()
        assert go_on.wait(60)

    monkeypatch.setattr(Mirror, "apply", hang)
    tracker = store.tracker()
    tracker.open({})
    assert entered.wait(60)
    thread = tracker._writer._thread
    tracker.close("KILLED", timeout_s=0.05)
    assert not tracker.complete
    assert thread.daemon
    go_on.set()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("call", ["create", "log", "finish"])
def test_a_call_that_fails_after_it_took_effect_makes_no_second_run(store, call, monkeypatch):
    monkeypatch.setattr(writer, "FIRST_RETRY_S", 0.01)
    real, calls = getattr(Client, call), []

    def answer_lost(self, *arguments):
        result = real(self, *arguments)
        calls.append(arguments)
        if len(calls) in (2, 3):
            raise ConnectionResetError("the answer was lost")
        return result

    monkeypatch.setattr(Client, call, answer_lost)
    show(store, [trial(n) for n in range(4)])
    assert len(calls) >= 4
    assert set(store.trials()) == {"t0000", "t0001", "t0002", "t0003"}
    assert {r.info.status for r in store.trials().values()} == {"FINISHED"}
    for run in store.trials().values():
        assert "objective/value" in run.data.metrics
        history = store.client.get_metric_history(run.info.run_id, "series/step_time_ms")
        assert len(history) == 10


def test_a_record_that_the_store_refuses_does_not_hold_up_the_rest(store, monkeypatch):
    monkeypatch.setattr(writer, "FIRST_RETRY_S", 0.01)
    real = Client.log

    def refuse(self, run_id, metrics, params, tags, time_ms):
        if tags.get("perfsearch.trial") == "1":
            raise ValueError("refused")
        real(self, run_id, metrics, params, tags, time_ms)

    monkeypatch.setattr(Client, "log", refuse)
    tracker = store.tracker()
    tracker.open({})
    for number in range(3):
        tracker.trial(trial(number), KNOBS)
    tracker.close("FINISHED", timeout_s=60)
    assert not tracker.complete
    assert store.trials()["t0002"].info.status == "FINISHED"
    assert store.search().info.status == "FINISHED"


def test_a_resumed_search_goes_on_in_its_run(store):
    show(store, [trial(0), trial(1)])
    show(store, [trial(0), trial(1), trial(2)])
    assert store.search().info.status == "FINISHED"
    assert set(store.trials()) == {"t0000", "t0001", "t0002"}


def test_a_trial_that_was_run_again_replaces_what_was_shown(store):
    show(store, [trial(0, Status.CRASH)])
    show(store, [trial(0)])
    run = store.trials()["t0000"]
    assert run.info.status == "FINISHED"
    assert run.data.tags["perfsearch.status"] == "ok"
    assert run.data.metrics["objective/value"] == 320


def test_runs_of_a_dead_search_do_not_stay_running(store):
    """optuna/optuna#3215, ray-project/ray-like leftovers: a dead controller's runs are KILLED."""
    tracker = store.tracker("dead", experiment="another")
    tracker.open({})
    assert tracker.flush(60)
    client, run = store.client, tracker._mirror.parent
    client.set_tag(run, owner.START, "12345.0")
    alive = store.tracker("alive", experiment="third")
    alive.open({})
    assert alive.flush(60)
    show(store, [trial(0)])
    assert client.get_run(run).info.status == "KILLED"
    assert client.get_run(alive._mirror.parent).info.status == "RUNNING"
    tracker.close("KILLED", 30)
    alive.close("FINISHED", 30)


def test_null_is_shown_by_the_kind_of_the_knob(store):
    tracker = store.tracker()
    knobs = [
        Knob("bucket_cap_mb", Kind.CATEGORICAL, None, values=(None, 25)),
        Knob("algorithm", Kind.CATEGORICAL, None, values=(None, "Ring")),
    ]
    tracker.open({}, knobs=knobs)
    tracker.trial(trial(0, configuration={"bucket_cap_mb": None, "algorithm": None}), KNOBS)
    tracker.close("FINISHED", 60)
    assert tracker.complete
    params = store.trials()["t0000"].data.params
    assert params == {"knob/bucket_cap_mb": "-1", "knob/algorithm": "none"}


def test_summary_series_and_artifacts_land_on_the_search(store, monkeypatch):
    monkeypatch.setenv("MY_API_TOKEN", "s3cr3t-value")
    tracker = store.tracker()
    run_dir = store.directory / "s1"
    (run_dir / "best").mkdir(parents=True)
    (run_dir / "best/config.yaml").write_text("token: s3cr3t-value\n")
    tracker = store.tracker()
    tracker.open({"key": "s3cr3t-value"}, {"who": "has s3cr3t-value"})
    tracker.trial(trial(0), KNOBS)
    tracker.trial(trial(1), KNOBS)
    for step, value in enumerate([320.0, math.nan, 640.0]):
        tracker.series("best/objective", step, value)
    tracker.summary(
        {"search/speedup": 2.0, "search/low": math.inf}, {"perfsearch.best_trial": "1"}, "twice"
    )
    tracker.artifacts([run_dir / "best", run_dir / "missing.html"])
    tracker.close("FINISHED", 60)
    assert tracker.complete
    run, client = store.search(), store.client
    assert run.data.metrics["search/speedup"] == 2.0
    assert "search/low" not in run.data.metrics
    assert run.data.tags["mlflow.note.content"] == "twice"
    points = client.get_metric_history(run.info.run_id, "best/objective")
    assert [(p.step, p.value) for p in points] == [(0, 320.0), (2, 640.0)]
    assert store.trials()["t0001"].data.tags["perfsearch.best"] == "true"
    assert "perfsearch.best" not in store.trials()["t0000"].data.tags
    copy = Path(client.download_artifacts(run.info.run_id, "best/config.yaml"))
    assert copy.read_text() == "token: ***\n"
    assert run.data.params["key"] == "***"
    assert run.data.tags["who"] == "has ***"
    assert b"s3cr3t" not in (store.directory / "mlflow.db").read_bytes()
    assert "s3cr3t" not in (run_dir / "tracking.jsonl").read_text()


def test_a_run_directory_is_uploaded_whole_but_for_what_is_too_large(store, monkeypatch, caplog):
    monkeypatch.setattr(mirror, "LARGEST_FILE", 100)
    tracker = store.tracker()
    tracker.open({})
    for name, size in (("logs/3/rank0.log", 101), ("logs/3/rank1.log", 9), ("trials.csv", 100)):
        path = tracker.run_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x" * size)
    tracker.artifacts(tracker.run_dir)
    tracker.close("FINISHED", 60)
    assert tracker.complete
    run = store.search().info.run_id
    assert [f.path for f in store.client.list_artifacts(run)] == ["logs", "trials.csv"]
    assert [f.path for f in store.client.list_artifacts(run, "logs/3")] == ["logs/3/rank1.log"]
    assert "rank0.log is too large" in caplog.text


def test_the_end_does_not_wait_long_for_a_store_that_is_down(store, monkeypatch):
    monkeypatch.setattr(writer, "GIVE_UP_S", 0.0)
    tracker = store.tracker(uri="http://127.0.0.1:9")
    tracker.open({})
    thread = tracker._writer._thread
    tracker.close("KILLED", timeout_s=120)
    assert not tracker.complete
    assert not thread.is_alive()


def test_the_search_is_not_harmed_by_a_directory_that_cannot_be_written(store, caplog, monkeypatch):
    def full(run_dir):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "Spool", full)
    show(store, [trial(0)])
    assert "No space left" in caplog.text
    assert set(store.trials()) == {"t0000"}


def test_nothing_is_printed_and_no_environment_is_changed(store, capfd):
    import os

    before = dict(os.environ)
    show(store, [trial(0, measurement=measurement())])
    assert dict(os.environ) == before
    assert capfd.readouterr() == ("", "")


def test_closing_without_having_opened_is_fine_and_showing_is_not(store):
    tracker = store.tracker()
    tracker.close()
    assert tracker.complete
    with pytest.raises(RuntimeError, match="not open"):
        tracker.trial(trial(0), KNOBS)


def test_a_database_that_is_corrupt_is_not_shown_as_a_place_to_look(store, monkeypatch):
    monkeypatch.setattr(writer, "GIVE_UP_S", 0.0)

    def corrupt(location):
        raise RuntimeError("file is not a database")

    monkeypatch.setattr(mirror, "connect", corrupt)
    tracker = store.tracker()
    tracker.open({})
    tracker.close("FINISHED", timeout_s=30)
    assert not tracker.complete
    assert tracker.how_to_open() == ""


def test_a_search_that_was_written_says_how_to_look_at_it(store):
    assert "mlflow" in show(store, [trial(0)]).how_to_open()
