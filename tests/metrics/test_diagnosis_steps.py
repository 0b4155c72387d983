"""Steps that are not like the others."""

from __future__ import annotations

import pytest
from support.diagnosis_jobs import names

from perfsearch.core.trial import Measurement
from perfsearch.metrics.diagnosis import Severity, Thresholds, diagnose


def with_long_steps(long: int, times: float) -> Measurement:
    seconds = [0.1] * 14
    for place in range(long):
        seconds[5 * place] *= times
    mean_ms = 1e3 * sum(seconds) / len(seconds)  # as phases are
    return Measurement(seconds, 32, phases_ms={"forward": 0.4 * mean_ms, "backward": 0.6 * mean_ms})


def test_long_steps_that_no_median_shows_are_told_behind_the_bottleneck():
    """Starts of epochs, say: two of 14 steps that take four times as long add 43 % to the mean."""
    first, beside = diagnose(with_long_steps(2, 4.0))
    assert first.name == "compute_bound"
    assert (beside.name, beside.severity) == ("uneven_steps", Severity.INFO)
    assert "2 of 14 steps take more than 1.5 times the median of 100.00 ms" in beside.evidence
    assert "the mean is 142.86 ms (+43%)" in beside.evidence
    assert beside.share == pytest.approx(0.3)


@pytest.mark.parametrize(("long", "times"), [(1, 8.0), (2, 1.4), (2, 2.0), (0, 1.0)])
def test_a_single_long_step_or_a_little_more_is_not_told(long, times):
    assert "uneven_steps" not in names(with_long_steps(long, times))


def test_the_threshold_of_long_steps_is_the_configs():
    assert "uneven_steps" in names(with_long_steps(2, 2.0), Thresholds(uneven=0.1))
