from __future__ import annotations

import pytest
from support.strategy_spaces import drive, make, mixed_space


@pytest.mark.parametrize("sampler", ["tpe", "gp"])
def test_both_samplers_use_their_model(sampler: str) -> None:
    pytest.importorskip("optuna")
    strategy = make("optuna", mixed_space(), 0, sampler=sampler, startup_trials=3)
    assert len(drive(strategy, 8)) == 8
