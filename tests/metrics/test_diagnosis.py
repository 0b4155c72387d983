from __future__ import annotations

import pytest
from support.diagnosis_jobs import first, job, names, slow

from perfsearch.core.trial import WITHOUT_LOADER, Measurement
from perfsearch.metrics.diagnosis import Severity, diagnose, report
from perfsearch.metrics.thresholds import Thresholds


def test_a_loader_that_waits_is_found_with_its_milliseconds():
    found = first(job({"dataloader_next": 40.0, "forward": 60}, in_force={"dataloader_workers": 0}))
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
        (
            {
                "cpu_iowait_percentage": 12.0,  # eight loaders wait on 64 processors
                "cpu_utilization_percentage": 20.0,
                "disk_busy_percentage": 99.0,
                "disk_read_megabytes_per_s": 41.0,
            },
            "it works 99 % of the time, and 41.0 MB/s are read",
        ),
        (
            {
                "cpu_utilization_percentage": 20.0,
                "disk_busy_percentage": 99.0,
                "disk_read_megabytes_per_s": 0.0,  # somebody writes
            },
            "not its limit",
        ),
        ({"network_receive_megabytes_per_s": 300.0}, "300 MB/s"),
        (
            {"cpu_utilization_percentage": 97.0, "process_cpu_share_percentage": 95.0},
            "preprocessing",
        ),
        (
            {"cpu_utilization_percentage": 97.0, "process_cpu_share_percentage": 26.0},
            "other jobs fill the processors (97 % busy, 26 % of it this job's)",
        ),
        ({"cpu_utilization_percentage": 20.0}, "not its limit"),
        ({}, "cause was not seen"),
    ],
)
def test_why_the_loader_is_slow(system, word):
    found = first(job({"dataloader_next": 10.0}, system=system))
    assert (found.name, found.severity) == ("input_bound", Severity.MODERATE)
    assert word in found.evidence


def test_retries_of_the_allocator_and_full_memory_come_first():
    found = first(job({"dataloader_next": 50.0}, bottleneck_evidence={"allocator_retries": 2.0}))
    assert (found.name, found.severity) == ("memory_pressure", Severity.HIGH)
    gib = 1024**3 / 1e6
    devices = [{"memory_usage_megabytes": 79 * gib, "memory_free_megabytes": 1 * gib}]
    full = first(job(peak_reserved_gib=78.0, environment={"devices": devices}))
    assert "78.0 of 80.0 GiB" in full.evidence
    assert names(job(peak_reserved_gib=70.0, environment={"devices": devices})) == ["balanced"]


def test_what_costs_most_comes_first():
    evidence = slow(0, forward=10.0)
    found = diagnose(job({"forward": 70.0, "comm_exposed": 30.0}, bottleneck_evidence=evidence))
    assert [(f.name, f.severity) for f in found] == [
        ("communication_bound", Severity.HIGH),
        ("straggler", Severity.MODERATE),
    ]


def test_copies_and_the_optimizer_have_their_own_thresholds():
    assert first(job({"to_device": 6.0})).name == "host_to_device_copy"
    assert first(job({"optimizer": 16.0})).name == "optimizer_bound"


@pytest.mark.parametrize(("implementation", "advised"), [("default", True), ("fused", False)])
def test_what_is_so_already_is_not_advised(implementation, advised):
    measured = job({"optimizer": 16.0})
    measured.in_force = {"optimizer_implementation": implementation}
    found = first(measured)
    assert ("fused" in found.advice) is advised
    assert "accumulate gradients" in found.advice


def test_what_the_device_did_decides_before_its_utilisation():
    system, phases = {"gpu_utilization_percentage": 100.0}, {"forward": 91.0, "comm_exposed": 9.0}
    evidence = {"device_busy_ms": 81.0, "device_exposed_ms": 9.0}
    assert names(job(phases, system=system, bottleneck_evidence=evidence)) == ["mostly_computing"]
    evidence = {"device_busy_ms": 98.0, "device_exposed_ms": 4.0}
    found = first(job(phases, system=system, bottleneck_evidence=evidence))
    assert found.name == "compute_bound"
    assert "the device computes 94.00 ms of a 100.00 ms step (94%)" in found.evidence


def test_a_job_that_something_holds_back_is_not_called_compute_bound():
    phases = {"to_device": 6.0, "forward": 94.0}
    system = {"gpu_utilization_percentage": 100.0}
    assert names(job(phases, system=system)) == ["host_to_device_copy"]


def test_without_a_gpu_the_phases_tell_that_it_computes():
    assert first(job({"forward": 40.0, "backward": 55.0})).name == "compute_bound"


def test_without_a_loader_the_scripts_own_work_is_not_called_computing():
    phases, untold = {"forward": 95.0, "backward": 4.0}, {WITHOUT_LOADER: True}
    found = first(job(phases, environment=untold))
    assert found.name == "mostly_before_backward" and "95.00 ms" in found.evidence
    busy = {"device_busy_ms": 98.0, "device_exposed_ms": 0.0}
    found = first(job(phases, environment=untold, bottleneck_evidence=busy))
    assert found.name == "compute_bound"


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
    phases = {"forward": 20.0, "backward": 30.0, "comm_exposed": 9.0, "optimizer": 14.0}
    quiet = job({**phases, "rank_wait": 9.0, "dataloader_next": 4.0, "to_device": 4.0})
    assert names(quiet) == ["balanced"]
    assert names(quiet, Thresholds(optimizer=0.05)) == ["optimizer_bound"]


def test_passes_that_take_most_of_the_step_are_named():
    found = first(job({"forward": 30.0, "backward": 50.0, "optimizer": 14.0}))
    assert (found.name, found.severity) == ("mostly_computing", Severity.INFO)
    assert "80.00 ms of a 100.00 ms step (80%)" in found.evidence


def test_a_measurement_without_steps_is_refused():
    with pytest.raises(ValueError, match="without step times"):
        diagnose(Measurement([], 1))


def test_the_report_has_a_line_a_finding():
    text = report(diagnose(job({"dataloader_next": 40.0, "optimizer": 20.0})))
    assert text.count("\n") == 1
    assert text.startswith("- input_bound (high): ")
