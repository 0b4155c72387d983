from __future__ import annotations

import numpy as np
import pytest
from support.search_runs import trial

from perfsearch.core.trial import Status
from perfsearch.tracking.importance import knob_importance


def random_trials(count=60, seed=1):
    """Costs in which algorithm=Ring is 1.5 times as fast, and noise knobs do nothing."""
    generator = np.random.default_rng(seed)
    trials = []
    for number in range(count):
        configuration = {
            "algorithm": ["Ring", "Tree"][int(generator.integers(2))],
            "workers": int(generator.integers(3)),
            "bucket": float(generator.uniform(1, 256)),
        }
        factor = 1.0 if configuration["algorithm"] == "Ring" else 1.5
        cost = factor * float(np.exp(generator.normal(0, 0.02)))
        trials.append(trial(number, configuration=configuration, cost=cost))
    return trials


def importance(trials):
    found = knob_importance(trials, ["workers", "algorithm", "bucket"], np.random.default_rng(0))
    return {e.knob: e for e in found}


def test_the_knob_that_matters_comes_first_with_its_size():
    found = importance(random_trials())
    assert next(iter(found)) == "algorithm"
    assert found["algorithm"].spread == pytest.approx(1.5, rel=0.03)
    ring = next(level for level in found["algorithm"].levels if level.label == "Ring")
    assert ring.low > 1.15


def test_knobs_that_do_nothing_cover_no_effect():
    for level in importance(random_trials())["workers"].levels:
        assert level.low < 1.0 < level.high


def test_many_numbers_are_shown_in_quarters():
    levels = importance(random_trials())["bucket"].levels
    assert len(levels) == 4
    assert sum(level.trials for level in levels) == 60
    assert " to " in levels[0].label


def test_a_quarter_in_which_all_trials_had_one_value_is_named_by_it():
    trials = random_trials(24)
    for one in trials:
        one.configuration["bucket"] = [1, 2, 3, 4, 5, 6, *[512] * 6][one.number % 12]
    assert importance(trials)["bucket"].levels[-1].label == "512"


def test_a_value_that_was_tried_once_has_no_interval():
    trials = random_trials(20)
    for one in trials:
        one.configuration["workers"] = int(one.number == 0)
    often, once = importance(trials)["workers"].levels
    assert (often.trials, often.has_interval) == (19, True)
    assert (once.trials, once.has_interval, once.is_sure) == (1, False, False)


def test_a_knob_that_matters_under_another_takes_nothing_of_its_effect():
    """Prefetching stands at 2 where there are no workers, which take half of the time."""
    generator = np.random.default_rng(3)
    trials = []
    for number in range(24):
        workers = number % 2
        prefetch = [2, 4, 8][number // 2 % 3] if workers else 2
        cost = (1.0 if workers else 2.0) * float(np.exp(generator.normal(0, 0.02)))
        configuration = {"workers": workers, "prefetch": prefetch}
        trials.append(trial(number, configuration=configuration, cost=cost))
    when = {"prefetch": {"workers": (1, 2)}}
    found = knob_importance(trials, ["workers", "prefetch"], np.random.default_rng(0), when)
    workers, prefetch = found
    assert workers.spread == pytest.approx(2.0, rel=0.03)
    assert prefetch.spread == pytest.approx(1.0, abs=0.05)
    assert [level.trials for level in prefetch.levels] == [4, 4, 4]
    assert not any(level.is_sure for level in prefetch.levels)


def test_a_knob_that_never_mattered_has_no_effect():
    trials = random_trials(20)
    when = {"bucket": {"algorithm": ("None",)}}
    found = knob_importance(trials, ["algorithm", "bucket"], np.random.default_rng(0), when)
    assert [e.knob for e in found] == ["algorithm"]


def test_values_are_in_their_order_with_null_first():
    trials = random_trials(20)
    for one in trials:
        one.configuration["workers"] = [None, 10, 9][one.number % 3]
    assert [level.label for level in importance(trials)["workers"].levels] == ["null", "9", "10"]


def test_too_few_trials_and_failures_tell_nothing():
    assert importance(random_trials(5)) == {}
    failed = random_trials(20)
    for one in failed:
        one.status = Status.OOM
    assert importance(failed) == {}


def test_the_same_trials_give_the_same_intervals():
    assert importance(random_trials()) == importance(random_trials())
