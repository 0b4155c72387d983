from perfsearch.workers.results import combine


def rank_result(**changes):
    result = {
        "status": "ok",
        "reason": "",
        "agreed": {"step_seconds": [0.1], "samples_per_step": 8},
        "phases_ms": {"forward": 2.0, "backward": 4.0},
        "peaks": {"peak_allocated_gib": 1.0, "peak_reserved_gib": None},
        "in_force": {"static_graph": False},
        "evidence": {"device_exposed_ms": 1.0, "phases_step_ms": 8.0},
        "environment": {"host": "a", "device": "cpu"},
    }
    return {**result, **changes}


def test_phases_are_means_and_the_largest_peak_counts():
    other = rank_result(
        phases_ms={"forward": 6.0, "backward": 4.0},
        peaks={"peak_allocated_gib": 3.0, "peak_reserved_gib": None},
    )
    made = combine([rank_result(), other])["measurement"]
    assert made["phases_ms"] == {
        "forward": 4.0, "backward": 3.0, "comm_exposed": 1.0, "rank_wait": 0.0
    }  # fmt: skip
    assert made["peak_allocated_gib"] == 3.0
    assert made["peak_reserved_gib"] is None
    assert made["bottleneck_evidence"]["straggler_forward_excess_ms"] == 4.0
    assert made["bottleneck_evidence"]["straggler_forward_rank"] == 1.0
    assert made["world_size"] == 2


def test_settings_that_differ_between_ranks_are_seen():
    made = combine([rank_result(), rank_result(in_force={"static_graph": True})])["measurement"]
    assert made["in_force"]["static_graph"] == "differs between ranks: False, True"


def test_waiting_for_a_slow_rank_is_not_communication():
    fast = rank_result(phases_ms={"forward": 1.0, "backward": 5.0, "comm_exposed": 25.0})
    slow = rank_result(phases_ms={"forward": 22.0, "backward": 7.0, "comm_exposed": 2.0})
    made = combine([fast, slow])["measurement"]
    assert made["phases_ms"] == {
        "forward": 11.5, "backward": 6.0, "comm_exposed": 2.0, "rank_wait": 11.5
    }  # fmt: skip
    assert made["bottleneck_evidence"]["straggler_forward_excess_ms"] == 21.0


def test_ranks_that_are_slow_by_turns_wait_for_one_another():
    phases = {"forward": 10.0, "comm_exposed": 8.0}
    results = [rank_result(phases_ms=phases, evidence={"comm_least_ms": 0.5}) for _ in range(2)]
    made = combine(results)["measurement"]
    assert made["phases_ms"] == {"forward": 10.0, "comm_exposed": 0.5, "rank_wait": 7.5}


def test_one_ranks_communication_is_taken_out_of_its_passes():
    alone = rank_result(evidence={"device_exposed_ms": 5.0})
    made = combine([alone])["measurement"]
    assert made["phases_ms"] == {"forward": 1.0, "backward": 0.0, "comm_exposed": 5.0}


def test_a_profiler_that_fails_on_one_rank_leaves_the_trial_its_score():
    known = rank_result(evidence={"device_exposed_ms": 3.0})
    for results in ([known, rank_result(evidence={})], [rank_result(evidence={}), known]):
        made = combine(results)["measurement"]
        assert made["phases_ms"] == {"forward": 2.0, "backward": 4.0}


def test_operations_that_one_rank_could_not_count_are_left_out():
    counted = rank_result(evidence={"counted_flops": 3.0, "phases_step_ms": 4.0})
    both = combine([counted, counted])["measurement"]["bottleneck_evidence"]
    assert both["counted_flops"] == 6.0
    one = combine([counted, rank_result()])["measurement"]["bottleneck_evidence"]
    assert "counted_flops" not in one
    assert one["phases_step_ms"] == 6.0


def test_the_idlest_device_is_known():
    made = combine([rank_result(evidence={"device_busy_ms": ms}) for ms in (9.0, 4.0)])
    evidence = made["measurement"]["bottleneck_evidence"]
    assert (evidence["device_busy_ms"], evidence["device_busy_least_ms"]) == (9.0, 4.0)


def test_a_node_is_slow_where_each_of_its_ranks_is_slower_than_all_elsewhere():
    def made(*forward_ms):
        ranks = [
            rank_result(phases_ms={"forward": ms}, environment={"host": host, "device": "cpu"})
            for ms, host in zip(forward_ms, "aabb", strict=True)
        ]
        return combine(ranks)["measurement"]["bottleneck_evidence"]

    slow = made(2.0, 2.5, 7.0, 8.0)
    assert (slow["straggler_forward_rank"], slow["straggler_forward_node"]) == (3.0, 1.0)
    assert "straggler_forward_node" not in made(2.0, 7.5, 7.0, 8.0)
