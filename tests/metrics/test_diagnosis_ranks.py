"""Rules on ranks against one another, and on what they exchange."""

from __future__ import annotations

import pytest
from support.diagnosis_jobs import first, job, names, slow

from perfsearch.metrics.diagnosis import Severity, diagnose


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


def test_high_utilisation_alone_does_not_hide_communication():
    """cupy/cupy#3557: a collective that spins shows as 100 % utilisation."""
    system = {"gpu_utilization_percentage": 100.0}
    assert names(job({"comm_exposed": 40.0}, system=system)) == ["communication_bound"]
    assert names(job({"forward": 95.0}, system=system)) == ["compute_bound"]


def test_a_node_whose_ranks_are_all_slow_is_named():
    evidence = {**slow(3, forward=20.0), "straggler_forward_node": 1.0}
    ranks = [{"host": host, "device": "cpu"} for host in ("a", "a", "b (10.0.0.2)", "b (10.0.0.2)")]
    measured = job({"forward": 100.0}, bottleneck_evidence=evidence, environment={"ranks": ranks})
    measured.world_size = 4
    found = first(measured)
    assert found.evidence.startswith(
        "node b (10.0.0.2), on which every rank is slower than those elsewhere, takes 20.00 ms"
    )
