"""The recipes of CONTRIBUTING.md, followed to the letter in a copy of the package."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()

LINES = re.MULTILINE | re.DOTALL

FILE = re.compile(r"^`([\w/.]+)`[^\n]*:\n\n```(?:python|yaml)\n(.*?)^```", LINES)
"""A line that names a file, and the block that is to be in it."""

RECORD = re.compile(r"^A record in `(\w+)` of `([\w/.]+)`[^\n]*:\n\n```python\n(.*?)^```", LINES)
"""A line that names a table and its file, and the block that is to be added to it."""


def recipe(kind):
    """What the page says of a new one: files by path, records by table and path, the command."""
    (section,) = re.findall(rf"^## A new {kind} is [^\n]*\n(.*?)^## ", TEXT, LINES)
    commands = re.findall(r"^perfsearch (.*)$", section, re.MULTILINE)
    records = {(table, path): text for table, path, text in RECORD.findall(section)}
    return dict(FILE.findall(section)), records, commands


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a copy of the package, as it is when every recipe was followed."""
    home = tmp_path_factory.mktemp("contributing")
    shutil.copytree(ROOT / "perfsearch", home / "perfsearch")
    shutil.copytree(ROOT / "conf", home / "perfsearch" / "conf")
    for kind in ("strategy", "runner", "workload"):
        files, records, _ = recipe(kind)
        assert len(files) == 2
        for path, text in files.items():
            made = home / (f"perfsearch/{path}" if path.startswith("conf/") else path)
            assert not made.exists()
            made.write_text(text)
        for (table, path), text in records.items():
            code = (home / path).read_text()
            begin = re.search(rf"^{table}\b[^\n]*= {{\n", code, re.MULTILINE).end()
            end = code.index("\n}\n", begin) + 1
            (home / path).write_text(code[:end] + text + code[end:])
    return home


def perfsearch(place, *words, code=0):
    """What the command says, run in the copy."""
    result = subprocess.run(
        [sys.executable, "-m", "perfsearch.cli.search", *words],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(place)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout + result.stderr


def searched(place, kind, *words):
    """The finished trials, and the settings and summary that are handed over."""
    (command,) = recipe(kind)[2]
    directory = place / "searches" / kind
    small = ["confirm.finalists=1", "confirm.max_repeats=2", f"run_dir={directory}"]
    perfsearch(place, *command.split(), *words, *small)
    events = [json.loads(line) for line in (directory / "journal.jsonl").read_text().splitlines()]
    trials = [event["trial"] for event in events[1:] if event["event"] == "finished"]
    settings = yaml.safe_load((directory / "best" / "config.yaml").read_text())
    return trials, settings, json.loads((directory / "best" / "summary.json").read_text())


def values(trials, knob):
    return [t["configuration"][knob] for t in trials if t["purpose"] == "search"]


@pytest.mark.parametrize("kind", ["strategy", "runner", "workload"])
def test_the_code_of_a_recipe_is_as_ours_has_to_be(place, kind):
    files = [path for path in recipe(kind)[0] if path.endswith(".py")]
    assert files
    for how in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *how, "--config", ROOT / "pyproject.toml", *files]
        result = subprocess.run(command, cwd=place, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("path", "other"),
    [
        ("perfsearch/strategies/half.py", "conf/strategy/half.yaml"),
        ("conf/strategy/half.yaml", "perfsearch/strategies/half.py"),
    ],
)
def test_the_half_of_a_strategy_that_is_missing_is_named(place, path, other):
    text = next(text for name, text in recipe("strategy")[0].items() if name[-3:] == path[-3:])
    made = place / (f"perfsearch/{path}" if path.startswith("conf/") else path)
    made.write_text(text.replace("name: local", "name: half"))
    try:
        said = perfsearch(place, "strategy=half", code=2)
    finally:
        made.unlink()
    assert f"=half: {path} is there, and {other} is missing." in said
    assert "no such option" not in said


@pytest.mark.slow
def test_what_was_added_is_listed(place):
    everything = perfsearch(place, "--help")
    chosen = perfsearch(place, "runner=sleep", "--help")
    for text, name, about in [
        (everything, "local", "Steps from the best configuration"),
        (everything, "sleep", "Sleeps in place of training"),
        (everything, "linear", "One linear layer"),
        (chosen, "runner.nap_ms", "Length of a nap"),
        (chosen, "naps", "naps in a step"),
    ]:
        assert re.search(rf"\b{name}\s+{about}", text), text


@pytest.mark.slow
def test_a_new_runner_is_searched_recorded_and_exported(place):
    from mlflow import MlflowClient

    tracking = ["tracking.uri=sqlite:///mlflow.db", "tracking.experiment=recipes"]
    trials, settings, summary = searched(place, "runner", "budget.trials=4", *tracking)
    assert trials[0]["configuration"] == {"naps": 4}
    assert sorted(values(trials, "naps")) == [1, 2, 8]
    assert {t["status"] for t in trials} == {"ok"}
    for trial in trials:
        naps = trial["configuration"]["naps"]
        assert min(trial["measurement"]["step_seconds"]) >= naps * 5e-3
    best = summary["knobs"]["naps"]
    apply = place / "searches" / "runner" / "best" / "apply"
    assert (apply / "env.sh").read_text() == f"export NAPS={best}\n"
    expected = {"nap_ms": 5.0, "constraints": [], "knobs": {"naps": best}}
    assert settings["runner"] == {"name": "sleep", **expected}
    client = MlflowClient(f"sqlite:///{place / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("recipes")
    runs = client.search_runs([experiment.experiment_id])
    assert sum("knob/naps" in run.data.params for run in runs) >= len(trials)
    refused = perfsearch(place, "runner=sleep", "runner.nap_ms=-1", code=2)
    assert refused.startswith("perfsearch: runner.nap_ms=-1")


@pytest.mark.slow
def test_a_new_strategy_searches_with_a_new_runner(place):
    quiet = ["runner=sleep", "runner.nap_ms=1", "tracking.enabled=false"]
    trials, settings, _ = searched(place, "strategy", "strategy.jump=0", "budget.trials=9", *quiet)
    assert sorted(values(trials, "naps")) == [1, 2, 8]
    assert settings["strategy"]["name"] == "local"
    assert settings["strategy"]["jump"] == 0


@pytest.mark.slow
def test_a_new_workload_is_trained_on_the_cpu(place):
    only = ["runner.device=cpu", "~runner.knobs", "+runner.knobs={static_graph: search}"]
    quiet = ["nproc=1", "strategy=random", "budget.trials=2", "tracking.enabled=false"]
    trials, settings, _ = searched(place, "workload", "objective.min_gain=0", *only, *quiet)
    assert values(trials, "static_graph") == [True]
    assert all(t["measurement"]["first_losses"] for t in trials if t["status"] == "ok")
    assert "ok" in {t["status"] for t in trials}
    assert settings["workload"]["name"] == "linear"
    assert settings["workload"]["width"] == 32
    assert (place / "searches" / "workload" / "best" / "apply" / "ddp.py").is_file()
