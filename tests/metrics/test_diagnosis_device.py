"""Rules on what the device waits for."""

from __future__ import annotations

import pytest
from support.diagnosis_jobs import NO_OTHER, first, job, names

from perfsearch.metrics.diagnosis import Severity, diagnose
from perfsearch.metrics.slow_steps import THROTTLED
from perfsearch.metrics.system import cgroup_throttled_s


def test_waiting_for_values_counts_its_calls():
    found = first(job({"from_device": 12.0}, bottleneck_evidence={"sync_calls_per_step": 3.0}))
    assert found.name == "sync_points"
    assert "3.0 calls a step takes 12.00 ms" in found.evidence


def test_places_that_wait_for_values_are_named_shortly_and_rare_ones_not_at_all():
    measured = job({"from_device": 12.0}, bottleneck_evidence={"sync_calls_per_step": 3.1})
    measured.environment["sync_points"] = {
        "/opt/lib/python3.12/site-packages/transformers/trainer.py:1847": 2.0,
        "/home/me/train.py:7": 1.0386,
        "/home/me/train.py:9": 0.0726216,
    }
    named = "called at transformers/trainer.py:1847 (2), /home/me/train.py:7 (1)"
    assert first(measured).evidence.endswith(named)


def test_a_device_that_waits_for_the_host_is_launch_bound():
    found = first(job({"forward": 50.0}, bottleneck_evidence={"device_busy_ms": 40.0}), NO_OTHER)
    assert (found.name, found.severity) == ("launch_bound", Severity.HIGH)
    assert found.share == pytest.approx(0.6)
    waiting = job({"dataloader_next": 60.0}, bottleneck_evidence={"device_busy_ms": 40.0})
    assert names(waiting) == ["input_bound"]


@pytest.mark.parametrize(
    ("loading_ms", "busy_ms", "expected"),
    [
        (40.0, 58.0, None),
        (40.0, 41.0, None),
        (40.0, 38.0, Severity.MODERATE),
        (10.0, 55.0, Severity.MODERATE),
        (10.0, 45.0, Severity.HIGH),
    ],
)
def test_launching_is_judged_by_what_loading_does_not_explain(loading_ms, busy_ms, expected):
    measured = job(
        {"dataloader_next": loading_ms, "forward": 100 - loading_ms},
        bottleneck_evidence={"device_busy_ms": busy_ms},
    )
    found = {f.name: f for f in diagnose(measured)}
    launching = found.get("launch_bound")
    assert (launching and launching.severity) == expected
    if launching is not None:
        assert f"to launch for {100 - busy_ms - loading_ms:.0f}% of it" in launching.evidence


def test_a_few_values_asked_for_do_not_hide_a_device_that_waits_for_launches():
    evidence = {"device_busy_ms": 40.0, "sync_wait_ms": 6.0}
    found = diagnose(job({"forward": 100.0}, bottleneck_evidence=evidence))
    assert [(f.name, f.severity) for f in found] == [
        ("launch_bound", Severity.HIGH),
        ("sync_points", Severity.MODERATE),
    ]
    assert found[0].share == pytest.approx(0.54)


def test_waiting_for_values_matters_only_where_the_device_then_idles():
    waiting = {"sync_wait_ms": 70.0, "sync_calls_per_step": 1.0}
    busy = job(bottleneck_evidence={**waiting, "device_busy_ms": 99.0})
    assert "sync_points" not in names(busy)
    found = diagnose(job(bottleneck_evidence={**waiting, "device_busy_ms": 75.0}))
    assert [f.name for f in found] == ["sync_points"]
    assert "idle for 25% of it" in found[0].evidence
    assert found[0].share == pytest.approx(0.25)
    loading = {**waiting, "device_busy_ms": 58.0}
    assert names(job({"dataloader_next": 40.0}, bottleneck_evidence=loading)) == ["input_bound"]


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        ({"other": 9.0, "forward": 91.0}, None),
        ({"other": 12.0, "forward": 88.0}, Severity.MODERATE),
        ({"other": 61.0, "forward": 39.0}, Severity.HIGH),
        ({"other": 6.0, "forward": 82.0}, Severity.MODERATE),
        ({"forward": 75.0}, Severity.HIGH),
        ({"other": 99.0}, None),
    ],
)
def test_work_outside_the_known_phases_has_its_rule_once_the_passes_are_known(phases, expected):
    found = {f.name: f for f in diagnose(job(phases))}
    other = found.get("other_work")
    assert (other and other.severity) == expected
    if other is not None:
        assert f"{100 - phases['forward']:.2f} ms of a 100.00 ms step" in other.evidence
        assert "every N steps" in other.advice


def test_phases_are_compared_with_the_step_that_they_sum_to():
    """The scored steps are the slowest rank's each time: longer than any rank's mean."""
    light = job({"forward": 80.0}, bottleneck_evidence={"phases_step_ms": 85.0})
    assert names(light) == ["compute_bound"]


def test_a_device_that_idles_in_other_work_does_not_wait_for_launches():
    phases = {"other": 50.0, "forward": 50.0}
    assert names(job(phases, bottleneck_evidence={"device_busy_ms": 45.0})) == ["other_work"]


def test_a_device_that_communicates_is_not_waiting_for_the_host():
    found = diagnose(job({"comm_exposed": 30.0}, bottleneck_evidence={"device_busy_ms": 70.0}))
    assert {f.name for f in found} == {"communication_bound", "launch_bound"}


@pytest.mark.parametrize(("percent", "expected"), [(4.0, None), (6.0, "moderate"), (40.0, "high")])
def test_a_cpu_quota_is_named(percent, expected):
    """python/cpython#80235"""
    measured = job({"forward": 60.0, "backward": 40.0}, system={THROTTLED: percent})
    found = {f.name: f for f in diagnose(measured)}
    assert found.get("cpu_quota") is None if expected is None else (
        found["cpu_quota"].severity == expected and f"{percent:.0f}%" in found["cpu_quota"].evidence
    )  # fmt: skip


def test_the_quota_is_that_of_the_own_group(tmp_path):
    own = tmp_path / "cgroup" / "jobs" / "ours"
    own.mkdir(parents=True)
    (own / "cpu.stat").write_text("nr_throttled 3\nthrottled_usec 2500000\n")
    (own.parent / "other").mkdir()
    (own.parent / "other" / "cpu.stat").write_text("throttled_usec 90000000\n")
    (tmp_path / "self").write_text("0::/jobs/ours\n")
    assert cgroup_throttled_s(tmp_path / "cgroup", tmp_path / "self") == 2.5
