"""How much trials at the same time disturb each other, and what is done about it."""

from __future__ import annotations

import pytest
from support.beside import Beside
from support.small_search import Search

from perfsearch.core.journal import read
from perfsearch.core.knob import Configuration
from perfsearch.core.trial import Outcome, Purpose, Status, Trial
from perfsearch.pipeline.neighbours import judge
from perfsearch.runners.base import Plan


class OneHost(Beside):
    """Lanes that share a host; trials are slower by a factor where another runs beside them."""

    shares_host = True

    def __init__(self, slower: float = 1.0, **more: object) -> None:
        super().__init__(**more)
        self.slower = slower
        self.seen = 0

    def measure(self, configuration: Configuration, plan: Plan) -> Outcome:
        outcome = super().measure(configuration, plan)
        if plan.purpose is Purpose.BESIDE and outcome.measurement is not None:
            self.seen += 1
            if self.seen in (3, 4, 5, 6):  # after one alone on each of two lanes
                steps = [s * self.slower for s in outcome.measurement.step_seconds]
                outcome.measurement.step_seconds = steps
        return outcome


def kinds(trials: list[Trial]) -> list[Purpose]:
    return [t.purpose for t in trials]


def test_lanes_that_do_not_disturb_are_used(search: Search) -> None:
    result = search(OneHost(spread=0.001), parallel_trials=2)
    assert kinds(result.trials).count(Purpose.BESIDE) == 8
    assert {t.lane for t in result.trials if t.purpose is Purpose.SEARCH} == {0, 1}
    assert "2 trials at a time" in search.view.text


def test_trials_that_disturb_run_one_at_a_time_and_it_is_said_and_recorded(search: Search) -> None:
    result = search(OneHost(slower=1.3, spread=0.001), parallel_trials=2)
    assert {t.lane for t in result.trials if t.purpose is Purpose.SEARCH} == {0}
    (warning,) = [line for line in search.view.lines if "disturb each other, so" in line]
    assert warning.startswith("warning: the baseline's cost changes by +30.")
    assert "parallel_trials=1" in warning
    _, events = read(search.run_dir / "journal.jsonl")
    (found,) = [e.data for e in events if e.name == "neighbours"]
    assert found["lanes"] == 1
    assert found["change"] == pytest.approx(0.3, abs=0.01)
    assert [len(readings) for readings in found["beside"]] == [2, 2]


def test_what_was_measured_before_a_kill_is_believed(search: Search) -> None:
    def fail(configuration: Configuration, plan: Plan) -> Outcome | None:
        if plan.purpose is Purpose.SEARCH:
            raise KeyboardInterrupt
        return None

    with pytest.raises(KeyboardInterrupt):
        search(OneHost(slower=1.3, spread=0.001, fail=fail), parallel_trials=2)
    result = search(OneHost(spread=0.001), parallel_trials=2)
    assert kinds(result.trials).count(Purpose.BESIDE) == 8
    assert {t.lane for t in result.trials if t.purpose is Purpose.SEARCH} == {0}


def test_a_baseline_that_does_not_run_beside_itself_leaves_one_at_a_time(search: Search) -> None:
    def fail(configuration: Configuration, plan: Plan) -> Outcome | None:
        failed = plan.purpose is Purpose.BESIDE and plan.lane == 1
        return Outcome(Status.OOM, reason="no memory for two") if failed else None

    result = search(OneHost(fail=fail), parallel_trials=2)
    assert {t.lane for t in result.trials if t.purpose is Purpose.SEARCH} == {0}
    assert "warning: one trial at a time" in search.view.text


class OfFiles(OneHost):
    """Says of itself that it may not be measured beside itself, from some trial on."""

    def __init__(self, knows_after: int, **more: object) -> None:
        super().__init__(**more)
        self._knows_after = knows_after

    def why_alone(self) -> str:
        return "it writes to train.log" if self.seen >= self._knows_after else ""


@pytest.mark.parametrize(("knows_after", "beside"), [(0, 0), (3, 8)])
def test_a_runner_that_knows_why_not_has_one_at_a_time(
    search: Search, knows_after: int, beside: int
) -> None:
    result = search(OfFiles(knows_after, spread=0.001), parallel_trials=2)
    assert kinds(result.trials).count(Purpose.BESIDE) == beside
    assert {t.lane for t in result.trials if t.purpose is Purpose.SEARCH} == {0}
    (warning,) = [line for line in search.view.lines if "it writes to train.log" in line]
    assert warning == (
        "warning: one trial at a time, on one of 2 shares of the devices: it writes to train.log. "
        "parallel_trials=1 gives it all of them"
    )


def test_the_strategy_and_the_baselines_cost_do_not_know_of_it(search: Search) -> None:
    search(OneHost(slower=1.3, spread=0.001), parallel_trials=2)
    _, events = read(search.run_dir / "journal.jsonl")
    of_it = {
        e.data["trial"]["number"]
        for e in events
        if e.name == "finished" and e.data["trial"]["purpose"] == Purpose.BESIDE
    }
    assert len(of_it) == 8
    assert not of_it & {e.data["trial"] for e in events if e.name == "told"}


@pytest.mark.parametrize(
    ("alone", "beside", "lanes"),
    [
        ([0.100, 0.101], [0.102, 0.101], 2),  # 1%: less than is looked for
        ([0.100, 0.101], [0.120, 0.121], 1),  # 20%, and readings agree
        ([0.100, 0.101], [0.080, 0.081], 1),  # in the other direction: not understood
        ([0.100, 0.105], [0.108, 0.112], 2),  # 7%, and readings differ by 5%
        ([0.100, 0.200], [0.150, 0.150], 1),  # nobody knows
    ],
)
def test_more_than_the_noise_is_a_disturbance(
    alone: list[float], beside: list[float], lanes: int
) -> None:
    quiet = [(0.1, 0.001), (0.1, 0.001)]
    found = judge([quiet, [(c, 0.001) for c in alone]], [quiet, [(c, 0.001) for c in beside]])
    assert found.lanes == lanes
