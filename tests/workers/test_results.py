from perfsearch.workers.results import combine


def rank_result(**changes):
    result = {
        "status": "ok",
        "reason": "",
        "agreed": {"step_seconds": [0.1], "samples_per_step": 8},
        "phases_ms": {"forward": 2.0, "backward": 4.0},
        "peaks": {"peak_allocated_gib": 1.0, "peak_reserved_gib": None},
        "in_force": {"static_graph": False},
        "evidence": {"comm_exposed_ms": 1.0},
        "environment": {"host": "a", "device": "cpu"},
    }
    return {**result, **changes}


def test_the_slowest_phase_and_the_largest_peak_count():
    other = rank_result(
        phases_ms={"forward": 6.0, "backward": 4.0},
        peaks={"peak_allocated_gib": 3.0, "peak_reserved_gib": None},
    )
    made = combine([rank_result(), other])["measurement"]
    assert made["phases_ms"] == {"forward": 6.0, "backward": 4.0, "comm_exposed": 1.0}
    assert made["peak_allocated_gib"] == 3.0
    assert made["peak_reserved_gib"] is None
    assert made["bottleneck_evidence"]["straggler_forward_ratio"] == 1.5
    assert made["world_size"] == 2


def test_settings_that_differ_between_ranks_are_seen():
    made = combine([rank_result(), rank_result(in_force={"static_graph": True})])["measurement"]
    assert made["in_force"]["static_graph"] == "differs between ranks: False, True"
