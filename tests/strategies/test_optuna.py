from __future__ import annotations

import builtins
from typing import Any

import pytest
from conftest import baseline_of, drive, make, mixed_space

from perfsearch.search.hints import Hints
from perfsearch.strategies.optuna import Optuna


def test_without_optuna_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "optuna":
            raise ModuleNotFoundError("No module named 'optuna'", name="optuna")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    space = mixed_space()
    with pytest.raises(ModuleNotFoundError, match=r"pip install perfsearch\[optuna\]"):
        Optuna(space, Hints(baseline_of(space)), 0)


@pytest.mark.parametrize("sampler", ["tpe", "gp"])
def test_both_samplers_use_their_model(sampler: str) -> None:
    pytest.importorskip("optuna")
    strategy = make("optuna", mixed_space(), 0, sampler=sampler, startup_trials=3)
    assert len(drive(strategy, 8)) == 8


@pytest.mark.parametrize(("key", "value"), [("sampler", "cma"), ("startup_trials", 0)])
def test_bad_options_name_the_key(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"strategy\.{key}={value}"):
        Optuna.Options(**{key: value})  # type: ignore[arg-type]
