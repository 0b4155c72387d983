"""Steps that are not like the others."""

from __future__ import annotations

import pytest
from support.diagnosis_jobs import names

from perfsearch.core.trial import Measurement
from perfsearch.metrics.diagnosis import MADE_AGAIN, Severity, diagnose
from perfsearch.metrics.slow_steps import slow_steps
from perfsearch.metrics.thresholds import Thresholds


def with_long_steps(long: int, times: float, cause: str = "") -> Measurement:
    seconds = [0.1] * 14
    for place in range(long):
        seconds[5 * place] *= times
    mean_ms = 1e3 * sum(seconds) / len(seconds)  # as phases are
    found = Measurement(
        seconds, 32, phases_ms={"forward": 0.4 * mean_ms, "backward": 0.6 * mean_ms}
    )
    if cause:
        parts = [{cause: s, "backward": 0.01} for s in seconds]
        found.environment["slow_steps"] = slow_steps(seconds, parts)
    return found


def test_long_steps_are_told_behind_the_bottleneck():
    """Starts of epochs, say: two of 14 steps that take four times as long."""
    first, beside = diagnose(with_long_steps(2, 4.0))
    assert first.name == "compute_bound"
    assert (beside.name, beside.severity) == ("uneven_steps", Severity.INFO)
    assert beside.evidence == (
        "2 of 14 steps take 300 ms longer, one in 7 (30% of the time: nothing that was seen)"
    )
    assert beside.share == pytest.approx(0.3)


def test_their_cause_and_what_to_do_is_told():
    *_, beside = diagnose(with_long_steps(2, 4.0, "loading"))
    assert "waiting for the DataLoader" in beside.evidence and "workers" in beside.advice
    *_, beside = diagnose(with_long_steps(2, 4.0, "saving"))
    assert "saving a checkpoint" in beside.evidence and "Save less often" in beside.advice


def test_a_step_that_is_not_in_the_score_is_told():
    *_, beside = diagnose(with_long_steps(1, 4.0))
    assert "1 of 14 steps take 300 ms longer (18% of the time" in beside.evidence
    assert "met once, so not in the score" in beside.evidence


@pytest.mark.parametrize(("long", "times"), [(2, 1.4), (2, 2.0), (0, 1.0)])
def test_a_little_more_is_not_told(long, times):
    assert "uneven_steps" not in names(with_long_steps(long, times))


def test_the_threshold_of_long_steps_is_the_configs():
    assert "uneven_steps" in names(with_long_steps(2, 2.0), Thresholds(uneven=0.1))


def test_of_many_kinds_of_slow_steps_the_costliest_are_described():
    measured = with_long_steps(0, 1.0)
    shares = (0.02, 0.3, 0.1, 0.05)
    measured.environment["slow_steps"] = [
        {"steps": 2, "of": 100, "extra_ms": 10 * share, "period_steps": None, "share": share,
         "scored": True, "cause": "unknown"} for share in shares
    ]  # fmt: skip
    (told,) = [f.evidence for f in diagnose(measured) if f.name == "uneven_steps"]
    assert told.startswith("2 of 100 steps take 3 ms longer (30% of the time") and "(10% of" in told
    assert told.endswith("; 2 other kinds of slow steps take 7% of the time")


@pytest.mark.parametrize(
    ("again_ms", "severity"), [(10.0, Severity.HIGH), (80.0, Severity.MODERATE)]
)
def test_steps_that_are_faster_when_made_again_are_told_first(again_ms, severity):
    measured = with_long_steps(0, 1.0)
    measured.environment[MADE_AGAIN] = again_ms
    first = diagnose(measured)[0]
    assert (first.name, first.severity) == ("new_shapes", severity)
    assert first.share == pytest.approx(1 - again_ms / 100)
    assert f"a step takes 100 ms, and {again_ms:.4g} ms when the same is made again" in str(first)
    measured.environment[MADE_AGAIN] = 100.0
    assert "new_shapes" not in names(measured)
