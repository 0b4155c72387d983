from __future__ import annotations

from typing import Any

import pytest

from perfsearch.metrics.diagnosis import diagnose, report
from perfsearch.metrics.findings import Severity, Thresholds
from perfsearch.search.trial import Measurement


def job(phases: dict[str, float] | None = None, **changes: Any) -> Measurement:
    """A job with steps of 100 ms whose passes were not seen, unless they are given."""
    return Measurement([0.1] * 10, 32, world_size=2, phases_ms=phases or {}, **changes)


def slow(rank: int, error_ms: float = 0.5, **excess_ms: float) -> dict[str, float]:
    """Evidence of one rank that takes longer, as phases on each rank give it."""
    found = {}
    for phase, excess in excess_ms.items():
        found[f"straggler_{phase}_excess_ms"] = excess
        found[f"straggler_{phase}_rank"] = float(rank)
        found[f"{phase}_error_ms"] = error_ms
    return found


def names(measurement: Measurement, limits: Thresholds | None = None) -> list[str]:
    return [finding.name for finding in diagnose(measurement, limits)]


def first(measurement: Measurement, limits: Thresholds | None = None):
    return diagnose(measurement, limits)[0]


NO_OTHER = Thresholds(other=1.0)


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


def test_a_rank_for_which_nobody_waits_is_no_straggler():
    """What it takes longer in one phase it takes less in another."""
    evidence = {**slow(0, backward=30.0), "comm_least_ms": 4.0}
    phases = {"backward": 50.0, "optimizer": 49.0, "rank_wait": 1.0}
    assert "straggler" not in names(job(phases, bottleneck_evidence=evidence))
    found = first(job({**phases, "rank_wait": 5.0}, bottleneck_evidence=evidence))
    assert (found.name, found.severity) == ("straggler", Severity.MODERATE)
    assert "rank 0 takes 30.00 ms a step longer than the other in backward" in found.evidence
    assert (
        "the others wait 10.00 ms for it in their collectives (10% of the step)" in found.evidence
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_of_a_rank_that_only_waits_for_batches_its_data_is_looked_at(workers):
    """Loader processes that are all as slow show on the rank whose own began last."""
    evidence = slow(1, 0.05, dataloader_next=40.0, forward=0.4)
    in_force = {"dataloader_workers": workers}
    found = first(job({"forward": 60.0}, bottleneck_evidence=evidence, in_force=in_force))
    assert found.name == "straggler"
    assert "takes 40.40 ms a step longer than the other in dataloader_next (40%" in found.evidence
    assert "clocks" not in found.advice
    assert ("all ranks are as slow" in found.advice) == bool(workers)


def test_a_slow_rank_is_named_and_comes_before_the_communication_that_it_causes():
    evidence = slow(1, forward=30.0)
    devices = [{"index": 4, "uuid": "GPU-a"}, {"index": 5, "uuid": "GPU-b"}]
    found = diagnose(
        job(
            {"forward": 70.0, "comm_exposed": 30.0},
            bottleneck_evidence=evidence,
            environment={"devices": devices},
        )
    )
    assert [f.name for f in found[:2]] == ["straggler", "communication_bound"]
    assert "rank 1 (gpu_5, GPU-b) takes 30.00 ms a step longer than the other" in found[0].evidence


@pytest.mark.parametrize(("excess_ms", "error_ms"), [(1.0, 0.0), (20.0, 6.0)])
def test_a_small_or_an_uncertain_excess_is_no_straggler(excess_ms, error_ms):
    evidence = slow(0, error_ms, forward=excess_ms)
    assert "straggler" not in names(job({"forward": 100.0}, bottleneck_evidence=evidence))


def test_without_an_error_of_its_phase_no_rank_is_called_slow():
    evidence = slow(1, forward=30.0)
    del evidence["forward_error_ms"]
    assert "straggler" not in names(job({"forward": 100.0}, bottleneck_evidence=evidence))


def test_a_rank_that_is_slow_in_backward_is_found_where_communication_is_told_apart():
    phases = {"forward": 30.0, "backward": 45.0, "rank_wait": 25.0}
    evidence = slow(1, backward=40.0)
    assert names(job(phases, bottleneck_evidence=evidence)) == ["rank_imbalance"]
    found = diagnose(job(phases, bottleneck_evidence={**evidence, "comm_least_ms": 0.0}))
    assert [f.name for f in found] == ["straggler"]
    assert "rank 1 takes 40.00 ms a step longer than the other in backward" in found[0].evidence


def test_what_a_rank_takes_longer_is_summed_over_its_phases():
    evidence = {**slow(1, forward=4.0, optimizer=3.0), **slow(0, to_device=4.5)}
    found = first(job({"forward": 100.0}, bottleneck_evidence=evidence))
    assert found.name == "straggler"
    assert "rank 1 takes 7.00 ms" in found.evidence
    assert "in forward and optimizer (7% of the step)" in found.evidence
    unclear = {**evidence, "optimizer_error_ms": 1.0}
    assert "straggler" not in names(job({"forward": 100.0}, bottleneck_evidence=unclear))


def test_ranks_that_wait_for_one_another_by_turns_are_no_communication():
    found = first(job({"forward": 68.0, "rank_wait": 30.0, "comm_exposed": 2.0}))
    assert found.name == "rank_imbalance"
    assert "30.00 ms of a 100.00 ms step (30%)" in found.evidence
    assert names(job({"dataloader_next": 40.0, "rank_wait": 30.0})) == ["input_bound"]


def test_a_small_wait_for_the_loader_does_not_hide_an_imbalance():
    found = diagnose(job({"dataloader_next": 6.0, "rank_wait": 40.0, "forward": 54.0}))
    assert [f.name for f in found] == ["input_bound", "rank_imbalance"]


@pytest.mark.parametrize(
    ("evidence", "words"),
    [
        ({}, "cannot be told"),
        (slow(0, forward=0.1), "cannot be told"),
        ({**slow(0, forward=0.1), "comm_least_ms": 1.0}, "none of them is the slow one"),
    ],
)
def test_that_no_rank_is_slow_throughout_is_said_only_where_it_is_known(evidence, words):
    found = first(job({"forward": 70.0, "rank_wait": 30.0}, bottleneck_evidence=evidence))
    assert found.name == "rank_imbalance"
    assert words in found.evidence


def test_what_leaving_communication_out_does_not_save_is_none():
    evidence = {"with_everything_ms": 100.0, "without_communication_ms": 99.0}
    found = diagnose(job({"comm_exposed": 80.0}, bottleneck_evidence=evidence))
    assert [f.name for f in found] == ["mostly_one_phase"]
    assert "comm_exposed takes 80.00 ms of a 100.00 ms step (80%)" in found[0].evidence
    evidence["without_communication_ms"] = 60.0
    found = first(job({"comm_exposed": 80.0}, bottleneck_evidence=evidence))
    assert found.name == "communication_bound"
    assert "40.00 ms of a 100.00 ms step" in found.evidence


@pytest.mark.parametrize(
    ("ms", "expected"),
    [(9.0, None), (15.0, Severity.MODERATE), (30.0, Severity.HIGH)],
)
def test_exposed_communication_by_its_share(ms, expected):
    phases = {"comm_exposed": ms, "backward": 100.0 - ms}
    found = {f.name: f.severity for f in diagnose(job(phases))}
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
    assert names(job(peak_reserved_gib=70.0, environment={"devices": devices})) == ["balanced"]


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


def test_high_utilisation_alone_does_not_hide_communication():
    """cupy/cupy#3557: a collective that spins shows as 100 % utilisation."""
    system = {"gpu_utilization_percentage": 100.0}
    assert names(job({"comm_exposed": 40.0}, system=system)) == ["communication_bound"]
    assert names(job({"forward": 95.0}, system=system)) == ["compute_bound"]


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
