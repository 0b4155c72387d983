import math

import numpy as np
import pytest
from scipy import stats

from perfsearch.core.verdict import (
    Interval,
    decided,
    interim_analyses,
    leader,
    paired_interval,
)


@pytest.mark.parametrize("pairs", [2, 3, 5, 6, 12, 32])
def test_one_analysis_one_finalist_is_the_plain_paired_interval(pairs: int) -> None:
    generator = np.random.default_rng(1)
    base = np.exp(generator.normal(0, 0.02, pairs))
    fast = np.exp(generator.normal(-0.05, 0.02, pairs))
    logs = np.log(base / fast)
    half = stats.t.ppf(0.975, pairs - 1) * logs.std(ddof=1) / math.sqrt(pairs)
    interval = paired_interval(list(base), list(fast), analyses=1, finalists=1)
    assert interval.low == pytest.approx(math.exp(logs.mean() - half), rel=1e-8)
    assert interval.high == pytest.approx(math.exp(logs.mean() + half), rel=1e-8)


@pytest.mark.parametrize(
    ("repeats", "expected"), [(2, (2,)), (3, (3,)), (6, (3, 5, 6)), (8, (3, 5, 8))]
)
def test_the_schedule_of_interim_analyses(repeats: int, expected: tuple[int, ...]) -> None:
    assert interim_analyses(repeats) == expected


def test_stopping_at_an_interim_analysis_keeps_the_coverage() -> None:
    """The interval of whichever analysis ends it covers the truth in 95% of 2,000 runs."""
    generator = np.random.default_rng(5)
    truth, planned, covered = 1.03, interim_analyses(6), 0
    for _ in range(2000):
        base = np.exp(generator.normal(0, 0.01, 6))
        fast = np.exp(generator.normal(-math.log(truth), 0.01, 6))
        for n in planned:
            interval = paired_interval(list(base[:n]), list(fast[:n]), len(planned), 1)
            if decided({1: interval}, precision=0.01):
                break
        covered += interval.low <= truth <= interval.high
    assert covered / 2000 >= 0.95


def test_decided_when_nothing_can_be_better() -> None:
    worse = Interval(0.9, 0.8, 0.99, 3)
    unsure = Interval(1.05, 0.9, 1.2, 3)
    assert decided({1: worse}, 0.01)
    assert not decided({1: worse, 2: unsure}, 0.01)


def test_a_sure_gain_leads_before_a_larger_one_that_may_be_none() -> None:
    sure, unsure = Interval(1.854, 1.347, 2.554, 3), Interval(1.862, 0.776, 4.466, 3)
    none = Interval(1.1, 0.9, 1.3, 3)
    assert leader({25: unsure, 26: sure}) == 26
    assert leader({1: none, 25: unsure}) == 25


def test_too_few_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="two pairs"):
        paired_interval([1.0], [1.0], 1, 1)


def test_an_interval_says_no_more_than_it_knows() -> None:
    assert str(Interval(1.2, 1.1, 1.3, 5)) == "1.200x (95% interval 1.100 to 1.300)"
    assert Interval(1.2, 1.1, 1.3, 5).short == "1.200x (1.100 to 1.300)"
    barely = Interval(1.009, 1.00046, 1.018, 5)
    assert barely.is_gain
    assert barely.short == "1.009x (1.0005 to 1.0180)"
    wild = Interval(1.2, 1e-5, 1e5, 2)
    assert wild.short == str(wild) == "1.200x (2 pairs are too few)"
