"""The knobs of a DeepSpeed job, and what is refused before anything starts."""

import pytest
from support.deepspeed_cases import LAUNCH, written

from perfsearch.config.schema import validate
from perfsearch.core.errors import BadInputError
from perfsearch.knobs.batch import Batch
from perfsearch.runners.base import Plan
from perfsearch.runners.deepspeed import config, trial
from perfsearch.runners.deepspeed.autotuning import Autotuning
from perfsearch.runners.deepspeed.request import torch_logs_file, write_whole
from perfsearch.runners.deepspeed.runner import DeepSpeed


def test_lists_of_the_file_are_searched_and_scalars_are_not(deepspeed_job):
    zero = {"stage": [2, 3], "overlap_comm": [True, False], "reduce_bucket_size": 5e8}
    runner, _ = deepspeed_job({"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero})
    names = runner.space.by_name
    assert names["zero_stage"].values == (2, 3)
    assert set(names["overlap_comm"].values) == {True, False}
    assert runner.baseline["overlap_comm"] is True
    assert "reduce_bucket_size" not in names
    made, _ = written(runner, zero_stage=3, overlap_comm=False)
    assert made["zero_optimization"] == {
        "stage": 3,
        "overlap_comm": False,
        "reduce_bucket_size": 5e8,
    }


def test_without_fast_the_keys_that_deepspeed_searches_are_searched(deepspeed_job):
    file = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": "all", "reduce_bucket_size": 123},
        "autotuning": {"fast": False},
    }
    names = deepspeed_job(file)[0].space.by_name
    assert {"allgather_bucket_size", "overlap_comm", "reduce_scatter"} <= set(names)
    assert "reduce_bucket_size" not in names
    assert "sub_group_size" not in names


def test_offloading_is_written_and_taken_away(deepspeed_job):
    own = {"device": "cpu", "pin_memory": False}
    file = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 2, "offload_optimizer": own},
    }
    runner, _ = deepspeed_job(file, runner={"knobs": {"offload_optimizer": "search"}})
    assert runner.baseline["offload_optimizer"] == "cpu"
    assert written(runner)[0]["zero_optimization"]["offload_optimizer"] == own
    made = written(runner, offload_optimizer="none")[0]
    assert made["zero_optimization"] == {"stage": 2}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_global_batch_is_kept_by_every_configuration(deepspeed_job, stage):
    runner, _ = deepspeed_job(
        {"train_micro_batch_size_per_gpu": 6, "gradient_accumulation_steps": 4}
    )
    for point in runner.space.listed():
        made, _ = written(runner, **point)
        times = made.get("gradient_accumulation_steps", 1)
        assert made["train_micro_batch_size_per_gpu"] * times * 2 == 48


def test_another_workload_is_refused():
    plain = {
        "runner": {"name": "deepspeed"},
        "strategy": {"name": "auto"},
        "workload": {"name": "gpt"},
    }
    with pytest.raises(BadInputError, match="workload=script"):
        DeepSpeed.from_settings(validate(plain))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"runner": {"ds_config": "other.json"}}, "runner.ds_config"),
        ({"nproc": 3}, "nproc=3"),
        ({"workload": {"map": ["lr=--lr"]}}, "gives a script micro_batch"),
        ({"workload": {"samples_per_step": 0}}, "from 1"),
        ({"runner": {"knobs": {"micro_batch": 3}}}, "Nearest possible: 2 or 4"),
        ({"runner": {"knobs": {"zero_stag": 3}}}, "Did you mean 'zero_stage'"),
        ({"command": "no-such-dir/deepspeed t.py --deepspeed ds.json"}, "not installed"),
        ({"command": f"{LAUNCH} t.py"}, "names no DeepSpeed configuration"),
        (
            {"command": f"{LAUNCH} t.py", "runner": {"ds_config": "ds.json", "autotuning": "run"}},
            "does not name",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(deepspeed_job, changes, words):
    with pytest.raises(BadInputError, match=words):
        deepspeed_job({"train_micro_batch_size_per_gpu": 4}, **changes)


def test_trials_are_silenced_and_the_tuned_command_is_not(deepspeed_job, tmp_path):
    file = {"train_micro_batch_size_per_gpu": 4}
    runner, _ = deepspeed_job(file, workload={"silence": ["--no-log", 3]})
    plan = Plan(0, log_directory=tmp_path / "logs")
    start = runner._start({**runner.pinned, **runner.baseline}, plan, survive=False)
    assert start.words[-2:] == ["--no-log", "3"]
    runner.export(runner.baseline, tmp_path / "apply")
    assert "--no-log" not in (tmp_path / "apply" / "cmd_optimal.txt").read_text()


@pytest.mark.parametrize("own", [None, "/mine"])
def test_torchs_launcher_logs_beside_the_trial_unless_it_is_told_where(
    deepspeed_job, tmp_path, monkeypatch, own
):
    if own:
        monkeypatch.setenv("PET_LOG_DIR", own)
    runner, _ = deepspeed_job({"train_micro_batch_size_per_gpu": 4})
    plan = Plan(0, log_directory=tmp_path / "logs")
    start = runner._start({**runner.pinned, **runner.baseline}, plan, survive=False)
    variables = trial.environment_of(start)
    assert variables["PET_LOG_DIR"] == (own or str(tmp_path / "logs" / "torch"))


def test_a_directory_that_torchs_launcher_made_is_removed_and_the_users_own_is_not(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name, stays in (("torchelastic_x", False), ("mine", True)):
        made = tmp_path / name
        (made / "run_y" / "attempt_0" / "0").mkdir(parents=True)
        write_whole(torch_logs_file(tmp_path), {"directory": str(made)})
        trial._remove_torch_logs(tmp_path)
        assert made.exists() is stays


def test_batches_of_the_section_bound_a_free_search():
    batch = Batch("free", 8, 2, 4, low=8, high=16)
    declared, _ = config.declare({}, batch, Autotuning())
    assert max(next(k for k in declared if k.name == "micro_batch").values) == 8
