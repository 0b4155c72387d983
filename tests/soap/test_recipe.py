"""Strategies as trials of the warm workers do the same computation as data parallelism."""

import pytest
from support.soap_step_ranks import launch


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["dlrm", "gpt"])
def test_a_strategy_is_measured_like_any_trial(workload, tmp_path):
    (status, expected, _, _), *others, rounded = launch(tmp_path, 2, workload, plans=2)
    assert status == "ok"
    for status, losses, in_force, evidence in others:
        assert status == "ok"
        assert losses == pytest.approx(expected, rel=1e-4)
        assert in_force["cuda_graph"] is False
        assert evidence["summed_mib"] >= 0
    assert any(evidence["redistributed_mib"] > 0 for *_, evidence in others[1:])
    # weights that are changed by what rounding does after the first step: as small a difference
    (_, plain, _, _), (status, losses, _, _) = others[0], rounded
    assert status == "ok"
    assert losses[0] == plain[0]
    assert losses != plain
    assert losses == pytest.approx(plain, rel=1e-4)
