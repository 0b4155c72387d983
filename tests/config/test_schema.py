import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from support import front_fakes

from perfsearch.config.schema import (
    ConfigError,
    Settings,
    build_options,
    default_run_dir,
    option,
    search_hash,
    to_plain,
    validate,
)
from perfsearch.core.knob import Numerics
from perfsearch.core.objective import Metric

CHOSEN: dict[str, Any] = {
    "runner": {"name": "fake", "knobs": {"bucket_cap_mb": [8, 25]}},
    "strategy": {"name": "fake"},
    "workload": {"name": "gpt", "size": "tiny"},
}


@pytest.fixture(autouse=True)
def _fakes(monkeypatch):
    monkeypatch.setitem(sys.modules, "perfsearch.pipeline.search", None)
    front_fakes.install(monkeypatch.setattr)


def settings(**changes: Any) -> Settings:
    return validate({**CHOSEN, **changes})


def message(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        settings(**changes)
    return str(caught.value)


def test_values_get_their_types():
    found = settings(
        numerics="exact", objective={"metric": "latency"}, run_dir="x/y", resume_force=["gpu"],
        nproc=4, budget={"seconds": 60, "trials": None},
    )  # fmt: skip
    assert found.numerics is Numerics.EXACT
    assert found.objective.metric is Metric.LATENCY
    assert found.run_dir == Path("x/y")
    assert found.resume_force == ("gpu",)
    assert found.nproc == 4
    assert isinstance(found.budget.seconds, float)
    assert found.budget.spent(trials=1000, seconds=59.0, devices=1) is None
    assert found.budget.spent(trials=0, seconds=60.0, devices=1) is not None
    assert found.runner.options == {"knobs": {"bucket_cap_mb": [8, 25]}}


def test_written_settings_read_back_the_same():
    found = settings(seed=3, run_dir="x", resume_force=["gpu"], numerics="exact")
    assert validate(to_plain(found)) == found


def test_written_settings_hold_no_password():
    found = settings(tracking={"uri": "http://user:secret@host:5000"})
    assert found.tracking.uri is not None
    assert to_plain(found)["tracking"]["uri"] is None
    kept = settings(tracking={"uri": "http://host:5000"})
    assert to_plain(kept)["tracking"]["uri"] == "http://host:5000"


def test_settings_of_another_schema_are_refused():
    assert "schema_version=2" in message(schema_version=2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"budgte": {}}, ["budgte", "Did you mean 'budget'?"]),
        ({"limits": 3}, ["limits=3", "group of keys"]),
        ({"run_dir": ""}, ["run_dir=", "a directory of its own"]),
        ({"nproc": "all"}, ["nproc=all", "whole number >= 1 or auto"]),
        ({"nproc": True}, ["nproc=true"]),
        ({"seed": -1}, ["seed=-1", ">= 0"]),
        ({"seed": 1.5}, ["seed=1.5"]),
        ({"budget": {"seconds": float("nan")}}, ["budget.seconds=nan", "> 0"]),
        ({"limits": {"trial_s": float("inf")}}, ["limits.trial_s=inf"]),
        ({"resume_force": "gpu"}, ["resume_force=gpu", "list"]),
        ({"resume_force": [1]}, ["resume_force.0=1", "text"]),
        ({"tracking": {"experiment": ""}}, ["tracking", "experiment"]),
        ({"strategy": {"name": "fakr"}}, ["strategy.name=fakr", "Did you mean 'fake'?"]),
        ({"strategy": "fakr"}, ["strategy=fakr", "Did you mean 'fake'?"]),
        ({"runner": None}, ["runner", "none is chosen"]),
        ({"runner": {"name": 3}}, ["runner.name=3"]),
        ({"runner": [1]}, ["runner=[1]"]),
        ({"workload": {"name": "x", "deep": [{"_target_": "a.b"}]}}, ["workload.deep.0._target_"]),
        ({"workload": {"name": "x", "_partial_": True}}, ["workload._partial_=true"]),
        ({"metrics": {"thresholds": {"comm_high": -1}}}, ["thresholds.comm_high=-1", "<= 1"]),
        ({"metrics": {"thresholds": {"iowait_percent": 101}}}, ["iowait_percent=101", "<= 100"]),
        ({"metrics": {"thresholds": {"network_megabytes_per_s": 0}}}, ["per_s=0", "> 0"]),
        (
            {"metrics": {"thresholds": {"comm_moderate": 0.3}}},
            ["metrics.thresholds.comm_moderate=0.3", "at most comm_high=0.25"],
        ),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_what_is_allowed(changes, words):
    text = message(**changes)
    for word in words:
        assert word in text


def test_the_hash_follows_what_defines_the_search_and_nothing_else():
    base = search_hash(settings())
    same = [{"budget": {"trials": 99}}, {"run_dir": "x"}, {"resume": "never"},
            {"tracking": {"enabled": False}}, {"confirm": {"finalists": 1}}]  # fmt: skip
    other = [{"seed": 1}, {"nproc": 4}, {"batch": "free"}, {"objective": {"metric": "latency"}},
             {"numerics": "exact"}, {"strategy": {"name": "fake", "jitter": 0.2}},
             {"runner": {"name": "fake", "knobs": {"bucket_cap_mb": [25, 8]}}}]  # fmt: skip
    assert {search_hash(settings(**change)) for change in same} == {base}
    hashes = [search_hash(settings(**change)) for change in other]
    assert len({base, *hashes}) == len(other) + 1
    assert default_run_dir(settings()) == Path("outputs") / f"fake-fake-{base}"


@dataclass(frozen=True)
class Inner:
    depth: int = option(1, low=1, high=9)


@dataclass(frozen=True)
class Options:
    table: str
    inner: Inner = field(default_factory=Inner)
    sizes: tuple[int, ...] = option((1,), low=1)
    pair: tuple[int, float] = (1, 2.0)
    names: list[str] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)
    kind: Literal["a", "b"] | None = None
    ratio: float | int | str = 1
    anything: Any = None
    where: Path | None = None

    def __post_init__(self) -> None:
        if self.table == "":
            raise ValueError("table is empty.")


def test_options_of_every_type():
    found = build_options(
        Options,
        {
            "table": "t", "inner": {"depth": 3}, "sizes": [2, 3], "pair": [4, 5], "names": ["n"],
            "weights": {"a": 1}, "kind": "b", "ratio": 2, "anything": {"x": 1}, "where": "p",
        },
        "runner",
    )  # fmt: skip
    assert found == Options(
        "t", Inner(3), (2, 3), (4, 5.0), ["n"], {"a": 1.0}, "b", 2, {"x": 1}, Path("p")
    )
    assert isinstance(found.ratio, int)
    assert build_options(Options, {"table": "t"}, "runner") == Options("t")
    assert build_options(Options, {"table": "t", "inner": Inner(4)}, "r").inner == Inner(4)


@pytest.mark.parametrize(
    ("mapping", "text"),
    [
        ({}, "runner.table: missing, and it has no default. Set runner.table=VALUE."),
        ({"table": ""}, "runner: table is empty."),
        (
            {"table": "t", "inner": {"dept": 1}},
            "runner.inner.dept: no such key. "
            "Did you mean 'runner.inner.depth'? Allowed: runner.inner.depth.",
        ),
        (
            {"table": "t", "inner": {"depth": 10}},
            "runner.inner.depth=10: Allowed: whole number >= 1 and <= 9.",
        ),
        ({"table": "t", "sizes": [0]}, "runner.sizes.0=0: Allowed: whole number >= 1."),
        ({"table": "t", "pair": [1]}, "runner.pair=[1]: Allowed: list of 2: whole number, number."),
        ({"table": "t", "kind": "c"}, "runner.kind=c: Allowed: a or b or null."),
        ({"table": "t", "weights": {"a": "x"}}, "runner.weights.a=x: Allowed: number."),
        ({"table": 3}, "runner.table=3: Allowed: text."),
    ],
)  # fmt: skip
def test_wrong_options(mapping, text):
    with pytest.raises(ConfigError) as caught:
        build_options(Options, mapping, "runner")
    assert str(caught.value) == text


def test_a_message_that_names_its_key_is_left_alone():
    @dataclass(frozen=True)
    class Named:
        table: str = ""

        def __post_init__(self) -> None:
            raise ValueError("runner.table: name a file.")

    with pytest.raises(ConfigError, match=r"^runner\.table: name a file\.$"):
        build_options(Named, {}, "runner")


def test_settings_are_frozen():
    found = settings()
    with pytest.raises(AttributeError):
        found.seed = 1  # type: ignore[misc]
    assert replace(found, seed=1).seed == 1


def test_secrets_among_a_scripts_arguments_are_in_no_file():
    command = ["train.py", "--token=a9SECRET", "--api_key", "b9SECRET"]
    found = settings(workload={"name": "script", "command": command})
    assert found.workload.options["command"] == command
    plain = to_plain(found)
    assert plain["workload"]["command"] == ["train.py", "--token=***", "--api_key", "***"]
    again = [train.replace("9SECRET", "9OTHER") for train in command]
    assert search_hash(settings(workload={"name": "script", "command": again})) == search_hash(
        found
    )
