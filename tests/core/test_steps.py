"""The rate of a window of steps, and the slow ones in it."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from perfsearch.core.steps import read_window, step_time_s, steps_alike


def noise(name, generator, count):
    """Steps of a job, and what a step of it takes on average; times of a usual one are about 1."""
    usual = 1 + 0.02 * generator.standard_normal(count)
    if name == "independent":
        return usual, 1.0
    if name == "lognormal":
        return np.exp(0.15 * generator.standard_normal(count)), math.exp(0.15**2 / 2)
    if name == "autoregressive":
        drawn = 0.03 * generator.standard_normal(count + 50)
        for place in range(1, count + 50):
            drawn[place] += 0.8 * drawn[place - 1]
        return 1 + drawn[50:], 1.0
    if name == "foreign stalls":
        return np.where(generator.random(count) < 0.01, 6.0, 1.0) * usual, 1.0
    *_, period, times = name.split()
    slow = (np.arange(count) + generator.integers(int(period))) % int(period) == 0
    mean = 1 + (float(times) - 1) / int(period)
    return np.where(slow, float(times), 1.0) * usual, mean


# (bias, spread) of the rate in per cent of the truth, as large as they may be
EXPECTED = {
    "independent": {10: (0.3, 1.0), 20: (0.2, 0.7), 60: (0.1, 0.4)},
    "lognormal": {10: (2.5, 6.5), 20: (1.5, 4.5), 60: (0.6, 2.6)},
    "autoregressive": {10: (0.8, 4.5), 20: (0.6, 3.8), 60: (0.4, 2.5)},
    "bursts 2 15": {10: (1.0, 1.5), 20: (0.5, 1.0), 60: (0.2, 0.5)},
    "bursts 4 15": {10: (1.6, 2.0), 20: (0.8, 1.2), 60: (0.3, 0.6)},
    "bursts 8 15": {20: (1.2, 1.6), 60: (0.4, 0.8)},
    "every 10 3": {20: (0.8, 1.0), 60: (0.3, 0.5)},
    "every 8 12": {20: (1.0, 1.5), 60: (0.3, 0.8)},
    "every 50 5": {180: (0.3, 0.5)},
    "foreign stalls": {20: (2.0, 9.0), 60: (3.5, 8.0)},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_rate_is_what_the_job_pays(name):
    for count, (bias, spread) in EXPECTED[name].items():
        generator = np.random.default_rng(3)
        errors = []
        for _ in range(400):
            seconds, truth = noise(name, generator, count)
            errors.append(100 * (read_window(seconds.tolist()).step_s / truth - 1))
        assert abs(statistics.fmean(errors)) < bias, (count, statistics.fmean(errors))
        assert statistics.stdev(errors) < spread, (count, statistics.stdev(errors))


@pytest.mark.parametrize("name", [n for n in EXPECTED if n != "foreign stalls"])
def test_the_error_of_a_rate_is_about_its_spread(name):
    generator = np.random.default_rng(4)
    count = max(EXPECTED[name])
    readings = [read_window(noise(name, generator, count)[0].tolist()) for _ in range(400)]
    spread = statistics.stdev(math.log(reading.step_s) for reading in readings)
    told = statistics.median(reading.log_error for reading in readings)
    assert 0.6 * spread < told < 1.7 * spread


@pytest.mark.parametrize("begin", range(8))
def test_a_window_that_ends_within_a_period_is_not_biased_by_a_part_of_one(begin):
    """0.2 s beside every eighth of 17 ms steps: sixty have seven or eight of them."""
    seconds = [0.217 if place % 8 == begin else 0.017 for place in range(60)]
    found = read_window(seconds)
    assert found.step_s == pytest.approx(0.017 + 0.2 / 8)
    (kind,) = found.slow
    assert (kind.period_steps, kind.scored) == (8, True)
    assert kind.times in (7, 8) and kind.extra_s == pytest.approx(0.2)
    assert kind.share == pytest.approx(0.2 * kind.times / sum(seconds))


def test_what_was_met_once_is_named_and_not_in_the_score():
    seconds = [0.01] * 59 + [3.0]
    found = read_window(seconds)
    assert found.step_s == pytest.approx(0.01)
    (kind,) = found.slow
    assert (kind.places, kind.times, kind.period_steps, kind.scored) == ((59,), 1, None, False)
    assert kind.share == pytest.approx(2.99 / 3.59)


def test_slow_steps_are_found_kind_by_kind():
    """One stall of 10 s, and 0.2 s in every tenth step."""
    seconds = [0.22 if place % 10 == 5 else 0.02 for place in range(60)]
    seconds[17] = 10.0
    found = read_window(seconds)
    assert [(kind.times, kind.scored) for kind in found.slow] == [(1, False), (6, True)]
    assert found.step_s == pytest.approx(0.04, rel=0.02)


def test_what_was_met_twice_counts_as_often_as_it_came():
    at_its_distance = [1.0 if place in (15, 55) else 0.1 for place in range(60)]
    assert read_window(at_its_distance).step_s == pytest.approx(0.1 + 0.9 / 40)
    close_together = [1.0 if place in (15, 20) else 0.1 for place in range(60)]  # no period
    assert read_window(close_together).step_s == pytest.approx(0.1 + 0.9 * 2 / 60)


def test_a_stall_over_some_steps_is_met_once_but_a_job_that_became_slower_is_not_left_out():
    stalled = [1.0 if place in (20, 21, 22) else 0.1 for place in range(60)]
    assert read_window(stalled).step_s == pytest.approx(0.1)
    slower = [0.3 if place >= 40 else 0.1 for place in range(60)]
    assert (
        read_window(slower).step_s == pytest.approx(0.1 + 0.2 / 3) and not read_window(slower).slow
    )


def test_the_largest_step_of_an_even_window_counts_as_the_second():
    seconds = [1.0] * 59 + [1.4]
    assert read_window(seconds).step_s == pytest.approx(1.0)
    assert not read_window(seconds).slow


@pytest.mark.parametrize("seconds", [[1.0], [1.0, 9.0], [1.0, 1.0, 9.0]])
def test_few_steps_have_a_rate_too(seconds):
    assert 0 < read_window(seconds).step_s <= 9.0


def test_the_statistic_decides():
    seconds = [0.01, 0.01, 0.07] * 8
    assert step_time_s(seconds, "median") == 0.01
    assert step_time_s(seconds, "rate") == pytest.approx(0.03)


def planned(count):
    """A plan is made for each of 24 shapes, all of which are forgotten once they were seen."""
    shapes = np.random.default_rng(1).integers(24, size=count)
    seen, seconds = set(), []
    for shape in shapes:
        seconds.append(0.018 if int(shape) in seen else 0.048)
        seen = set() if len(seen) == 24 else seen | {int(shape)}
    return seconds


def test_what_comes_in_clusters_is_met_about_as_often_only_in_long_stretches():
    seconds = planned(1000)
    length = steps_alike(seconds[:200])
    assert length > 60
    assert statistics.fmean(seconds[:length]) == pytest.approx(statistics.fmean(seconds), rel=0.1)
    assert statistics.fmean(seconds[:30]) > 1.2 * statistics.fmean(seconds), (
        "a short window is of new shapes"
    )
    assert not any(kind.is_periodic for kind in read_window(seconds[:200]).slow)


@pytest.mark.parametrize(
    ("seconds", "length"),
    [([1.0] * 80, 10), ([1.0] * 40 + [2.0] * 40, 80), ([1.0, 1.0, 9.0], 3), ([1.0], 1), ([], 0)],
)
def test_stretches_that_are_alike(seconds, length):
    assert steps_alike(seconds) == length
