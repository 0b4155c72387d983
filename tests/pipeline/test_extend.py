"""``resume=extend``: a finished search goes on, and what it measured counts."""

import math

import pytest
from support.small_search import Search
from support.synthetic import SyntheticRunner

from perfsearch.core.trial import Purpose
from perfsearch.core.verdict import plan_of_starts, read
from perfsearch.pipeline.resume import RefusedError
from perfsearch.pipeline.session import BASELINE


def of(result, purpose):
    return [t for t in result.trials if t.purpose is purpose]


def slightly(spread):
    """The best is faster by 2%; starts vary by ``spread``."""

    def measure(configuration, plan):
        outcome = SyntheticRunner().measure({"bucket": 1, "view": False}, plan)
        faster = 0.98 if configuration["bucket"] == 32 else 1.0
        off = 1 + spread * ((plan.number * 7919) % 11 - 5) / 5
        if plan.purpose is not Purpose.CONFIRM:
            off = 1.0
        outcome.measurement.step_seconds = [0.1 * faster * off] * 8
        return outcome

    return measure


def test_more_pairs_are_added_to_those_that_a_finished_search_has(search: Search) -> None:
    options = {"sentinel_every": 0, "strategy": {"name": "grid"}}
    first = search(
        SyntheticRunner(fail=slightly(0.05)), confirm={"max_repeats": 4, "finalists": 1}, **options
    )
    assert first.verdict.winner is None
    before = [t.number for t in first.trials]
    second = search(
        SyntheticRunner(fail=slightly(0.05)),
        resume="extend",
        confirm={"max_repeats": 8, "finalists": 1},
        **options,
    )
    assert second.run_dir == first.run_dir
    assert [t.number for t in second.trials][: len(before)] == before
    assert len(of(second, Purpose.SEARCH)) == len(of(first, Purpose.SEARCH))
    costs = list(second.verdict.costs.values())
    assert all(c[: len(b)] == b for c, b in zip(costs, first.verdict.costs.values(), strict=True))
    assert len(costs[0]) > len(first.verdict.costs[BASELINE])


def test_each_judgement_after_the_first_may_err_half_as_often(search: Search) -> None:
    options = {"sentinel_every": 0, "strategy": {"name": "grid"}}
    confirm = {"max_repeats": 4, "finalists": 1}
    first = search(SyntheticRunner(fail=slightly(0.05)), confirm=confirm, **options)
    again = search(
        SyntheticRunner(fail=slightly(0.05)), resume="extend", confirm=confirm, **options
    )
    (arm,) = again.verdict.intervals

    costs = again.verdict.costs
    logs = [math.log(a / b) for a, b in zip(costs[BASELINE], costs[arm], strict=True)]
    halved = read(logs, plan_of_starts(4, comparisons=2, either_way=False)).interval
    assert again.verdict.intervals[arm].half_width == pytest.approx(halved.half_width)
    assert halved.half_width > first.verdict.intervals[arm].half_width


def test_a_finalist_that_is_found_later_is_compared_with_starts_of_its_own_time(
    search: Search,
) -> None:
    options = {"sentinel_every": 0, "strategy": {"name": "grid"}, "confirm": {"finalists": 1}}
    first = search(budget={"trials": 2, "seconds": None}, **options)
    assert len(of(first, Purpose.SEARCH)) == 2
    second = search(resume="extend", budget={"trials": 11, "seconds": None}, **options)
    assert len(of(second, Purpose.SEARCH)) == 11
    assert second.best["bucket"] == 32
    last_before = max(t.number for t in first.trials)
    assert all(t.number > last_before for t in second.verdict.trials)
    third = search(resume="extend", budget={"trials": 11, "seconds": None}, **options)
    assert [t.number for t in third.verdict.trials][:1] == [second.verdict.trials[0].number]


def test_there_must_be_a_search_to_extend(search: Search) -> None:
    with pytest.raises(RefusedError, match="resume=extend: there is no journal"):
        search(resume="extend")


def test_a_comparison_that_will_show_nothing_is_announced(search: Search) -> None:
    def noisy(configuration, plan):
        outcome = SyntheticRunner().measure(configuration, plan)
        if plan.purpose.is_of_search:
            by = 1.3 if plan.number % 2 else 0.8
            outcome.measurement.step_seconds = [s * by for s in outcome.measurement.step_seconds]
        return outcome

    search(SyntheticRunner(fail=noisy), sentinel_every=2, confirm={"max_repeats": 3})
    text = search.view.text
    assert "warning: this will probably be inconclusive: 3 pairs show a gain of" in text
