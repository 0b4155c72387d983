"""Trials at the same time: what is proposed, where it runs, and what is on record."""

from __future__ import annotations

import threading

import pytest
from support.beside import LATE_S, Before, Beside
from support.small_search import Search

from perfsearch.core.journal import read
from perfsearch.core.knob import Configuration
from perfsearch.core.space import key_of
from perfsearch.core.trial import Outcome, Purpose, Status
from perfsearch.runners.base import Plan


def pairs() -> Before:
    """Hold each trial of the search until another is measured, too."""
    barrier = threading.Barrier(2, timeout=LATE_S)

    def wait(plan: Plan) -> None:
        if plan.purpose is Purpose.SEARCH:
            barrier.wait()

    return wait


def test_two_trials_are_measured_at_the_same_time(search: Search) -> None:
    runner = Beside(pairs())
    result = search(runner, budget={"trials": 8, "seconds": None}, parallel_trials=2)
    searched = [t for t in result.trials if t.purpose is Purpose.SEARCH]
    assert [t.status for t in searched] == [Status.OK] * 8
    assert {t.lane for t in searched} == {0, 1}
    assert len({key_of(t.configuration) for t in searched}) == 8


def test_baseline_sentinels_and_confirmation_run_alone(search: Search) -> None:
    runner = Beside()
    result = search(runner, sentinel_every=3, parallel_trials=2)
    alone = [t for t in result.trials if t.purpose is not Purpose.SEARCH]
    assert {t.purpose for t in alone} >= {Purpose.BASELINE, Purpose.SENTINEL, Purpose.CONFIRM}
    for trial in alone:
        assert trial.lane == 0
        assert not [p for p in runner.neighbours[trial.number] if p is not trial.purpose]


def test_a_runner_of_one_lane_proposes_and_records_as_ever(search: Search) -> None:
    plain = [key_of(t.configuration) for t in search().trials]
    search.run_dir = search.run_dir.with_name("other")
    assert [key_of(t.configuration) for t in search(Beside(lanes=1)).trials] == plain


def test_a_budget_of_trials_counts_those_under_way(search: Search) -> None:
    result = search(Beside(lanes=3), budget={"trials": 4, "seconds": None}, parallel_trials=3)
    assert sum(t.purpose is Purpose.SEARCH for t in result.trials) == 4


def test_what_is_under_way_is_measured_to_its_end_when_a_breaker_trips(search: Search) -> None:
    failed = threading.Event()

    def fail(configuration: Configuration, plan: Plan) -> Outcome | None:
        if plan.purpose is not Purpose.SEARCH:
            return None
        if plan.lane == 0:
            failed.set()
            return Outcome(Status.CRASH, reason="on purpose")
        assert failed.wait(LATE_S)
        return None

    result = search(Beside(fail=fail), on_failure="stop", parallel_trials=2)
    ended = {t.lane: t.status for t in result.trials if t.purpose is Purpose.SEARCH}
    assert ended == {0: Status.CRASH, 1: Status.OK}
    assert "on_failure=stop" in result.reason


def test_what_is_under_way_is_broken_off_on_record_and_run_again(search: Search) -> None:
    """The strategy is asked and told in the same order, so that it proposes the same."""
    started = threading.Event()

    def fail(configuration: Configuration, plan: Plan) -> Outcome | None:
        if plan.purpose is not Purpose.SEARCH or plan.number < 5:
            return None
        if plan.lane == 0:
            assert started.wait(LATE_S)
            raise KeyboardInterrupt
        started.set()
        assert runner.broken_off.wait(LATE_S), "nothing broke it off"
        return Outcome(Status.CRASH, reason="ended from outside")

    runner = Beside(fail=fail)
    with pytest.raises(KeyboardInterrupt):
        search(runner, parallel_trials=2)
    _, events = read(search.run_dir / "journal.jsonl")
    trials = [e.data["trial"] for e in events if e.name == "finished"]
    broken = [t["number"] for t in trials if t["status"] == Status.INTERRUPTED]
    assert len(broken) == 2
    result = search(Beside(), parallel_trials=2)
    again = {t.number: t for t in result.trials if t.number in broken}
    assert [t.status for t in again.values()] == [Status.OK] * 2
    assert "proposes otherwise" not in search.view.text
    searched = [t for t in result.trials if t.purpose is Purpose.SEARCH]
    assert len({key_of(t.configuration) for t in searched}) == len(searched)


@pytest.mark.parametrize("strategy", ["random", "bayes", "grid"])
def test_a_kill_at_any_event_goes_on_with_the_same_proposals(search: Search, strategy: str) -> None:
    """The journal says all that is needed, wherever it ends with two trials under way."""
    changes = {"strategy": {"name": strategy}, "parallel_trials": 2, "sentinel_every": 0}
    changes["budget"] = {"trials": 6, "seconds": None}
    search(Beside(pairs()), **changes)
    whole = (search.run_dir / "journal.jsonl").read_text().splitlines(keepends=True)
    first = next(i for i, line in enumerate(whole) if '"event":"asked"' in line)
    for count in range(first, first + 12, 2):
        search.run_dir = search.run_dir.with_name(f"killed-{strategy}-{count}")
        search.run_dir.mkdir()
        (search.run_dir / "journal.jsonl").write_text("".join(whole[:count]))
        result = search(Beside(), **changes)
        assert "proposes otherwise" not in search.view.text
        searched = [t for t in result.trials if t.purpose is Purpose.SEARCH]
        assert len({key_of(t.configuration) for t in searched}) == len(searched) == 6
