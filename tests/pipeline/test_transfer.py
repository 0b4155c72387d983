"""Transfer from a prior search: from where, how it is kept, and that it stays out of records."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.small_search import Search, make_settings
from support.synthetic import SyntheticRunner

from perfsearch.config.options import ConfigError
from perfsearch.core.journal import JournalError, read
from perfsearch.core.knob import Kind, Knob
from perfsearch.core.space import Space
from perfsearch.core.trial import Outcome, Purpose, Status
from perfsearch.pipeline import transfer
from perfsearch.pipeline.session import Result
from perfsearch.tracking.history import StoredSearch, StoredTrial, StoreError

BEST = {"bucket": 32, "view": True}


def warm(search: Search, source: str | Path, run_dir: Path, **changes: Any) -> Result:
    strategy = {"name": "bayes", "warm_start": str(source)}
    return search(**{"strategy": strategy, "run_dir": str(run_dir), "budget": SMALL, **changes})


SMALL = {"trials": 4, "seconds": None}


def searched(result: Result) -> list[tuple[int, dict[str, Any], float | None]]:
    trials = [t for t in result.trials if t.purpose is Purpose.SEARCH]
    return [(t.number, t.configuration, t.cost) for t in trials]


def test_a_run_directory_is_started_from(search: Search, tmp_path: Path) -> None:
    first = search()
    result = warm(search, first.run_dir, tmp_path / "second")
    assert searched(result)[0][1] == BEST
    (line,) = [ln for ln in search.view.lines if ln.startswith("strategy.warm_start")]
    assert str(first.run_dir) in line
    assert "12 configurations" in line
    assert "none counts as a trial" in line


def test_nothing_of_it_is_in_the_records(search: Search, tmp_path: Path) -> None:
    first = search()
    result = warm(search, first.run_dir, tmp_path / "second")
    assert len(searched(result)) == SMALL["trials"]
    assert search.tracker.numbers["search/trials"] == SMALL["trials"]
    assert len(search.tracker.trials) == len(result.trials)
    with (result.run_dir / "trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(result.trials)
    _, events = read(result.run_dir / "journal.jsonl")
    assert sum(e.name == "told" for e in events) == 1 + SMALL["trials"]
    assert len(search.runner.plans) == len(result.trials)


def test_a_resumed_search_goes_on_as_an_undisturbed_one(search: Search, tmp_path: Path) -> None:
    """Also when the prior search is gone meanwhile: it is in the journal."""

    def fail(configuration: Any, plan: Any) -> Outcome | None:
        if plan.number == 3:
            raise KeyboardInterrupt
        return None

    source = search().run_dir
    calm = warm(search, source, tmp_path / "calm")
    with pytest.raises(KeyboardInterrupt):
        warm(search, source, tmp_path / "broken", runner=SyntheticRunner(fail=fail))
    shutil.move(source, tmp_path / "elsewhere")
    resumed = warm(search, source, tmp_path / "broken")
    assert resumed.run_dir == tmp_path / "broken"
    assert sorted(searched(resumed)) == sorted(searched(calm))
    opened = [e.data["definition"]["earlier"] for e in read(resumed.run_dir / "journal.jsonl")[1]
              if e.name == "opened"]  # fmt: skip
    assert len(opened) == 2
    assert opened[0] == opened[1]
    assert sum(ln.startswith("strategy.warm_start") for ln in search.view.lines) == 1


def test_costs_are_relative_to_that_baseline_and_repeats_are_pooled(search: Search) -> None:
    first = search()
    runner = SyntheticRunner()
    metric = make_settings().objective.metric
    costs = transfer.in_directory(first.run_dir, metric, runner).prior_search("x")
    assert costs is not None
    logs = [log for _, log in costs.costs]
    assert logs == sorted(logs)
    by_key = {tuple(c.values()): log for c, log in costs.costs}
    assert len(by_key) == 12
    assert abs(by_key[1, False]) < 0.05
    assert by_key[32, True] == pytest.approx(-0.357, abs=0.05)  # log of 1 - 0.2 x 1.5


def test_failures_are_left_out_and_the_median_stands_for_a_missing_baseline() -> None:
    runner = SyntheticRunner()
    costs = transfer.PriorCosts(runner)
    for bucket, cost in ((1, 1.0), (2, 2.0), (4, 4.0)):
        costs.add({"bucket": bucket, "view": False}, cost, Purpose.SEARCH)
    costs.add({"bucket": 3, "view": False}, 9.0, Purpose.SEARCH)  # no value of this search
    found = costs.prior_search("x")
    assert found is not None
    assert [c["bucket"] for c, _ in found.costs] == [1, 2, 4]
    assert [round(log, 3) for _, log in found.costs] == [-0.693, 0.0, 0.693]


def test_of_many_the_best_are_kept_and_some_of_the_rest() -> None:
    runner = SyntheticRunner()
    runner.space = Space([Knob("bucket", Kind.INTEGER, 1, low=1, high=1000)])
    costs = transfer.PriorCosts(runner)
    for bucket in range(1, 301):
        costs.add({"bucket": bucket}, float(bucket), Purpose.SEARCH)
    found = costs.prior_search("x")
    assert found is not None
    kept = [int(c["bucket"] or 0) for c, _ in found.costs]
    assert len(set(kept)) == transfer.MOST
    assert kept[:50] == list(range(1, 51))
    assert kept[-1] > 290


def test_what_is_held_elsewhere_here_is_left_out() -> None:
    runner = SyntheticRunner()
    runner.pinned = {"workers": 2}
    costs = transfer.PriorCosts(runner)
    for bucket, workers in ((1, 2), (2, 2), (4, 2), (8, 0)):
        whole = {"bucket": bucket, "view": False, "workers": workers}
        costs.add(whole, float(bucket), Purpose.SEARCH)
    costs.searched = {"bucket", "view", "workers"}
    found = costs.prior_search("x")
    assert found is not None
    assert [c["bucket"] for c, _ in found.costs] == [1, 2, 4]
    costs.searched.add("other")
    assert costs.unknown() == ["other"]
    assert costs.prior_search("x") is None


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nowhere", "there is no such directory"),
        ("{tmp}/empty", "journal.jsonl"),
        ("auto", "tracking.enabled=false"),
        ("0123456789abcdef0123456789abcdef", "tracking.enabled=false"),
    ],
)
def test_a_source_that_is_not_there_is_refused(
    search: Search, tmp_path: Path, source: str, words: str
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=words) as raised:
        warm(search, source.format(tmp=tmp_path), tmp_path / "second")
    assert raised.value.key == "strategy.warm_start"
    assert search.runner.plans == []
    assert not (tmp_path / "second" / "journal.jsonl").exists()


def test_a_search_of_other_knobs_is_refused(search: Search, tmp_path: Path) -> None:
    first = search()
    other = SyntheticRunner()
    other.space = Space([Knob("bucket", Kind.ORDINAL, 1, (1, 2, 4))])
    other.baseline = {"bucket": 1}
    with pytest.raises(ConfigError, match="it searched view, which this search does not know"):
        warm(search, first.run_dir, tmp_path / "second", runner=other)


def test_too_little_is_refused(search: Search, tmp_path: Path) -> None:
    first = search(budget={"trials": 1, "seconds": None})
    with pytest.raises(ConfigError, match="at least 3 are needed"):
        warm(search, first.run_dir, tmp_path / "second")


def test_without_the_key_nothing_is_looked_for(search: Search) -> None:
    result = search(strategy={"name": "bayes", "warm_start": None}, budget=SMALL)
    opened = next(e for e in read(result.run_dir / "journal.jsonl")[1] if e.name == "opened")
    assert "earlier" not in opened.data["definition"]
    assert "warm_start:" not in search.view.text


class FakeStore:
    """Searches and their trials, as ``PriorSearches`` gives them."""

    def __init__(self, *searches: tuple[dict[str, str], list[tuple[int, float]]]) -> None:
        self.kept = []
        for place, (parameters, costs) in enumerate(searches):
            stored = StoredSearch(f"run{place}", f"search-{place}", f"id{place}", "0", parameters)
            self.kept.append((stored, costs))

    def of_runner(self, experiment: str, runner: str) -> list[StoredSearch]:
        return [stored for stored, _ in reversed(self.kept)]

    def trials(self, search: StoredSearch, metric: Any) -> Iterator[StoredTrial]:
        costs = next(costs for stored, costs in self.kept if stored == search)
        for bucket, cost in costs:
            knobs = {"bucket": str(bucket), "view": "false"}
            yield StoredTrial(Purpose.SEARCH, knobs, cost)


def automatic(monkeypatch: pytest.MonkeyPatch, store: Any) -> transfer.Transfer:
    def opened(settings: Any) -> Any:
        if isinstance(store, Exception):
            raise store
        return store

    monkeypatch.setattr(transfer, "_open_store", opened)
    settings = make_settings(
        strategy={"name": "bayes", "warm_start": "auto"}, tracking={"enabled": True}
    )
    return transfer.find(settings, SyntheticRunner(), {}, None)


COSTS = [(1, 1.0), (2, 0.9), (4, 0.8)]


def test_auto_takes_the_most_similar_job_then_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    alike = {"identity/model": "synthetic", "workload": "mlp"}
    other = {"identity/model": "another", "workload": "mlp"}
    found = automatic(monkeypatch, FakeStore((alike, COSTS), (alike, COSTS), (other, COSTS)))
    assert found.prior_search is not None
    assert found.prior_search.source == "search-1 (MLflow run run1)"
    found = automatic(monkeypatch, FakeStore((other, COSTS), (alike, COSTS[:2])))
    assert found.prior_search is not None
    assert found.prior_search.source.startswith("search-0")


def test_auto_without_anything_similar_says_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = automatic(monkeypatch, FakeStore())
    assert found.prior_search is None
    assert "nothing is transferred" in found.line
    assert found.definition() == {}


def test_a_store_that_fails_costs_auto_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    found = automatic(monkeypatch, StoreError("nothing answers at http://there"))
    assert found.prior_search is None
    assert "nothing answers at http://there; nothing is transferred" in found.warning


def test_what_was_not_found_is_not_looked_for_again(search: Search, tmp_path: Path) -> None:
    """A resumed search must not start to believe what came into the store meanwhile."""
    settings = make_settings(
        strategy={"name": "bayes", "warm_start": "auto"}, tracking={"enabled": True}
    )
    journal = tmp_path / "journal.jsonl"
    lines: list[dict[str, Any]] = [{"schema": 1, "search_id": "x"}]
    lines.append({"n": 1, "event": "opened", "definition": {"a": 1}})
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = transfer.find(settings, SyntheticRunner(), {"a": 1}, journal)
    assert found.prior_search is None
    assert "as when this search began" in found.line
    lines[1]["definition"] = {"a": 1, "earlier": {"source": "x", "costs": [[1, 2]]}}
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(JournalError, match=r"what it says of strategy\.warm_start"):
        transfer.find(settings, SyntheticRunner(), {"a": 1}, journal)


def test_a_journal_of_another_version_is_named(search: Search, tmp_path: Path) -> None:
    source = tmp_path / "odd"
    source.mkdir()
    trial = {"number": 0, "configuration": {}, "purpose": "dance", "status": "ok"}
    lines = [{"schema": 1}, {"n": 1, "event": "finished", "trial": trial}]
    (source / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ConfigError, match=r"line 2 \(finished\) does not say what"):
        warm(search, source, tmp_path / "second")


def test_statuses_other_than_ok_teach_nothing(search: Search, tmp_path: Path) -> None:
    def fail(configuration: Any, plan: Any) -> Outcome | None:
        if configuration["bucket"] == 32:
            return Outcome(Status.OOM, reason="out of memory")
        return None

    first = search(SyntheticRunner(fail=fail))
    metric = make_settings().objective.metric
    found = transfer.in_directory(first.run_dir, metric, SyntheticRunner()).prior_search("x")
    assert found is not None
    assert all(c["bucket"] != 32 for c, _ in found.costs)


def test_a_pinned_knob_counts_for_older_trials_too(tmp_path: Path) -> None:
    """A search that was changed half-way held other values before."""
    runner = SyntheticRunner()
    runner.pinned = {"workers": 2}
    step = {"step_seconds": [0.1], "samples_per_step": 1}
    lines: list[dict[str, Any]] = [{"schema": 1}]
    number = 0
    for workers in (0, 2):
        lines.append({"event": "opened", "definition": {"pinned": {"workers": workers}}})
        for bucket in (1, 2, 4):
            trial = {
                "number": number,
                "configuration": {"bucket": bucket, "view": bool(workers)},
                "purpose": "search",
                "status": "ok",
                "measurement": step,
            }
            lines.append({"event": "finished", "trial": trial})
            number += 1
    for place, line in enumerate(lines[1:], start=1):
        line["n"] = place
    (tmp_path / "journal.jsonl").write_text("".join(json.dumps(ln) + "\n" for ln in lines))
    metric = make_settings().objective.metric
    found = transfer.in_directory(tmp_path, metric, runner).prior_search("x")
    assert found is not None
    assert [c["view"] for c, _ in found.costs] == [True] * 3


def test_best_config_that_pins_everything_needs_no_source() -> None:
    runner = SimpleNamespace(space=Space([]), pinned={"bucket": 32}, baseline={})
    settings = make_settings(strategy={"name": "bayes", "warm_start": "gone"})
    found = transfer.find(settings, runner, {}, None)  # type: ignore[arg-type]
    assert found == transfer.Transfer()


def test_values_of_the_store_are_compared_as_values() -> None:
    """The same configurations come of the store as of the journal, whatever their spelling."""
    runner = SyntheticRunner()
    runner.pinned = {"workers": 2.0, "sockets": None}
    parameters = {"pinned/workers": "2", "pinned/sockets": "null"}

    class Spelled(FakeStore):
        def trials(self, search: StoredSearch, metric: Any) -> Iterator[StoredTrial]:
            for bucket, view, sockets in (
                ("1.0", "false", "-1"), ("2", "true", "none"), ("4.0", "true", "null"),
                ("8.0", "1", "null"), ("16", "true", "3"),
            ):  # fmt: skip
                knobs = {"bucket": bucket, "view": view, "sockets": sockets}
                yield StoredTrial(Purpose.SEARCH, knobs, 1.0)

    store = Spelled((parameters, []))
    costs = transfer.in_store(store, store.kept[0][0], make_settings().objective.metric, runner)  # type: ignore[arg-type]
    prior = costs.prior_search("x")
    assert prior is not None
    kept = sorted((c["bucket"], c["view"]) for c, _ in prior.costs)
    assert kept == [(1, False), (2, True), (4, True)]
    assert all(type(bucket) is int for bucket, _ in kept)


def test_a_search_that_is_refused_leaves_nothing(search: Search, tmp_path: Path) -> None:
    run_dir = tmp_path / "a" / "b"
    with pytest.raises(ConfigError, match=transfer.KEY):
        warm(search, tmp_path / "nowhere", run_dir)
    assert not (tmp_path / "a").exists()
