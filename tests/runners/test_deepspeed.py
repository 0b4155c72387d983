"""``runner=deepspeed`` without starting anything: command, file, section, batch, knobs, memory."""

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from perfsearch.config import validate
from perfsearch.runners import (
    _deepspeed_json,
    _deepspeed_knobs,
    _deepspeed_settings,
    _deepspeed_trial,
)
from perfsearch.runners._deepspeed_autotuning import Autotuning
from perfsearch.runners._deepspeed_batch import today
from perfsearch.runners._deepspeed_command import Command
from perfsearch.runners._deepspeed_memory import Memory, Rest
from perfsearch.runners._zero_batch import Batch
from perfsearch.runners.base import Plan
from perfsearch.runners.deepspeed import DeepSpeed
from perfsearch.search.errors import BadInputError
from perfsearch.search.trial import Measurement, Purpose, Status, Trial

LAUNCH = f"{sys.executable} -m torch.distributed.run --nproc-per-node 2"


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Build the runner for a configuration and a command's tail, in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")

    def build(configuration, tail="train.py --deepspeed_config ds.json", **changes):
        text = configuration if isinstance(configuration, str) else json.dumps(configuration)
        Path("ds.json").write_text(text)
        plain = {
            "runner": {"name": "deepspeed", **changes.pop("runner", {})},
            "strategy": {"name": changes.pop("strategy", "auto")},
            "workload": {
                "name": "script",
                "command": changes.pop("command", f"{LAUNCH} {tail}"),
                **changes.pop("workload", {}),
            },
            "run_dir": str(tmp_path / "run"),
            **changes,
        }
        settings = DeepSpeed.settle(validate(plain))
        return DeepSpeed.from_settings(settings), settings

    return build


def written(runner, **values):
    whole = {**runner.pinned, **runner.baseline, **values}
    return _deepspeed_knobs.write(runner.file, whole, runner.batch, runner.mappings)


# ---- the command


@pytest.mark.parametrize(
    ("line", "ranks", "path"),
    [
        ("deepspeed --num_gpus 4 t.py --deepspeed --deepspeed_config a.json", 4, "a.json"),
        ("deepspeed --num_gpus=4 --module pkg.t --deepspeed a.json", 4, "a.json"),
        ("deepspeed --include localhost:2,3 t.py --deepspeed_config=a.json", 2, "a.json"),
        ("deepspeed t.py --deepspeed a.json", None, "a.json"),
        ("torchrun --standalone --nproc_per_node=8 t.py --deepspeed a.json", 8, "a.json"),
        ("torchrun --nproc-per-node gpu t.py", None, None),
        ("python3.12 -u -m torch.distributed.run --nproc-per-node 2 t.py -c x", 2, None),
        ("accelerate launch --num_processes 2 --deepspeed_config_file a.json t.py", 2, "a.json"),
    ],
)
def test_a_command_is_understood(line, ranks, path):
    command = Command.parse(line)
    assert (command.ranks(), command.config_path) == (ranks, path)


def test_a_command_may_be_a_list_and_keeps_every_word():
    words = [
        "deepspeed",
        "--num_gpus",
        "2",
        "t.py",
        "--x",
        "a b",
        "--y={}",
        "--deepspeed",
        "d.json",
    ]
    made = Command.parse(words).for_trial(Path("/r/new.json"), {}, port=4321)
    assert made[:3] == ["deepspeed", "--master_port", "4321"]
    assert made[3:] == [*words[1:-1], "/r/new.json"]


def test_a_trial_has_no_tuning_of_deepspeeds_own_and_no_second_port():
    line = "deepspeed --autotuning run --master_port 7 --num_gpus 2 t.py --deepspeed d.json"
    command = Command.parse(line)
    assert command.autotuning == "run"
    made = command.for_trial(Path("n.json"), {"--bs": "4"}, port=8)
    assert made == shlex.split(
        "deepspeed --master_port 7 --num_gpus 2 t.py --deepspeed n.json --bs 4"
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "missing"),
        ("python train.py", "no launcher of DeepSpeed jobs"),
        ("deepspeed --num_gpus 2", "starts no script"),
        ("deepspeed --num_nodes 2 t.py", "--num_nodes 2"),
        ("deepspeed --include h1@h2 t.py", "--include"),
        ("deepspeed --num_gpus x t.py", "--num_gpus x"),
        ("deepspeed 'unclosed t.py", "No closing quotation"),
    ],
)
def test_a_command_that_cannot_work_is_refused_by_name(line, words):
    with pytest.raises(BadInputError, match=words):
        Command.parse(line).ranks()


def test_several_hosts_are_refused(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=4\nb slots=4\n")
    with pytest.raises(BadInputError, match="lists 2 hosts"):
        Command.parse(f"deepspeed --hostfile {hosts} t.py").ranks()


# ---- the file


def test_what_is_not_searched_survives_to_the_letter(job):
    text = (
        '{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,\n'
        ' "optimizer": {"type": "AdamW", "params": {"lr": 3e-05, "betas": [0.9, 9.5e-1]}},\n'
        ' "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8, "sub_group_size": 1E9},\n'
        ' "x": null, "y": [], "z": {}, "fp16": {"enabled": "auto"}, "autotuning": {"fast": true}}'
    )
    runner, _ = job(text)
    made, _ = written(runner, zero_stage=3, micro_batch=8)
    lines = _deepspeed_json.dump(made)
    for literal in ("3e-05", "[0.9, 9.5e-1]", "5e8", "1E9", '"auto"', "null", "[]", "{}"):
        assert literal in lines
    own = json.loads(text)
    own.pop("autotuning")
    own["train_micro_batch_size_per_gpu"], own["gradient_accumulation_steps"] = 8, 1
    own["zero_optimization"]["stage"] = 3
    assert json.loads(lines) == own
    assert list(json.loads(lines)) == list(own)


def test_the_baseline_is_the_file_itself(job):
    own = {"train_batch_size": 16, "zero_optimization": {"stage": 2}, "fp16": {"enabled": True}}
    runner, _ = job(own)
    made, options = written(runner)
    assert made == {**own, "train_micro_batch_size_per_gpu": 8}
    assert options == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, "a": 2}', "twice"),
        ("{a: 1}", "line 1 is no JSON"),
        ("[1]", "holds no object"),
        ('{"train_batch_size": 8, "zero_optimization": "all"}', '"stage": "all"'),
        ('{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 4}}', "stage=4"),
        ("{}", "train_micro_batch_size_per_gpu"),
        ('{"train_batch_size": 7}', "do not divide"),
        (
            '{"train_batch_size": 7, "train_micro_batch_size_per_gpu": 1, '
            '"gradient_accumulation_steps": 1}',
            "not train_micro_batch_size_per_gpu x",
        ),
    ],
)
def test_a_file_that_cannot_work_is_refused_by_name(job, text, words):
    with pytest.raises(BadInputError, match=words):
        job(text)


# ---- auto and arg_mappings

AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 0, "reduce_bucket_size": "auto"},
}


def test_auto_is_read_from_the_trainers_options_and_stays_auto(job):
    tail = "t.py --deepspeed ds.json --per_device_train_batch_size 4 --lr 1"
    runner, _ = job(AUTO, tail)
    assert (runner.batch.micro_batch, runner.batch.global_batch) == (4, 8)
    made, options = written(runner, micro_batch=2, zero_stage=2)
    assert made == {**AUTO, "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}
    assert options == {
        "--per_device_train_batch_size": "2",
        "--gradient_accumulation_steps": "2",
    }
    words = runner.command.for_trial(Path("n.json"), options, None)
    assert shlex.join(words).endswith(
        "t.py --deepspeed n.json --per_device_train_batch_size 2 --lr 1 "
        "--gradient_accumulation_steps 2"
    )


def test_arg_mappings_carry_values_to_the_script(job):
    mapped = {"train_micro_batch_size_per_gpu ": "--bs"}
    runner, _ = job(
        {"train_micro_batch_size_per_gpu": 4, "autotuning": {"arg_mappings": mapped}},
        "t.py --bs=4 --deepspeed_config ds.json",
    )
    made, options = written(runner, micro_batch=2)
    assert made["train_micro_batch_size_per_gpu"] == 2
    assert made["gradient_accumulation_steps"] == 2
    assert runner.command.for_trial(Path("n"), options, None)[-3] == "--bs=2"


def test_auto_without_an_option_is_refused():
    command = Command.parse("deepspeed --num_gpus 2 t.py --deepspeed d.json")
    with pytest.raises(BadInputError, match="arg_mappings"):
        today({"train_micro_batch_size_per_gpu": "auto"}, command, 2, {})


# ---- the autotuning section

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


def test_the_section_fills_in_what_the_users_keys_leave_open(job):
    file = {"train_micro_batch_size_per_gpu": 4, "autotuning": HONOURED | {"mp_size": 1}}
    runner, settings = job(file, batch="free")
    assert settings.strategy.name == "random"
    assert (settings.budget.trials, settings.budget.patience) == (7, 3)
    assert settings.objective.metric == "latency"
    assert runner.space.by_name["micro_batch"].values == (2, 3, 4, 5, 6, 7, 8)
    assert (runner.batch.low, runner.batch.high) == (4, 64)


def test_fast_is_the_strategy_of_that_name(job):
    section = {"tuner_num_trials": 9, "tuner_early_stopping": 2, "num_tuning_micro_batch_sizes": 4}
    _, settings = job({"train_micro_batch_size_per_gpu": 4, "autotuning": section})
    assert settings.strategy.name == "fast"
    assert settings.strategy.options == {
        "early_stopping": 2,
        "num_trials": 9,
        "num_micro_batches": 4,
    }
    assert settings.budget.patience is None


def test_the_users_own_keys_win(job):
    section = {"tuner_type": "random", "fast": False, "metric": "throughput"}
    _, settings = job(
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
        _deepspeed_settings.filled_in(validate(plain), section)


def test_bounds_of_a_fixed_batch_are_remarked_on(job):
    runner, _ = job(
        {"train_micro_batch_size_per_gpu": 4, "autotuning": {"max_train_batch_size": 64}}
    )
    assert len(runner.remarks) == 1
    assert "batch=free" in runner.remarks[0]


# ---- knobs


def test_lists_of_the_file_are_searched_and_scalars_are_not(job):
    zero = {"stage": [2, 3], "overlap_comm": [True, False], "reduce_bucket_size": 5e8}
    runner, _ = job({"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero})
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


def test_without_fast_the_keys_that_deepspeed_searches_are_searched(job):
    file = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": "all", "reduce_bucket_size": 123},
        "autotuning": {"fast": False},
    }
    names = job(file)[0].space.by_name
    assert {"allgather_bucket_size", "overlap_comm", "reduce_scatter"} <= set(names)
    assert "reduce_bucket_size" not in names
    assert "sub_group_size" not in names


def test_offloading_is_written_and_taken_away(job):
    own = {"device": "cpu", "pin_memory": False}
    file = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 2, "offload_optimizer": own},
    }
    runner, _ = job(file, runner={"knobs": {"offload_optimizer": "search"}})
    assert runner.baseline["offload_optimizer"] == "cpu"
    assert written(runner)[0]["zero_optimization"]["offload_optimizer"] == own
    made = written(runner, offload_optimizer="none")[0]
    assert made["zero_optimization"] == {"stage": 2}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_global_batch_is_kept_by_every_configuration(job, stage):
    runner, _ = job({"train_micro_batch_size_per_gpu": 6, "gradient_accumulation_steps": 4})
    for point in runner.space.listed():
        made, _ = written(runner, **point)
        times = made.get("gradient_accumulation_steps", 1)
        assert made["train_micro_batch_size_per_gpu"] * times * 2 == 48


# ---- other refusals


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
        ({"workload": {"map": ["micro_batch=--bs"]}}, "arg_mappings"),
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
def test_what_cannot_work_is_refused_before_anything_starts(job, changes, words):
    with pytest.raises(BadInputError, match=words):
        job({"train_micro_batch_size_per_gpu": 4}, **changes)


def test_trials_are_silenced_and_the_tuned_command_is_not(job, tmp_path):
    file = {"train_micro_batch_size_per_gpu": 4}
    runner, _ = job(file, workload={"silence": ["--no-log", 3]})
    plan = Plan(0, log_directory=tmp_path / "logs")
    start = runner._start({**runner.pinned, **runner.baseline}, plan, survive=False)
    assert start.words[-2:] == ["--no-log", "3"]
    runner.export(runner.baseline, tmp_path / "apply")
    assert "--no-log" not in (tmp_path / "apply" / "cmd_optimal.txt").read_text()


# ---- memory

ADAM = {"fp16": {"enabled": True}, "optimizer": {"type": "AdamW"}}


def test_what_rests_follows_from_the_stage():
    gib = 2**30
    rest = Rest(parameters=gib, trainable=gib, half=True, states=8)
    assert [rest.gib(stage, 4) for stage in range(4)] == [16, 7, 5.5, 4]
    frozen = Rest(parameters=gib, trainable=gib / 2, half=False, states=8)
    assert frozen.gib(0, 4) == 4 + 2 + 4


def seen(micro, stage, peak=None, status=Status.OK):
    measured = None
    if peak is not None:
        facts = {"parameters": 2.0**30, "trainable_parameters": 2.0**30}
        measured = Measurement([1.0], 1, peak_allocated_gib=peak, bottleneck_evidence=facts)
    configuration = {"micro_batch": micro, "zero_stage": stage}
    return Trial(micro, configuration, Purpose.SEARCH, status, measured)


def test_peaks_are_predicted_from_trials_and_what_does_not_fit_is_refused():
    memory = Memory(ADAM, 4, {}, capacity_gib=12.0, headroom=0.05, parameters=None)
    assert memory.refusal({"micro_batch": 1, "zero_stage": 0}, []) is None
    trials = [seen(1, 3, 5.0), seen(2, 3, 5.5)]
    assert memory.predict({"micro_batch": 8, "zero_stage": 3}, trials).peak_gib == pytest.approx(
        8.5
    )
    assert memory.predict({"micro_batch": 8, "zero_stage": 1}, trials).peak_gib == pytest.approx(
        11.5
    )
    assert "16.0 GiB rest" in memory.refusal({"micro_batch": 1, "zero_stage": 0}, trials)
    trials.append(seen(16, 3, status=Status.OOM))
    assert "micro_batch=16" in memory.refusal({"micro_batch": 32, "zero_stage": 3}, trials)
    assert memory.refusal({"micro_batch": 8, "zero_stage": 3}, trials) is None


def test_too_little_headroom_is_said():
    memory = Memory(ADAM, 4, {}, capacity_gib=10.0, headroom=0.05, parameters=None)
    assert "memory_headroom" in memory.lacks_headroom(Measurement([1.0], 1, peak_allocated_gib=9.6))
    tried = Measurement([1.0], 1, peak_allocated_gib=9.0)
    assert memory.lacks_headroom(tried) == ""
    tried.bottleneck_evidence["allocator_retries"] = 2.0
    assert "2 times" in memory.lacks_headroom(tried)


def test_batches_of_the_section_bound_a_free_search():
    batch = Batch("free", 8, 2, 4, low=8, high=16)
    declared, _ = _deepspeed_knobs.declare({}, batch, Autotuning())
    assert max(next(k for k in declared if k.name == "micro_batch").values) == 8


def test_locks_of_ended_ranks_are_broken_and_older_ones_are_left(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    locks = [tmp_path / "py312" / name / "lock" for name in ("ours", "older")]
    for lock in locks:
        lock.parent.mkdir(parents=True)
        lock.touch()
    os.utime(locks[1], (1000, 1000))
    assert _deepspeed_trial._break_build_locks(begin=2000)
    assert not _deepspeed_trial._break_build_locks(begin=2000)
    assert [lock.exists() for lock in locks] == [False, True]
