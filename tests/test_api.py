"""Searches and found configurations from Python."""

import os
import signal
import subprocess
import sys
import threading

import pytest

import perfsearch
from perfsearch.core.errors import BadInputError

TABLE = "bucket,status,samples_per_s,step_ms\n1,ok,10,9 9 9\n2,ok,12,5 5 5\n4,oom,,\n"


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.csv").write_text(TABLE)
    return {"name": "replay", "table": "table.csv"}


def search(table, *overrides, **keys):
    quiet = {"tracking": {"enabled": False}, "confirm": {"finalists": 0}}
    return perfsearch.search(*overrides, runner=table, strategy="grid", **{**quiet, **keys})


def test_a_search_returns_what_it_came_to(table, tmp_path):
    result = search(table, budget={"trials": 5})
    assert result.exit_code == 0
    assert [str(t.status) for t in result.trials] == ["ok", "ok", "oom"]
    assert result.run_dir.parent == tmp_path / "outputs"
    assert (result.run_dir / "best" / "config.yaml").exists()
    assert result.best in ({"bucket": 1}, {"bucket": 2})


def test_it_may_be_called_again_and_is_the_commands_search(table):
    first, second = search(table), search(table, "seed=1")
    third = search(table)
    assert first.run_dir != second.run_dir
    assert third.run_dir.name.startswith(first.run_dir.name)
    from perfsearch.cli import search as cli

    arguments = ["runner=replay", "runner.table=table.csv", "strategy=grid"]
    arguments += ["tracking.enabled=false", "confirm.finalists=0", "resume=never"]
    assert cli.main(arguments) == 0
    names = {p.name.rpartition("-")[0] for p in first.run_dir.parent.iterdir()}
    assert first.run_dir.name.rpartition("-")[0] in names


def test_the_callers_process_is_as_it_was(table):
    def state():
        handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        return dict(os.environ), os.getcwd(), list(sys.argv), handlers

    before = state()
    search(table)
    assert state() == before


def test_inside_of_a_hydra_application_hydra_goes_on(table):
    from hydra import compose, initialize_config_module, version
    from hydra.core.global_hydra import GlobalHydra

    with initialize_config_module("perfsearch.conf", version_base="1.2"):
        before = GlobalHydra.instance().hydra
        search(table)
        assert GlobalHydra.instance().hydra is before
        assert str(version.getbase()) == "1.2"
        assert compose("config").seed == 0
    assert not GlobalHydra.instance().is_initialized()


def test_a_thread_may_search(table):
    results = []
    thread = threading.Thread(target=lambda: results.append(search(table)))
    thread.start()
    thread.join(60)
    assert results[0].exit_code == 0


@pytest.mark.parametrize(
    ("overrides", "keys", "message"),
    [
        (("budget.trial=3",), {}, "budget.trial: no such key"),
        ((), {"budget": {"trial": 3}}, "budget.trial: no such key"),
        ((), {"budgets": {}}, "budgets"),
        ((), {"seed": "many"}, "seed=many"),
        (("runner=dpd",), {}, "runner=dpd: no such option"),
        ((), {"strategy": 7}, "strategy=7"),
        ((), {"workload": lambda: None}, "other processes"),
        (("mode=simulate",), {}, "mode=simulate"),
        (("seed=1,2",), {}, "seed=1,2: one value is needed. A list is seed=[a,b]"),
        (("strategy.fast.x=1",), {}, "Choose it by strategy=fast, or leave the key out."),
        ((), {"strategy": {"bayes": {"xi": 0.1}}}, "strategy.bayes: it is for strategy=bayes"),
        ((5,), {}, "5: KEY=VALUE is needed, as text"),
        ((["seed=1"],), {}, "['seed=1']: KEY=VALUE is needed, as text"),
    ],
)
def test_bad_input_is_refused_with_the_commands_words(
    overrides, keys, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInputError) as caught:
        perfsearch.search(*overrides, **keys)
    assert message in str(caught.value)


def test_a_factory_of_a_module_is_given_by_name():
    from perfsearch.config.compose import compose
    from perfsearch.workloads.mlp import build

    workload = compose([], {"workload": build})["workload"]
    assert workload["name"] == "custom"
    assert workload["factory"] == "perfsearch.workloads.mlp:build"


def test_mappings_are_merged_and_lists_replace():
    from perfsearch.config.compose import compose

    keys = {"name": "ddp", "knobs": {"bucket_cap_mb": [1, 2], "pin_memory": None}}
    composed = compose(["seed=3"], {"runner": keys, "budget": {"trials": 4}})
    assert composed["runner"]["knobs"]["bucket_cap_mb"] == [1, 2]
    assert composed["runner"]["knobs"]["first_bucket_mb"] == "search"
    assert (composed["budget"]["trials"], composed["budget"]["gpu_hours"]) == (4, None)
    assert composed["seed"] == 3


def test_ctrl_c_is_the_callers_keyboard_interrupt(table, monkeypatch):
    from perfsearch.core.signals import Interrupted
    from perfsearch.pipeline import search as assemble

    def interrupted(settings, open_view, function):
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the signal came to nothing")

    monkeypatch.setattr(assemble, "run_search", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        search(table)
    assert isinstance(caught.value.__cause__, Interrupted)


def test_the_import_is_cheap_and_names_are_checked():
    code = (
        "import sys, perfsearch; print(*{m.partition('.')[0] for m in sys.modules});"
        "perfsearch.__version__; perfsearch.autotun"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert not {"torch", "hydra", "numpy", "yaml"} & set(done.stdout.split())
    assert "AttributeError: module 'perfsearch' has no attribute 'autotun'" in done.stderr


def test_autotune_without_a_process_group_says_what_to_do():
    import torch

    with pytest.raises(BadInputError, match="torchrun"):
        perfsearch.autotune(torch.nn.Linear(2, 2))
    with pytest.raises(BadInputError, match=r"autotune.max_samples=-1"):
        perfsearch.autotune(torch.nn.Linear(2, 2), max_samples=-1)


def test_help_shows_the_functions_own_help():
    import inspect
    import pydoc

    assert inspect.isfunction(perfsearch.search)
    shown = pydoc.render_doc(perfsearch.search, renderer=pydoc.plaintext)
    assert "search(*overrides: 'str', quiet: 'bool' = False, on_trial:" in shown
    assert "Search as the command ``perfsearch`` does" in shown
    assert {"search", "autotune", "apply", "SearchResult"} <= set(dir(perfsearch))


def test_the_function_keeps_its_name_whatever_is_imported():
    code = "import perfsearch, perfsearch.pipeline.search, perfsearch.api as api; "
    code += "assert perfsearch.search is api.search and perfsearch.apply is api.apply"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
