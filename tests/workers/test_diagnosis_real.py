"""Jobs whose truth is known, on a clock of their own: what the diagnosis and the bounds say."""

import pytest
from support.simulated import Costs, measured

from perfsearch.core.knob import Part
from perfsearch.metrics.bounds import upper_bounds
from perfsearch.metrics.diagnosis import Severity, diagnose
from perfsearch.tracking.pictures import phase_parts


def share_of(measurement, part):
    return next(b.share for b in upper_bounds(measurement) if b.part == part)


def test_a_loader_that_waits_is_found_with_its_milliseconds(monkeypatch):
    job = measured(monkeypatch, Costs(loading=15.0, copying=0.0))
    found = diagnose(job)[0]
    assert (found.name, found.severity) == ("input_bound", Severity.HIGH)
    assert "15.00 ms of a 60.00 ms step (25%)" in found.evidence
    assert share_of(job, Part.LOADING) == pytest.approx(0.25)
    assert job.bottleneck_evidence["without_loading_ms"] == pytest.approx(45.0)


def test_a_slow_rank_is_named_with_its_host_and_device(monkeypatch):
    fast = Costs(forward=10.0, communication=30.0)
    job = measured(monkeypatch, fast, Costs(forward=40.0), fast)
    found = diagnose(job)[0]
    assert found.name == "straggler"
    assert found.evidence.startswith("rank 1 (GPU GPU-1, on node1) takes 30.00 ms a step longer")


def test_a_slowed_link_makes_the_job_communication_bound(monkeypatch):
    job = measured(monkeypatch, *[Costs(communication=53.0)] * 2)
    found = diagnose(job)[0]
    assert (found.name, found.severity) == ("communication_bound", Severity.HIGH)
    assert "53.00 ms of a 100.00 ms step (53%)" in found.evidence
    assert share_of(job, Part.COMMUNICATION) == pytest.approx(0.53)
    assert share_of(job, Part.OPTIMIZER) == pytest.approx(0.05)


def test_a_value_asked_for_in_each_step_is_shown_with_its_line(monkeypatch):
    job = measured(monkeypatch, Costs(item=23.0, forward=10.0))
    found = next(f for f in diagnose(job) if f.name == "sync_points")
    assert "in 1.0 calls a step takes 23.00 ms of a 60.00 ms step (38%)" in found.evidence
    assert "simulated.py:" in found.evidence


def test_a_job_without_one_shows_none(monkeypatch):
    job = measured(monkeypatch, Costs())
    assert job.bottleneck_evidence["sync_calls_per_step"] == 0
    assert "sync_points" not in [f.name for f in diagnose(job)]


def test_phases_sum_to_the_step(monkeypatch):
    ranks = [Costs(forward=10.0, communication=33.0), Costs(forward=40.0, communication=3.0)]
    parts = phase_parts(measured(monkeypatch, *ranks))
    assert sum(parts.values()) == pytest.approx(ranks[0].step)
    assert parts["comm_exposed"] == pytest.approx(3.0)
    assert parts["rank_wait"] == pytest.approx(15.0)
    assert parts["forward"] == pytest.approx(25.0)


@pytest.mark.parametrize(
    ("asked", "steps"),
    [
        ({}, [12, 21]),
        ({"begin_step": 20, "end_step": 24}, [20, 24]),
        ({"begin_step": 3, "end_step": 14}, [12, 23]),
        ({"end_step": 5}, [12, 16]),
    ],
)
def test_a_step_range_begins_after_the_scored_steps(monkeypatch, asked, steps):
    job = measured(monkeypatch, Costs(), **asked)
    assert job.environment["detailed_steps"] == steps
    moved = bool(asked) and asked.get("begin_step", 1) < steps[0]
    assert ("step range" in job.environment.get("unsupported", {})) == moved
