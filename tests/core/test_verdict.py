import functools
import math

import numpy as np
import pytest
from scipy import stats

from perfsearch.core.verdict import (
    Answer,
    Interval,
    Plan,
    block_orders,
    expect,
    follow,
    leader,
    plan_of_starts,
    plan_of_steps,
    read,
    smallest_gain,
    told,
    too_few,
    two_kinds,
)

SHOWN = [Answer.FASTER.value, Answer.SLOWER.value]


@pytest.mark.parametrize("gain", [1.0, 1.03])
def test_ending_at_any_look_keeps_the_coverage(gain: float) -> None:
    """The interval of whichever look ends it covers the truth in 95% of 20,000 comparisons."""
    generator = np.random.default_rng(5)
    logs = math.log(gain) + 0.014 * generator.standard_normal((20_000, 8))
    course = follow(logs, plan_of_starts(8, either_way=False))
    assert (np.abs(course.mean - math.log(gain)) <= course.half_width).mean() >= 0.95


def test_a_sure_gain_leads_before_a_larger_one_that_may_be_none() -> None:
    sure, unsure = Interval(1.854, 1.347, 2.554, 3), Interval(1.862, 0.776, 4.466, 3)
    none = Interval(1.1, 0.9, 1.3, 3)
    assert leader({25: unsure, 26: sure}) == 26
    assert leader({1: none, 25: unsure}) == 25


def test_too_few_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="two pairs"):
        read([0.1], plan_of_starts(4))


def test_an_interval_says_no_more_than_it_knows() -> None:
    assert str(Interval(1.2, 1.1, 1.3, 5)) == "+20.0% (95% interval +10.0% to +30.0%)"
    assert Interval(1.2, 1.1, 1.3, 5).gain == "+20.0% (+10.0% to +30.0%)"
    barely = Interval(1.009, 1.00046, 1.018, 5)
    assert barely.is_gain
    assert barely.gain == "+0.90% (+0.05% to +1.80%)"
    wild = Interval(1.2, 1e-5, 1e5, 2)
    assert wild.gain == str(wild) == "+20.0% (inconclusive, 2 pairs)"


def test_the_only_look_is_the_plain_interval_at_what_is_spent() -> None:
    logs = np.array([0.01, 0.04, 0.02, 0.03, 0.05])
    reading = read(logs, Plan((5,)))
    half = stats.t.ppf(1 - 0.045 / 2, 4) * logs.std(ddof=1) / math.sqrt(5)
    assert float(reading.half_width) == pytest.approx(half, rel=1e-6)
    assert reading.interval.ratio == pytest.approx(math.exp(0.03))


def test_bounds_fall_and_the_last_spends_what_is_left() -> None:
    plan = plan_of_starts(8)
    bounds = [plan.bound(n) for n in plan.looks]
    assert bounds == sorted(bounds, reverse=True)
    assert plan.bound(3, last=True) == pytest.approx(stats.t.ppf(1 - 0.045 / 2, 2), rel=1e-6)
    for pairs in (4, 5, 6, 7):
        assert stats.t.ppf(1 - 0.045 / 2, pairs - 1) < plan.bound(pairs, last=True)
        assert plan.bound(pairs, last=True) < plan.bound(pairs)
    assert plan.bound(8, last=True) == plan.bound(8)
    assert plan_of_starts(8, comparisons=2).bound(5) > plan.bound(5)


def test_a_look_that_was_not_planned_is_refused_unless_it_is_the_last() -> None:
    with pytest.raises(ValueError, match=r"pairs=7 is not one of the planned looks \(4, 8\)"):
        Plan((4, 8)).bound(7)
    with pytest.raises(ValueError, match="pairs=9 is not one"):
        read(np.linspace(0, 1, 9), Plan((4, 8)))
    assert Plan((4, 8)).bound(7, last=True) > Plan((7,)).bound(7)


@pytest.mark.parametrize("looks", [(), (1, 3), (4, 3), (3, 3)])
def test_looks_have_to_rise_from_two(looks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="rising numbers of pairs"):
        Plan(looks)


@pytest.mark.parametrize("plan", [plan_of_starts(6), plan_of_starts(8), plan_of_steps(100)])
def test_equal_arms_are_told_apart_in_less_than_a_twentieth(plan: Plan) -> None:
    generator = np.random.default_rng(21)
    course = follow(generator.standard_normal((20_000, plan.most)), plan)
    assert 0.02 < np.isin(course.answers, SHOWN).mean() < 0.05
    assert (np.abs(course.mean) <= course.half_width).mean() > 0.95


@pytest.mark.parametrize("blocks", [2, 3, 4, 5, 6, 7])
def test_the_interval_holds_where_time_ends_early(blocks: int) -> None:
    """Looks before the end count, among them one at the same pairs."""
    plan = plan_of_starts(8)
    logs = np.random.default_rng(22).standard_normal((20_000, 8))
    shown = np.zeros(len(logs), dtype=bool)
    for look in plan.looks:
        if look <= blocks:
            shown |= np.isin(read(logs[:, :look], plan).answers, SHOWN)
    shown |= np.isin(read(logs[:, :blocks], plan, last=True).answers, SHOWN)
    assert 0.035 < shown.mean() < 0.05


def test_three_percent_between_starts_that_vary_by_one_takes_five_of_each() -> None:
    for most in (6, 8):
        expected = expect(plan_of_starts(most), noise=0.01, gain=0.03)
        assert expected.power >= 0.9
        assert expected.pairs <= 5


@pytest.mark.parametrize("steps", [10, 20])
def test_one_percent_that_a_job_can_switch_is_shown_within_a_hundred_pairs(steps: int) -> None:
    expected = expect(plan_of_steps(100), noise=0.05 / math.sqrt(steps), gain=0.01)
    assert expected.power >= 0.9


def test_what_is_expected_is_told_with_its_time() -> None:
    expected = expect(plan_of_starts(8), noise=0.01, gain=0.05)
    assert expected.seconds(20.0) == pytest.approx(expected.mean_pairs * 40)
    assert str(expected) == "a gain of 5.0% is shown in 100%, half of the time within 4 pairs"


def test_the_smallest_gain_is_shown_in_nine_of_ten_by_the_last_look() -> None:
    plan = Plan((6,))
    gain = smallest_gain(plan, noise=0.02)
    assert expect(plan, 0.02, gain).power == pytest.approx(0.9, abs=0.02)


def test_a_reading_says_what_could_have_been_shown() -> None:
    reading = read([0.02, -0.02, 0.01, -0.01, 0.015, -0.015], plan_of_starts(6))
    assert reading.answer is Answer.OPEN
    assert told(reading) == (
        "no difference shown (95% interval -2.2% to +2.2%; 6 pairs of starts); "
        "a difference of 3.4% would have been shown in 90%"
    )


def test_answers_of_exact_cases() -> None:
    plan = plan_of_starts(6, min_gain=0.03)
    wiggle = 0.001 * np.array([1.0, -1, 1, -1, 1, -1])
    assert read(0.05 + wiggle[:4], plan).answer is Answer.FASTER
    assert read(-0.05 + wiggle[:4], plan).answer is Answer.SLOWER
    assert read(10 * wiggle[:5], plan).answer is Answer.SAME
    assert read(10 * wiggle[:5], plan_of_starts(6)).answer is Answer.FUTILE
    assert read(10 * wiggle[:3] + 0.02, plan).answer is Answer.OPEN


def test_a_search_gives_a_slower_finalist_up_at_once() -> None:
    logs = np.array([-0.02, -0.03, -0.01])
    assert read(logs, plan_of_starts(6)).answer is Answer.OPEN
    assert read(logs, plan_of_starts(6, either_way=False)).answer is Answer.FUTILE


def test_a_difference_is_made_sharper_where_that_is_wanted() -> None:
    logs = 0.02 + 0.01 * np.array([1.0, -1, 1, -1, 1])
    at_once, sharp = plan_of_starts(8), plan_of_starts(8, sharpness=0.3)
    assert read(logs + 0.02, at_once).answer is Answer.FASTER
    assert read(logs + 0.02, sharp).answer is Answer.OPEN
    assert read(logs + 0.02, sharp, last=True).answer is Answer.FASTER


def test_what_is_sure_is_told_first() -> None:
    wiggle = 0.01 * np.array([1.0, -1, 1, -1, 1, -1])
    plan = plan_of_starts(6, min_gain=0.03)
    assert told(read(0.05 + wiggle, plan)) == (
        "at least 3.6% faster (about 5.1%; 95% interval +3.6% to +6.6%; 6 pairs of starts)"
    )
    assert told(read(-0.05 + wiggle, plan)).startswith("at least 3.5% slower (about 4.9%; ")
    assert told(read(wiggle, plan)).startswith("no difference of 3.0% or more (95% interval ")
    assert "too few" in told(read([5.0, -5.0], plan, last=True))


def test_differences_that_come_and_go_together_widen_the_interval_of_steps() -> None:
    generator = np.random.default_rng(23)
    effect = generator.standard_normal((2000, 100))
    for pair in range(1, 100):
        effect[:, pair] = 0.5 * effect[:, pair - 1] + math.sqrt(0.75) * effect[:, pair]
    alone = follow(effect, Plan(plan_of_steps(100).looks))
    aware = follow(effect, plan_of_steps(100))
    assert np.isin(alone.answers, SHOWN).mean() > 0.25
    assert np.isin(aware.answers, SHOWN).mean() < 0.13


def test_too_few_pairs_are_named_with_what_they_could_show() -> None:
    assert too_few(1) == (
        "one pair has no spread, so that no gain can be shown; 4 or more can show one"
    )
    assert too_few(2) == (
        "2 pairs show only a gain of 26% or more, even where starts vary by 1% only; "
        "4 show one of 4%"
    )
    assert too_few(3) is None
    with pytest.raises(ValueError, match="use 4 or more"):
        plan_of_starts(1)


def test_orders_are_drawn_anew_and_go_on_where_more_blocks_are_wanted() -> None:
    orders = block_orders(5, 12, arms=3)
    assert len(orders) == 12
    assert all(sorted(order) == [0, 1, 2] for order in orders)
    assert block_orders(5, 7, arms=3) == orders[:7]
    assert len({str(block_orders(seed, 8)) for seed in range(40)}) > 8


@functools.cache
def places_in_blocks() -> np.ndarray:
    return np.array([np.argsort(block_orders(seed, 8), axis=1) for seed in range(40)])


@pytest.mark.parametrize("period", [2.0, 2.5, 3.3, 4.0, 6.0, 10.0])
def test_load_that_comes_and_goes_passes_for_no_difference(period: float) -> None:
    """Load of 5% with a period of four processes passes for one in 14% of orders drawn freely."""
    generator, plan = np.random.default_rng(24), plan_of_starts(8)
    places = places_in_blocks()[generator.integers(0, 40, 4000)] + 2 * np.arange(8)[:, None]
    phase = 2 * np.pi * generator.random((4000, 1, 1))
    costs = 0.05 * np.sin(2 * np.pi * places / period + phase)
    costs += 0.01 * generator.standard_normal(costs.shape)
    course = follow(costs[:, :, 0] - costs[:, :, 1], plan)
    assert np.isin(course.answers, SHOWN).mean() < 0.065


def test_starts_of_two_kinds_are_named() -> None:
    found = two_kinds([1.0, 1.08, 1.01, 0.995, 1.09, 0.99])
    assert found is not None
    assert str(found).startswith(
        "2 of 6 starts are 9% slower than the others: they are of two kinds"
    )


@pytest.mark.parametrize(
    "costs",
    [
        [1.0, 1.1, 1.0, 1.1],  # too few
        [1.0, 1.01, 0.99, 1.005, 1.1, 0.995],  # one that is odd
        [1.0, 1.01, 0.99, 1.1, 1.09, 1.11],  # a jump in time
        [1.0, 1.0, 1.0, 1.001, 1.0, 1.001, 1.0],  # as near as timings can be
        [1.0, 1.02, 1.04, 1.01, 1.03, 0.99],
    ],
)
def test_other_starts_are_of_one_kind(costs: list[float]) -> None:
    assert two_kinds(costs) is None


def test_normal_starts_are_seldom_said_to_be_of_two_kinds() -> None:
    rows = np.exp(0.01 * np.random.default_rng(25).standard_normal((1000, 8)))
    assert np.mean([two_kinds(row) is not None for row in rows]) < 0.02
