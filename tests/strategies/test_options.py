"""The keys ``strategy.*``: their ranges, and that a wrong one is named."""

import pytest
from support.strategy_spaces import REQUIRED

from perfsearch.config.options import ConfigError, build_options
from perfsearch.strategies import load

WRONG = [
    ("auto", "try_all", -1, ">= 0"),
    ("auto", "min_gain", 1.0, ">= 0 and < 1"),
    ("bayes", "alpha", 0.0, "> 0 and <= 1 or null"),
    ("bayes", "alpha", 1.5, "> 0 and <= 1 or null"),
    ("bayes", "initial_points", 0, ">= 1 or null"),
    ("bayes", "max_samples", 0, ">= 1 or null"),
    ("bayes", "min_gain", 1.0, ">= 0 and < 1"),
    ("bayes", "xi", -0.1, ">= 0 and < 1"),
    ("external", "answer_s", 0, "> 0"),
    ("external", "retries", -1, ">= 0"),
    ("fast", "early_stopping", 0, ">= 1"),
    ("fast", "num_trials", 0, ">= 1"),
    ("fast", "num_micro_batches", 0, ">= 1"),
    ("fast", "plateau", 1.0, ">= 0 and < 1"),
    ("grid", "points_per_knob", 1, ">= 2"),
    ("mcmc", "alpha", -1, ">= 0 or null"),
    ("mcmc", "alpha", float("inf"), ">= 0 or null"),
    ("mcmc", "proposals", -1, ">= 0 or null"),
    ("mcmc", "chains", 0, ">= 1 or null"),
    ("mcmc", "return_every", -1, ">= 0 or null"),
    ("mcmc", "propagation", 1.5, ">= 0 and <= 1 or null"),
    ("nevergrad", "planned_trials", 0, ">= 1"),
    ("optuna", "sampler", "cma", "tpe or gp"),
    ("optuna", "startup_trials", 0, ">= 1"),
]


@pytest.mark.parametrize(("name", "key", "value", "allowed"), WRONG)
def test_a_wrong_option_is_named_with_what_is_allowed(name, key, value, allowed):
    if name in ("nevergrad", "optuna"):
        pytest.importorskip(name)
    with pytest.raises(ConfigError) as caught:
        build_options(load(name).Options, {**REQUIRED.get(name, {}), key: value}, "strategy")
    assert str(caught.value).startswith(f"strategy.{key}={value}: ")
    assert str(caught.value).endswith(f"{allowed}.")


@pytest.mark.parametrize(("name", "key"), sorted({case[:2] for case in WRONG}))
def test_the_default_is_in_range(name, key):
    if name in ("nevergrad", "optuna"):
        pytest.importorskip(name)
    options = load(name).Options
    needed = REQUIRED.get(name, {})
    default = getattr(options(**needed), key)
    assert build_options(options, {**needed, key: default}, "strategy") == options(**needed)
