"""Reading prior searches back from a real store."""

from __future__ import annotations

import math
import socket
from typing import Any

import pytest
from support.search_runs import LocalStore, Search, measurement, trial
from support.small_search import make_settings
from support.synthetic import SyntheticRunner

from perfsearch.config.options import ConfigError
from perfsearch.core.knob import Kind, Knob, Value
from perfsearch.core.objective import Metric
from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.pipeline import transfer
from perfsearch.tracking import names
from perfsearch.tracking.history import (
    PriorSearchError,
    PriorSearches,
    StoreError,
    value_of,
)
from perfsearch.tracking.location import StoreLocation, locate

RUNNER = SyntheticRunner()


def synthetic_trials() -> list[Trial]:
    """Every configuration of the synthetic space, and a failure."""
    trials = []
    for number, point in enumerate(RUNNER.space.listed() or []):
        step_s = 0.1 / (1 + number)
        purpose = Purpose.SEARCH if number else Purpose.BASELINE
        trials.append(
            trial(
                number, configuration=dict(point), purpose=purpose, measurement=measurement(step_s)
            )
        )
    return [*trials, trial(len(trials), Status.OOM, configuration={"bucket": 1, "view": True})]


def show(store: LocalStore, search_id: str, trials: list[Trial], **parameters: str) -> str:
    """Record a search; return the id of its run."""
    known = trials[0].configuration.keys() == RUNNER.space.by_name.keys()
    knobs = RUNNER.space.knobs if known else ()
    search = Search(store, search_id, {"runner": "replay", **parameters}, knobs)
    search.trials(*trials)
    assert search.end()
    found = [r for r in store.runs("search") if r.data.tags["perfsearch.search_id"] == search_id]
    return str(found[0].info.run_id)


def find(store: LocalStore, asked: str) -> transfer.Transfer:
    settings = make_settings(
        strategy={"name": "bayes", "warm_start": asked},
        tracking={"enabled": True, "uri": store.uri, "experiment": "exp"},
    )
    return transfer.find(settings, RUNNER, {}, None)


def test_a_search_is_found_by_runner_and_knobs_and_transferred(store: LocalStore) -> None:
    trials = synthetic_trials()
    run_id = show(store, "one", trials, **{"identity/model": "synthetic", "workload": "mlp"})
    show(store, "two", trials[:6], **{"identity/model": "another", "workload": "mlp"})
    show(store, "other", [trial(0), trial(1), trial(2), trial(3)], workload="mlp")
    found = find(store, "auto")
    assert found.prior_search is not None
    assert run_id in found.line
    assert len(found.prior_search.costs) == 12
    assert found.prior_search.costs[0][0] == trials[11].configuration
    assert found.prior_search.costs[0][1] == pytest.approx(math.log(1 / 12), abs=1e-4)
    assert found.prior_search.costs[-1] == (trials[0].configuration, 0.0)
    assert find(store, run_id) == found


def test_what_is_no_search_is_refused(store: LocalStore) -> None:
    run_id = show(store, "one", synthetic_trials()[:4])
    child = store.trials()["t0001"].info.run_id
    with pytest.raises(ConfigError, match=f"no search of perfsearch; its search is {run_id}"):
        find(store, child)
    with pytest.raises(ConfigError, match="there is no such run in sqlite"):
        find(store, "0" * 32)
    other = show(store, "other", [trial(0), trial(1), trial(2)])
    with pytest.raises(ConfigError, match="it searched algorithm, bucket_cap_mb"):
        find(store, other)


def test_auto_finds_nothing_in_an_empty_store(store: LocalStore) -> None:
    found = find(store, "auto")
    assert found.prior_search is None
    assert "no prior search of runner=replay" in found.line
    assert store.client.get_experiment_by_name("exp") is None


def test_pinned_knobs_must_agree(store: LocalStore) -> None:
    runner = SyntheticRunner()
    runner.pinned = {"workers": 2}
    show(store, "one", synthetic_trials(), **{"pinned/workers": "4"})
    searches = PriorSearches(locate(store.uri))
    (search,) = searches.of_runner("exp", "replay")
    assert search.pinned == {"workers": "4"}
    assert searches.of_runner("exp", "ddp") == []
    assert searches.of_runner("nothing", "replay") == []

    def usable(value: Value) -> int:
        runner.pinned = {"workers": value}
        costs = transfer.in_store(searches, search, Metric.THROUGHPUT, runner)
        return len(costs)

    assert (usable(2), usable(4)) == (0, 12)


def test_each_objective_has_its_cost(store: LocalStore) -> None:
    run_id = show(store, "one", synthetic_trials()[:2])
    searches = PriorSearches(locate(store.uri))
    found = list(searches.trials(searches.by_id(run_id), Metric.LATENCY))
    assert [t.purpose for t in found] == [Purpose.BASELINE, Purpose.SEARCH]
    assert found[0].cost / found[1].cost == pytest.approx(2.0)
    found = list(searches.trials(searches.by_id(run_id), Metric.THROUGHPUT))
    assert found[0].cost / found[1].cost == pytest.approx(2.0)
    assert list(searches.trials(searches.by_id(run_id), Metric.FLOPS)) == []


def test_a_store_that_does_not_answer_says_where() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(StoreError, match=f"nothing answers at http://127.0.0.1:{port}"):
        PriorSearches(StoreLocation(f"http://127.0.0.1:{port}", None))


def test_a_failure_in_the_store_is_told_from_one_here(store: LocalStore, monkeypatch: Any) -> None:
    searches = PriorSearches(locate(store.uri))

    def broken(name: str) -> str:
        raise RuntimeError("database is locked\nand more")

    monkeypatch.setattr(searches._client, "experiment_id", broken)
    with pytest.raises(StoreError, match=r"cannot be read: database is locked$"):
        searches.of_runner("exp", "replay")
    with pytest.raises(PriorSearchError):
        searches.by_id("0" * 32)


KNOBS = [
    Knob("ordinal", Kind.ORDINAL, 25, (None, 1, 25, 2.5)),
    Knob("boolean", Kind.BOOLEAN, False),
    Knob("category", Kind.CATEGORICAL, "ring", ("ring", "tree", None)),
    Knob("whole", Kind.INTEGER, 4, low=1, high=100, log=True),
    Knob("real", Kind.REAL, None, low=0.001, high=10.0, log=True),
]


@pytest.mark.parametrize("knob", KNOBS, ids=lambda k: k.name)
def test_values_survive_the_store(knob: Knob) -> None:
    values: list[Value] = [*knob.values, knob.default]
    if knob.is_range:
        values += [17 if knob.kind is Kind.INTEGER else 0.12345678901234]
    nulls = {knob.name: names.null_value(knob)}
    for value in values:
        text = names.knob_params({knob.name: value}, [knob.name], nulls)[f"knob/{knob.name}"]
        again = value_of(knob, text)
        assert again == value
        assert type(again) is type(value)
    with pytest.raises(LookupError, match=knob.name):
        value_of(knob, "nonsense")
