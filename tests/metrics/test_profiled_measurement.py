from __future__ import annotations

import pytest

from perfsearch.core.trial import Measurement, Purpose, Status, Trial
from perfsearch.metrics.bounds import profiled_measurement

BEST = {"bucket": 8}


def trial(purpose, step_ms, *, profiled=False, status=Status.OK, configuration=None):
    evidence = {"detailed_step_ms": step_ms} if profiled else {}
    measured = Measurement([step_ms / 1e3] * 3, 32, bottleneck_evidence=evidence)
    return Trial(0, dict(configuration or BEST), purpose, status, measured)


def shown_ms(*trials):
    found = profiled_measurement(trials, BEST)
    return None if found is None else found.step_time_s * 1e3


def test_the_profile_nearest_the_confirmed_median_is_taken():
    """A search trial that was disturbed, or lucky, says nothing of what was confirmed."""
    trials = [
        trial(Purpose.SEARCH, 140.0, profiled=True),
        trial(Purpose.CONFIRM, 90.0, profiled=True),
    ]
    trials += [trial(Purpose.CONFIRM, ms, profiled=True) for ms in (101.0, 96.0)]
    trials += [trial(Purpose.CONFIRM, ms) for ms in (100.0, 102.0, 103.0)]
    assert shown_ms(*trials) == pytest.approx(101.0)


def test_a_profile_comes_before_a_nearer_trial_without_one():
    trials = [trial(Purpose.CONFIRM, 100.0), trial(Purpose.SEARCH, 140.0, profiled=True)]
    assert shown_ms(*trials) == pytest.approx(140.0)


def test_without_confirmed_trials_the_first_profile_is_taken():
    trials = [trial(Purpose.BASELINE, 100.0), trial(Purpose.SEARCH, 140.0, profiled=True)]
    assert shown_ms(*trials, trial(Purpose.SEARCH, 90.0, profiled=True)) == pytest.approx(140.0)


@pytest.mark.parametrize(
    "other",
    [
        trial(Purpose.SENTINEL, 100.0, profiled=True),
        trial(Purpose.CONFIRM, 100.0, profiled=True, status=Status.DIVERGED),
        trial(Purpose.CONFIRM, 100.0, profiled=True, configuration={"bucket": 9}),
    ],
)
def test_sentinels_failures_and_other_configurations_are_no_profiles(other):
    assert shown_ms(other) is None
    kept = trial(Purpose.SEARCH, 120.0)
    assert shown_ms(other, kept) == pytest.approx(120.0)
