"""Searches over jobs whose steps are uneven."""

from __future__ import annotations

import statistics

import pytest
from support.synthetic import SyntheticRunner, interrupt_at

from perfsearch.core.trial import Measurement, Outcome, Purpose, Status
from perfsearch.metrics.slow_steps import slow_steps
from perfsearch.pipeline.session import CONFIRMED_STEPS, with_look
from perfsearch.runners.base import Plan


class Uneven(SyntheticRunner):
    """Each configuration has steps of its own; noise is that of ``SyntheticRunner``."""

    def __init__(self, steps_of, count=40, **options) -> None:
        super().__init__(**options)
        self._steps_of, self._count = steps_of, count

    def measure(self, configuration, plan):
        found = super().measure(configuration, plan)
        if found.measurement is None:
            return found
        level = statistics.fmean(found.measurement.step_seconds) / 0.1
        steps = [level * s for s in self._steps_of(configuration, self._count)]
        measurement = Measurement(steps, samples_per_step=32, first_losses=[3.0, 2.5])
        measurement.environment["slow_steps"] = slow_steps(steps)
        return Outcome(Status.OK, measurement, fresh_process=plan.fresh)


def every_eighth(configuration, count):
    """With a ``view`` usual steps are quicker, and every eighth stalls for longer."""
    quick, slow = (0.08, 0.42) if configuration["view"] else (0.1, 0.1)
    return [slow if place % 8 == 5 else quick for place in range(count)]


def test_a_quicker_median_of_a_slower_job_is_no_gain(search):
    result = search(Uneven(every_eighth, gain=0.0))
    assert result.verdict.winner is None
    costs = {t.configuration["view"]: t.cost for t in result.trials if t.cost is not None}
    assert costs[True] / costs[False] == pytest.approx(1.225, rel=0.05)


def test_the_median_is_scored_on_request(search):
    result = search(Uneven(every_eighth, gain=0.0), objective={"statistic": "median"})
    # the rate says otherwise, so that it is no gain either
    assert result.verdict.winner is None and "by the rate of its steps" in result.verdict.reason
    costs = {t.configuration["view"]: t.cost for t in result.trials if t.cost is not None}
    assert costs[True] / costs[False] == pytest.approx(0.8, rel=0.05)


def once_in_a_window(configuration, count):
    """A gain by the rate only because a slow half of the steps is a little shorter."""
    if configuration["view"]:
        return [0.11] * count
    return [0.1] * (count // 2 + 1) + [0.145] * (count // 2 - 1)


def test_a_gain_on_which_rate_and_median_disagree_is_none(search):
    result = search(Uneven(once_in_a_window, gain=0.0, spread=0.001))
    assert result.verdict.winner is not None, "nothing is slow: the rate is sure"
    few = Uneven(lambda c, n: [*once_in_a_window(c, n)[:-1], 1.0], gain=0.0, spread=0.001)
    result = search(few, run_dir=str(search.run_dir) + "-stalls")
    assert result.verdict.winner is None
    assert "but by the median of its steps 1.1 times as slow" in result.verdict.reason


def test_the_verdict_says_what_slow_steps_cost(search):
    def job(configuration, count):
        return [0.4 if place % 8 == 5 else 0.1 for place in range(count)]

    result = search(Uneven(job))
    assert result.verdict.reason.endswith("; 27% of the baseline's time is slow steps: nothing "
                                          "that was seen")  # fmt: skip


def test_the_baseline_looks_for_what_recurs_and_others_cover_it_twice(search):
    def job(configuration, count):
        return [3.0 if place % 65 == 64 else 0.01 for place in range(count)]

    with pytest.raises(KeyboardInterrupt):
        search(Uneven(job, count=400, fail=interrupt_at(3)))
    baseline, *others = search.runner.plans
    assert (baseline.look_steps, baseline.look_seconds) == (400, 4.0)
    assert {plan.look_steps for plan in others} == {131}
    search(Uneven(job, count=400))
    assert {plan.look_steps for plan in search.runner.plans} == {131}, "also after a resume"
    search(run_dir=str(search.run_dir) + "-even")
    looks = {plan.purpose: plan.look_steps for plan in search.runner.plans}
    assert looks[Purpose.SEARCH] == 0 and looks[Purpose.CONFIRM] == CONFIRMED_STEPS


def test_windows_are_as_long_as_it_takes_to_meet_the_usual_share_of_what_comes_in_clusters(search):
    def job(configuration, count):
        return [0.04 if place % 80 in {0, 1, 3, 4, 7, 10, 21} else 0.01 for place in range(count)]

    search(Uneven(job, count=160))
    _, *others = search.runner.plans
    assert {plan.look_steps for plan in others} == {80}


def test_a_baseline_that_failed_tells_no_period():
    assert with_look(Plan(3, Purpose.SEARCH), None).look_steps == 0


def test_earlier_trials_are_scored_anew_where_the_statistic_changes(search):
    options = {"budget": {"trials": 6, "seconds": None}}
    with pytest.raises(KeyboardInterrupt):
        search(Uneven(every_eighth, fail=interrupt_at(5)), **options)
    result = search(Uneven(every_eighth), objective={"statistic": "median"}, **options)
    assert "earlier trials still fit and are kept" in search.view.text
    for trial in result.trials:
        if trial.cost is not None:
            middle = statistics.median(trial.measurement.step_seconds)
            assert trial.cost == pytest.approx(middle / 32), trial.number
