"""The ``autotuning`` section of a DeepSpeed configuration."""

import pytest

from perfsearch.config.schema import validate
from perfsearch.core.errors import BadInputError
from perfsearch.runners.deepspeed import autotuning
from perfsearch.runners.deepspeed.autotuning import Autotuning

HONOURED = {
    "enabled": True,
    "fast": False,
    "results_dir": "r",
    "exps_dir": "e",
    "overwrite": False,
    "start_profile_step": 4,
    "end_profile_step": 9,
    "metric": "latency",
    "tuner_type": "random",
    "tuner_early_stopping": 3,
    "tuner_num_trials": 7,
    "arg_mappings": {"train_micro_batch_size_per_gpu": "--bs"},
    "max_train_batch_size": 64,
    "min_train_batch_size": 4,
    "max_train_micro_batch_size_per_gpu": 8,
    "min_train_micro_batch_size_per_gpu": 2,
    "num_tuning_micro_batch_sizes": 2,
    "mp_size": 2,
    "model_info": {"num_params": 1000, "profile": True, "hidden_size": None, "num_layers": None},
}


def test_every_key_of_deepspeeds_page_is_read():
    section = Autotuning.parse({"autotuning": HONOURED})
    assert section.profile_steps() == (4, 9)
    assert section.strategy() == ("random", {})
    assert section.num_params == 1000
    assert section.given == frozenset(HONOURED)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("enabled", False, "it says not to tune"),
        ("metric", "FLOPS", "throughput"),
        ("metric", "speed", "unknown"),
        ("metric_path", "m.json", "trials.csv"),
        ("model_info_path", "m.json", "first trial"),
        ("start_step", 3, "start_profile_step"),
        ("end_step", 3, "end_profile_step"),
        ("tuner_type", "gridsearc", "Did you mean 'gridsearch'"),
        ("mp_size", 0, "from 1"),
        ("fast", "yes", "true and false"),
        ("max_batch", 4, "no such key"),
        ("end_profile_step", 2, "above start_profile_step"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(key, value, words):
    with pytest.raises(BadInputError, match=words) as caught:
        Autotuning.parse({"autotuning": {"start_profile_step": 3, key: value}})
    assert f"autotuning.{key}" in str(caught.value)


def test_the_section_fills_in_what_the_users_keys_leave_open(deepspeed_job):
    file = {"train_micro_batch_size_per_gpu": 4, "autotuning": HONOURED | {"mp_size": 1}}
    runner, settings = deepspeed_job(file, batch="free")
    assert settings.strategy.name == "random"
    assert (settings.budget.trials, settings.budget.patience) == (7, 3)
    assert settings.objective.metric == "latency"
    assert runner.space.by_name["micro_batch"].values == (2, 3, 4, 5, 6, 7, 8)
    assert (runner.batch.low, runner.batch.high) == (4, 64)


def test_fast_is_the_strategy_of_that_name(deepspeed_job):
    section = {"tuner_num_trials": 9, "tuner_early_stopping": 2, "num_tuning_micro_batch_sizes": 4}
    _, settings = deepspeed_job({"train_micro_batch_size_per_gpu": 4, "autotuning": section})
    assert settings.strategy.name == "fast"
    assert settings.strategy.options == {
        "early_stopping": 2,
        "num_trials": 9,
        "num_micro_batches": 4,
    }
    assert settings.budget.patience is None


def test_the_users_own_keys_win(deepspeed_job):
    section = {"tuner_type": "random", "fast": False, "metric": "throughput"}
    _, settings = deepspeed_job(
        {"train_micro_batch_size_per_gpu": 4, "autotuning": section},
        strategy="grid",
        budget={"trials": 3},
    )
    assert settings.strategy.name == "grid"
    assert settings.budget.trials == 3


def test_a_contradiction_of_metrics_is_refused():
    plain = {
        "runner": {"name": "deepspeed"},
        "strategy": {"name": "auto"},
        "workload": {"name": "script"},
        "objective": {"metric": "latency"},
    }
    section = Autotuning.parse({"autotuning": {"metric": "throughput"}})
    with pytest.raises(BadInputError, match="=latency is asked for"):
        autotuning.filled_in(validate(plain), section)


def test_bounds_of_a_fixed_batch_are_remarked_on(deepspeed_job):
    runner, _ = deepspeed_job(
        {"train_micro_batch_size_per_gpu": 4, "autotuning": {"max_train_batch_size": 64}}
    )
    assert len(runner.remarks) == 1
    assert "batch=free" in runner.remarks[0]


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"max_train_batch_size": 2}, "max_train_batch_size=2: .* trains the global batch 8"),
        ({"min_train_batch_size": 16}, "min_train_batch_size=16: .* trains the global batch 8"),
        ({"max_train_batch_size": 1}, "max_train_batch_size=1: 2 ranks"),
        (
            {"max_train_batch_size": 8, "min_train_batch_size": 16},
            "max_train_batch_size=8: below min_train_batch_size=16",
        ),
        (
            {"max_train_micro_batch_size_per_gpu": 2, "min_train_micro_batch_size_per_gpu": 4},
            "max_train_micro_batch_size_per_gpu=2: below min_train_micro_batch_size_per_gpu=4",
        ),
    ],
)
def test_bounds_that_exclude_the_job_are_refused_by_name(deepspeed_job, section, words):
    with pytest.raises(BadInputError, match=words):
        deepspeed_job({"train_micro_batch_size_per_gpu": 4, "autotuning": section}, batch="free")
