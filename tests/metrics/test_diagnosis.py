from __future__ import annotations

from typing import Any

import pytest

from perfsearch.metrics.diagnosis import diagnose, report
from perfsearch.metrics.findings import Severity, Thresholds
from perfsearch.search.trial import Measurement


def job(phases: dict[str, float] | None = None, **changes: Any) -> Measurement:
    """A job with steps of 100 ms."""
    return Measurement([0.1] * 10, 32, world_size=2, phases_ms=phases or {}, **changes)


def first(measurement: Measurement):
    return diagnose(measurement)[0]


def test_a_loader_that_waits_is_found_with_its_milliseconds():
    found = first(job({"dataloader_next": 40.0, "forward": 30}, in_force={"dataloader_workers": 0}))
    assert (found.name, found.severity) == ("input_bound", Severity.HIGH)
    assert "40.00 ms of a 100.00 ms step (40%)" in found.evidence
    assert "0 workers" in found.evidence
    assert "workers" in found.advice
    assert found.share == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("system", "word"),
    [
        ({"cpu_utilization_percentage": 97.0}, "preprocessing"),
        ({"cpu_iowait_percentage": 45.0, "cpu_utilization_percentage": 97.0}, "iowait 45"),
        ({"network_receive_megabytes_per_s": 300.0}, "300 MB/s"),
        ({"cpu_utilization_percentage": 97.0, "process_cpu_percentage": 190.0}, "preprocessing"),
        ({"cpu_utilization_percentage": 97.0, "process_cpu_percentage": 9.0}, "other jobs fill"),
        ({"cpu_utilization_percentage": 20.0}, "not its limit"),
    ],
)
def test_why_the_loader_is_slow(system, word):
    found = first(job({"dataloader_next": 10.0}, system=system))
    assert (found.name, found.severity) == ("input_bound", Severity.MODERATE)
    assert word in found.evidence


def test_a_slow_rank_is_named_and_comes_before_the_communication_that_it_causes():
    evidence = {"straggler_forward_excess_ms": 30.0, "straggler_forward_rank": 1.0}
    devices = [{"index": 4, "uuid": "GPU-a"}, {"index": 5, "uuid": "GPU-b"}]
    found = diagnose(
        job(
            {"forward": 60.0, "comm_exposed": 30.0},
            bottleneck_evidence=evidence,
            environment={"devices": devices},
        )
    )
    assert [f.name for f in found[:2]] == ["straggler", "communication_bound"]
    assert "rank 1 (gpu_5, GPU-b) takes 30.00 ms a step longer than the other" in found[0].evidence


@pytest.mark.parametrize(("excess_ms", "error_ms"), [(1.0, 0.0), (20.0, 6.0)])
def test_a_small_or_an_uncertain_excess_is_no_straggler(excess_ms, error_ms):
    evidence = {"straggler_forward_excess_ms": excess_ms, "forward_error_ms": error_ms}
    names = [f.name for f in diagnose(job({"forward": 40.0}, bottleneck_evidence=evidence))]
    assert "straggler" not in names


def test_ranks_that_wait_for_one_another_by_turns_are_no_communication():
    found = first(job({"forward": 40.0, "rank_wait": 30.0, "comm_exposed": 2.0}))
    assert found.name == "rank_imbalance"
    assert "30.00 ms of a 100.00 ms step (30%)" in found.evidence
    names = [f.name for f in diagnose(job({"dataloader_next": 40.0, "rank_wait": 30.0}))]
    assert names == ["input_bound"]


def test_what_leaving_communication_out_does_not_save_is_none():
    evidence = {"with_everything_ms": 100.0, "without_communication_ms": 99.0}
    names = [f.name for f in diagnose(job({"comm_exposed": 80.0}, bottleneck_evidence=evidence))]
    assert "communication_bound" not in names
    evidence["without_communication_ms"] = 60.0
    found = first(job({"comm_exposed": 80.0}, bottleneck_evidence=evidence))
    assert found.name == "communication_bound"
    assert "40.00 ms of a 100.00 ms step" in found.evidence


@pytest.mark.parametrize(
    ("ms", "expected"),
    [(9.0, None), (15.0, Severity.MODERATE), (30.0, Severity.HIGH)],
)
def test_exposed_communication_by_its_share(ms, expected):
    found = {f.name: f.severity for f in diagnose(job({"comm_exposed": ms, "backward": 50.0}))}
    assert found.get("communication_bound") == expected


def test_waiting_for_values_counts_its_calls():
    found = first(job({"from_device": 12.0}, bottleneck_evidence={"sync_calls_per_step": 3.0}))
    assert found.name == "sync_points"
    assert "3.0 calls a step takes 12.00 ms" in found.evidence


def test_retries_of_the_allocator_and_full_memory_come_first():
    found = first(job({"dataloader_next": 50.0}, bottleneck_evidence={"allocator_retries": 2.0}))
    assert (found.name, found.severity) == ("memory_pressure", Severity.HIGH)
    gib = 1024**3 / 1e6
    devices = [{"memory_usage_megabytes": 79 * gib, "memory_free_megabytes": 1 * gib}]
    full = first(job(peak_reserved_gib=78.0, environment={"devices": devices}))
    assert "78.0 of 80.0 GiB" in full.evidence
    roomy = diagnose(job(peak_reserved_gib=70.0, environment={"devices": devices}))
    assert roomy[0].name == "balanced"


def test_a_device_that_waits_for_the_host_is_launch_bound():
    found = first(job({"forward": 50.0}, bottleneck_evidence={"device_busy_ms": 40.0}))
    assert (found.name, found.severity) == ("launch_bound", Severity.HIGH)
    waiting = diagnose(job({"dataloader_next": 60.0}, bottleneck_evidence={"device_busy_ms": 40.0}))
    assert [f.name for f in waiting] == ["input_bound"]


def test_waiting_for_values_matters_only_where_the_device_then_idles():
    waiting = {"sync_wait_ms": 70.0, "sync_calls_per_step": 1.0}
    names = [f.name for f in diagnose(job(bottleneck_evidence={**waiting, "device_busy_ms": 99.0}))]
    assert "sync_points" not in names
    found = diagnose(job(bottleneck_evidence={**waiting, "device_busy_ms": 75.0}))
    assert [f.name for f in found][:1] == ["sync_points"]
    assert "launch_bound" not in [f.name for f in found]
    assert "idle for 25% of it" in found[0].evidence
    assert found[0].share == pytest.approx(0.25)


def test_a_device_that_communicates_is_not_waiting_for_the_host():
    found = diagnose(job({"comm_exposed": 30.0}, bottleneck_evidence={"device_busy_ms": 70.0}))
    assert {f.name for f in found} == {"communication_bound", "launch_bound"}


def test_what_costs_most_comes_first():
    evidence = {"straggler_forward_excess_ms": 10.0, "straggler_forward_rank": 0.0}
    found = diagnose(job({"forward": 60.0, "comm_exposed": 30.0}, bottleneck_evidence=evidence))
    assert [(f.name, f.severity) for f in found] == [
        ("communication_bound", Severity.HIGH),
        ("straggler", Severity.MODERATE),
    ]


def test_copies_and_the_optimizer_have_their_own_thresholds():
    assert first(job({"to_device": 6.0})).name == "host_to_device_copy"
    assert first(job({"optimizer": 16.0})).name == "optimizer_bound"


def test_high_utilisation_alone_does_not_hide_communication():
    """cupy/cupy#3557: a collective that spins shows as 100 % utilisation."""
    system = {"gpu_utilization_percentage": 100.0}
    names = [f.name for f in diagnose(job({"comm_exposed": 40.0}, system=system))]
    assert names == ["communication_bound"]
    assert first(job({"forward": 50.0}, system=system)).name == "compute_bound"


def test_without_a_gpu_the_phases_tell_that_it_computes():
    assert first(job({"forward": 40.0, "backward": 55.0})).name == "compute_bound"


def test_a_compute_bound_job_says_how_near_its_peak_it_is():
    environment = {"devices": [{"name": "NVIDIA H100 80GB HBM3"}], "precision": "bf16"}
    found = first(
        job(
            system={"gpu_utilization_percentage": 99.0},
            environment=environment,
            flops_per_step=0.4 * 989e12 * 2 * 0.1,
        )
    )
    assert "40% of their peak" in found.evidence


def test_nothing_stands_out_and_thresholds_can_be_moved():
    quiet = job({"forward": 50.0, "optimizer": 10.0})
    assert first(quiet).name == "balanced"
    assert diagnose(quiet, Thresholds(optimizer=0.05))[0].name == "optimizer_bound"


def test_a_measurement_without_steps_is_refused():
    with pytest.raises(ValueError, match="without step times"):
        diagnose(Measurement([], 1))


def test_the_report_has_a_line_a_finding():
    text = report(diagnose(job({"dataloader_next": 40.0, "optimizer": 20.0})))
    assert text.count("\n") == 1
    assert text.startswith("- input_bound (high): ")
