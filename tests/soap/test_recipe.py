"""Strategies as trials of the warm workers do the same computation as data parallelism."""

import pytest
from support.soap_step_ranks import launch


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["dlrm", "gpt"])
def test_a_strategy_is_measured_like_any_trial(workload, tmp_path):
    (status, expected, _, _), *others = launch(tmp_path, 2, workload, plans=2)
    assert status == "ok"
    for status, losses, in_force, evidence in others:
        assert status == "ok"
        assert losses == pytest.approx(expected, rel=1e-4)
        assert in_force["cuda_graph"] is False
        assert evidence["summed_mib"] >= 0
    assert any(evidence["redistributed_mib"] > 0 for *_, evidence in others[1:])
