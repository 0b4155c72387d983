from __future__ import annotations

import pytest
from strategies.conftest import drive, make, mixed_space

from perfsearch.strategies.optuna import Optuna


@pytest.mark.parametrize("sampler", ["tpe", "gp"])
def test_both_samplers_use_their_model(sampler: str) -> None:
    pytest.importorskip("optuna")
    strategy = make("optuna", mixed_space(), 0, sampler=sampler, startup_trials=3)
    assert len(drive(strategy, 8)) == 8


@pytest.mark.parametrize(("key", "value"), [("sampler", "cma"), ("startup_trials", 0)])
def test_bad_options_name_the_key(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"strategy\.{key}={value}"):
        Optuna.Options(**{key: value})  # type: ignore[arg-type]
