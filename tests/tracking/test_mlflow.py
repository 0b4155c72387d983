from __future__ import annotations

import gc
import json
import logging
import math
import socket
import threading
from pathlib import Path

import pytest
from support.fake_server import fake_server
from support.search_runs import Search, journal_in, measurement, trial

from perfsearch.core.knob import Kind, Knob
from perfsearch.core.trial import Purpose, Status
from perfsearch.tracking import client as client_module
from perfsearch.tracking import mlflow as module
from perfsearch.tracking import names
from perfsearch.tracking import store as store_module
from perfsearch.tracking.client import Client
from perfsearch.tracking.store import START, Store


def opened(store, **changes):
    """A search and the thread that writes it to the store."""
    before = set(threading.enumerate())
    search = Search(store, **changes)
    (thread,) = set(threading.enumerate()) - before
    return search, thread


def show(store, trials, search_id="s1", **changes):
    search = Search(store, search_id, {"runner": {"name": "ddp"}}, **changes)
    search.trials(*trials)
    assert search.end()
    return search.tracker


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


PARAMETERS = {"runner": "ddp", "strategy": "bayes", "seed": 1}


def test_runs_are_named_by_what_was_searched_and_found(store):
    search = Search(store, parameters=PARAMETERS)
    assert search.tracker.flush(60)
    assert store.search().info.run_name == "ddp bayes seed=1"
    search.trials(
        trial(0, configuration={"bucket_cap_mb": 25, "algorithm": None}),
        trial(1, configuration={"bucket_cap_mb": 85.08151, "algorithm": "Ring"}),
        trial(2, purpose=Purpose.SENTINEL, configuration={"bucket_cap_mb": 25, "algorithm": None}),
        trial(3, purpose=Purpose.CONFIRM, configuration={"bucket_cap_mb": 64.0, "algorithm": None}),
    )
    tags = {"perfsearch.best_trial": "3", "perfsearch.verdict": "gain"}
    search.summarise({"search/speed_up": 1.4923}, tags)
    assert search.end()
    assert [run.info.run_name for _, run in sorted(store.trials().items())] == [
        "000 baseline",
        "001 bucket_cap_mb=85.1 algorithm=Ring",
        "002 baseline again",
        "003 confirm bucket_cap_mb=64",
    ]
    run = store.search()
    assert run.info.run_name == "ddp bayes seed=1: +49%"
    assert run.data.params["best/bucket_cap_mb"] == "64"
    assert run.data.params["best/algorithm"] == "none"


def test_values_that_are_whole_are_one_value_whoever_proposed_them(store):
    numbers = [64, 64.0, 64.5]
    show(store, [trial(i, configuration={"bucket_cap_mb": v}) for i, v in enumerate(numbers)])
    found = [run.data.params["knob/bucket_cap_mb"] for _, run in sorted(store.trials().items())]
    assert found == ["64", "64", "64.5"]


def test_the_best_so_far_is_a_curve_of_the_search(store):
    search = Search(store)
    costs = {0: 4.0, 1: 5.0, 3: 2.0, 2: 3.0, 4: 2.5}  # trial 3 ended before trial 2
    for number, cost in costs.items():
        search.trials(trial(number, cost=cost, objective=100 / cost))
    search.trials(
        trial(5, Status.CRASH), trial(6, purpose=Purpose.CONFIRM, cost=1.0, objective=100.0)
    )
    assert search.end()
    assert curve(store, "best/objective") == [(0, 25), (1, 25), (3, 50), (4, 50), (5, 50)]
    assert curve(store, "best/speed_up") == [(0, 1), (1, 1), (3, 2), (4, 2), (5, 2)]
    assert store.trials()["t0003"].data.metrics["objective/speed_up"] == 2.0
    show(store, [])  # all of it once more, as a resumed search shows it
    assert curve(store, "best/speed_up") == [(0, 1), (1, 1), (3, 2), (4, 2), (5, 2)]


def curve(store, key):
    """Pairs of step and value, each once."""
    points = store.client.get_metric_history(store.search().info.run_id, key)
    return sorted({(point.step, point.value) for point in points})


def test_a_search_that_ends_otherwise_after_a_resume_says_so(store):
    show_best(store, 1, trial(0), trial(1))
    show_best(store, 2, trial(2))
    run = store.search()
    assert run.data.params["best/bucket_cap_mb"] == "26"
    assert "Now: bucket_cap_mb=27" in run.data.tags["mlflow.note.content"]


def show_best(store, number, *trials):
    search = Search(store)
    search.trials(*trials)
    search.summarise({}, {"perfsearch.best_trial": str(number)}, "said")
    assert search.end()


def test_a_trial_has_few_metrics_and_the_rest_in_a_file(store):
    found = measurement(
        phases_ms=dict.fromkeys(("dataloader_next", "forward", "backward", "optimizer"), 5.0),
        system={"cpu_utilization_percentage": 40.0, "node_0/cpu_utilization_percentage": 40.0},
        bottleneck_evidence={"host_ms": 3.0, "slowest_rank": 1.0},
    )
    show(store, [trial(0, measurement=found)])
    run = store.trials()["t0000"]
    series = {name for name in run.data.metrics if name.startswith("series/")}
    assert len(run.data.metrics) - len(series) <= len(names.HEADLINES)
    assert set(run.data.metrics) - series <= set(names.HEADLINES)
    path = Path(store.client.download_artifacts(run.info.run_id, "metrics.json"))
    known = json.loads(path.read_text())
    assert known["timing/forward_ms"] == 5.0 and known["timing_evidence/slowest_rank"] == 1.0
    assert {name: known[name] for name in run.data.metrics if name not in series} == {
        name: value for name, value in run.data.metrics.items() if name not in series
    }


def test_system_metrics_are_series_of_the_search_with_their_times(store):
    search = Search(store)
    samples = [
        {"time_s": 5.0 + i, "node": 0, "unix_s": 1e9 + i, "cpu_utilization_percentage": 10.0 * i}
        | {"gpu_0_utilization_percentage": 50.0, "interface/eth0/receive_megabytes_per_s": 1.0}
        for i in range(4)
    ]
    (search.run_dir / "system.jsonl").write_text("".join(f"{json.dumps(s)}\n" for s in samples))
    search.summarise({}, files=["system.jsonl"])
    assert search.end()
    run_id = store.search().info.run_id
    points = store.client.get_metric_history(run_id, "system/cpu_utilization_percentage")
    assert [(p.timestamp, p.step, p.value) for p in points] == [
        (round(1e12) + 1000 * i, i, 10.0 * i) for i in range(4)
    ]
    assert {key for key in store.search().data.metrics if key.startswith("system/")} == {
        "system/cpu_utilization_percentage",
        "system/gpu_0_utilization_percentage",
    }


def test_an_experiment_says_what_is_in_it_and_has_columns_for_it(store):
    show(store, [trial(0)])
    tags = store.client.get_experiment_by_name("exp").tags
    assert "best so far" in tags["mlflow.note.content"]
    columns = json.loads(tags["mlflow.sharedViewState.perfsearch"])["selectedColumns"]
    assert "metrics.`objective/value`" in columns and "params.`knob/algorithm`" in columns


def test_sorting_by_objective_puts_a_real_trial_first(store):
    """mlflow/mlflow#3406, microsoft/nni#2775: trials without an objective lack it."""
    show(store, [trial(0, objective=None), trial(1, Status.OOM), trial(2), trial(3)])
    best = store.runs("trial", order_by=["metrics.`objective/value` DESC"])
    assert [r.data.tags["perfsearch.trial"] for r in best[:2]] == ["3", "2"]
    assert "objective/value" not in store.trials()["t0001"].data.metrics
    assert "objective/value" not in store.trials()["t0000"].data.metrics
    assert store.trials()["t0001"].data.tags["perfsearch.reason"] == "it ended as oom"


def repositories():
    """What MLflow makes in this process for each run that is given a file."""
    return sum(type(one).__name__ == "LocalArtifactRepository" for one in gc.get_objects())


def test_a_trial_that_was_written_takes_no_memory_any_more(store, monkeypatch):
    monkeypatch.setattr(client_module, "_RUNS_A_ROUND", 4)
    gc.collect()
    before = repositories()
    gc.disable()  # it would be called by then, as imports are made; and never in a long search
    try:
        search = Search(store)
        search.trials(*(trial(number) for number in range(12)))
        assert search.tracker.flush(60)
        assert repositories() <= before + 1  # the search's own
    finally:
        gc.enable()
    assert search.end()
    gc.collect()
    assert repositories() == before


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
    search = Search(store, uri=f"http://127.0.0.1:{port}")
    search.trials(*(trial(number) for number in range(20)))
    assert not search.end(timeout_s=0.5)
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len([w for w in warnings if "not available" in w]) == 1
    assert len(warnings) == 2
    assert f"perfsearch-sync {search.run_dir}" in warnings[1]
    assert search.tracker.how_to_open() == ""


def told_by_us(caplog):
    """Warnings that are ours; threads of other tests may still speak."""
    found = [r for r in caplog.records if r.name.startswith("perfsearch")]
    return [r.getMessage() for r in found if r.levelno >= logging.WARNING]


@pytest.mark.parametrize(("mode", "says"), [("is down", "503"), ("hangs", "has not answered")])
def test_a_server_that_cannot_work_is_told_with_the_cause(store, caplog, monkeypatch, mode, says):
    """mlflow/mlflow#11551"""
    monkeypatch.setattr(module, "GIVE_UP_S", 0.5)
    with fake_server(mode) as uri:
        search = Search(store, uri=uri)
        search.trials(trial(0))
        assert not search.end(timeout_s=60)
    first, last = told_by_us(caplog)
    for told in (first, last):
        assert uri in told and says in told
    assert f"perfsearch-sync {search.run_dir}" in last


def test_a_database_that_is_deleted_meanwhile_is_told_once(store, caplog, monkeypatch):
    monkeypatch.setattr(module, "GIVE_UP_S", 0.5)
    monkeypatch.setattr(module, "FIRST_RETRY_S", 0.1)
    search = Search(store)
    search.trials(trial(0))
    assert search.tracker.flush(60)
    database = search.tracker.location.database
    database.unlink()
    search.trials(trial(1), trial(2))
    assert not search.end(timeout_s=60)
    first, last = told_by_us(caplog)
    assert f"{database} is gone" in first
    assert f"perfsearch-sync {search.run_dir}" in last
    assert search.tracker.how_to_open() == ""


def test_a_store_that_is_full_is_told_once_and_takes_the_rest_later(store, caplog, monkeypatch):
    from sqlalchemy import Engine, event

    monkeypatch.setattr(module, "GIVE_UP_S", 0.5)
    monkeypatch.setattr(module, "FIRST_RETRY_S", 0.1)
    search = Search(store)
    search.trials(trial(0))
    assert search.tracker.flush(60)

    def limit(connection, *_):
        """As a disk with no room left: SQLite's own error for it is ``SQLITE_FULL``."""
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")

    def checked_out(connection, *_):
        limit(connection)

    event.listen(Engine, "connect", limit)
    event.listen(Engine, "checkout", checked_out)
    try:
        search.trials(*(trial(number) for number in range(1, 30)))
        assert not search.end(timeout_s=60)
    finally:
        event.remove(Engine, "connect", limit)
        event.remove(Engine, "checkout", checked_out)
    first, last = told_by_us(caplog)
    assert "database or disk is full" in first and "The search goes on" in first
    assert f"perfsearch-sync {search.run_dir}" in last
    assert "Traceback" not in first + last


def test_a_store_that_hangs_keeps_no_caller_waiting(store, monkeypatch, caplog):
    monkeypatch.setattr(module, "SLOW_S", 0.0)
    entered, go_on, real = threading.Event(), threading.Event(), Store.show

    def hang(self, event):
        entered.set()
        assert go_on.wait(60)
        real(self, event)

    monkeypatch.setattr(Store, "show", hang)
    search = Search(store)
    assert entered.wait(60)
    search.trials(*(trial(number) for number in range(5)))
    assert not search.tracker.flush(0.05)
    assert caplog.text.count("has not answered") == 1
    go_on.set()
    assert search.end()
    assert len(store.trials()) == 5


def test_the_end_does_not_wait_for_a_store_that_hangs(store, monkeypatch):
    entered, go_on = threading.Event(), threading.Event()

    def hang(self, event):
        entered.set()
        assert go_on.wait(60)

    monkeypatch.setattr(Store, "show", hang)
    search, thread = opened(store)
    assert entered.wait(60)
    assert not search.end("KILLED", timeout_s=0.05)
    assert thread.daemon
    go_on.set()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("call", ["create", "log", "finish"])
def test_a_call_that_fails_after_it_took_effect_makes_no_second_run(store, call, monkeypatch):
    monkeypatch.setattr(module, "FIRST_RETRY_S", 0.01)
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
    monkeypatch.setattr(module, "FIRST_RETRY_S", 0.01)
    real = Client.log

    def refuse(self, run_id, metrics, params, tags, time_ms):
        if tags.get("perfsearch.trial") == "1":
            raise ValueError("refused")
        real(self, run_id, metrics, params, tags, time_ms)

    monkeypatch.setattr(Client, "log", refuse)
    search = Search(store)
    search.trials(*(trial(number) for number in range(3)))
    assert not search.end()
    assert store.trials()["t0002"].info.status == "FINISHED"
    assert store.search().info.status == "FINISHED"


def test_a_resumed_search_goes_on_in_its_run(store):
    show(store, [trial(0), trial(1)])
    show(store, [trial(2)])
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
    dead = Search(store, "dead", experiment="another")
    assert dead.tracker.flush(60)
    client = store.client
    client.set_tag(dead.tracker.run_id, START, "12345.0")
    alive = Search(store, "alive", experiment="third")
    assert alive.tracker.flush(60)
    show(store, [trial(0)])
    assert client.get_run(dead.tracker.run_id).info.status == "KILLED"
    assert client.get_run(alive.tracker.run_id).info.status == "RUNNING"
    dead.end("KILLED")
    alive.end()


def test_null_is_shown_by_the_kind_of_the_knob(store):
    knobs = [
        Knob("bucket_cap_mb", Kind.CATEGORICAL, None, values=(None, 25)),
        Knob("algorithm", Kind.CATEGORICAL, None, values=(None, "Ring")),
        Knob("workers", Kind.INTEGER, None, low=0, high=8),
    ]
    show(store, [trial(0, configuration={k.name: None for k in knobs})], knobs=knobs)
    params = store.trials()["t0000"].data.params
    assert params == {"knob/bucket_cap_mb": "-1", "knob/algorithm": "none", "knob/workers": "-1"}
    assert params == {f"knob/{k.name}": str(names.null_value(k)) for k in knobs}


def test_summary_series_and_artifacts_land_on_the_search(store, monkeypatch):
    monkeypatch.setenv("MY_API_TOKEN", "s3cr3t-value")
    search = Search(store, parameters={"key": "s3cr3t-value"})
    (search.run_dir / "best").mkdir()
    (search.run_dir / "best/config.yaml").write_text("token: s3cr3t-value\n")
    search.trials(trial(0), trial(1))
    search.simulated("simulated/best_ms", (0, 320.0), (2, 640.0))
    tags = {"perfsearch.best_trial": "1", "who": "has s3cr3t-value"}
    search.summarise({"search/speedup": 2.0}, tags, "twice", ["best", "missing.html"])
    assert search.end()
    run, client = store.search(), store.client
    assert run.data.metrics["search/speedup"] == 2.0
    assert run.data.tags["mlflow.note.content"] == "twice"
    points = client.get_metric_history(run.info.run_id, "simulated/best_ms")
    assert [(p.step, p.value) for p in points] == [(0, 320.0), (2, 640.0)]
    assert store.trials()["t0001"].data.tags["perfsearch.best"] == "true"
    assert "perfsearch.best" not in store.trials()["t0000"].data.tags
    copy = Path(client.download_artifacts(run.info.run_id, "best/config.yaml"))
    assert copy.read_text() == "token: ***\n"
    assert run.data.params["key"] == "***"
    assert run.data.tags["who"] == "has ***"
    assert b"s3cr3t" not in (store.directory / "mlflow.db").read_bytes()


def test_directories_are_uploaded_whole_but_for_what_is_too_large(store, monkeypatch, caplog):
    monkeypatch.setattr(store_module, "LARGEST_FILE", 100)
    search = Search(store)
    for name, size in (("logs/3/rank0.log", 101), ("logs/3/rank1.log", 9), ("trials.csv", 100)):
        path = search.run_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x" * size)
    search.summarise({}, files=["trials.csv", "logs"])
    assert search.end()
    run = store.search().info.run_id
    assert [f.path for f in store.client.list_artifacts(run)] == ["logs", "trials.csv"]
    assert [f.path for f in store.client.list_artifacts(run, "logs/3")] == ["logs/3/rank1.log"]
    assert "rank0.log is too large" in caplog.text


def test_the_end_does_not_wait_long_for_a_store_that_is_down(store, monkeypatch):
    monkeypatch.setattr(module, "GIVE_UP_S", 0.0)
    search, thread = opened(store, uri="http://127.0.0.1:9")
    assert not search.end("KILLED", timeout_s=120)
    assert not thread.is_alive()


def test_nothing_is_printed_and_no_environment_is_changed(store, capfd):
    import os

    before = dict(os.environ)
    show(store, [trial(0, measurement=measurement())])
    assert dict(os.environ) == before
    assert capfd.readouterr() == ("", "")


def test_what_never_opened_leaves_nothing_in_the_store(store):
    """A search that is refused before it notes that it opened has no run."""
    tracker = store.tracker()
    tracker.close()
    assert tracker.complete
    journal = journal_in(tracker.run_dir, "s1")
    tracker.open(journal)
    tracker.close("FAILED")
    assert tracker.complete
    assert store.client.get_experiment_by_name("exp") is None


def test_a_database_that_is_corrupt_is_not_shown_as_a_place_to_look(store, monkeypatch):
    monkeypatch.setattr(module, "GIVE_UP_S", 0.0)

    def corrupt(location):
        raise RuntimeError("file is not a database")

    monkeypatch.setattr(store_module, "connect", corrupt)
    search = Search(store)
    assert not search.end(timeout_s=30)
    assert search.tracker.how_to_open() == ""


def test_a_search_that_was_written_says_how_to_look_at_it(store):
    assert "mlflow" in show(store, [trial(0)]).how_to_open()


class DeadServer:
    """As a store whose server was killed in the middle of a call."""

    def __init__(self):
        self.called, self.over, self.reachable = threading.Event(), threading.Event(), True

    def check_reachable(self):
        if not self.reachable:
            raise ConnectionError

    def write(self):
        self.called.set()
        self.over.wait(60)


def test_the_end_does_not_wait_for_a_call_to_a_server_that_is_gone(monkeypatch):
    """radixark/miles#2571: MLflow tries a call again for minutes, by itself."""
    monkeypatch.setattr(module, "GIVE_UP_S", 0.2)
    monkeypatch.setattr(module, "CLOSING_RETRY_S", 0.1)
    server = DeadServer()
    one = module.Writer(server, lambda why: None)
    one.start()
    one.put(module.Item("summarised", server.write))
    assert server.called.wait(10)
    server.reachable = False
    assert one.close(timeout_s=math.inf) is False
    server.over.set()


def test_the_end_waits_for_a_server_that_is_slow(monkeypatch):
    monkeypatch.setattr(module, "GIVE_UP_S", 0.2)
    monkeypatch.setattr(module, "CLOSING_RETRY_S", 0.1)
    server = DeadServer()
    one = module.Writer(server, lambda why: None)
    one.start()
    one.put(module.Item("summarised", server.write))
    threading.Timer(0.8, server.over.set).start()
    assert one.close(timeout_s=50) is True
