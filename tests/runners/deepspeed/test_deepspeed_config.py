"""The DeepSpeed configuration: what survives, what is written, and what is refused."""

import json
import shlex
from pathlib import Path

import pytest
from support.deepspeed_cases import written

from perfsearch.core.errors import BadInputError
from perfsearch.runners.deepspeed import config
from perfsearch.runners.deepspeed.command import Command
from perfsearch.runners.deepspeed.config import batch_today


def test_what_is_not_searched_survives_to_the_letter(deepspeed_job):
    text = (
        '{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,\n'
        ' "optimizer": {"type": "AdamW", "params": {"lr": 3e-05, "betas": [0.9, 9.5e-1]}},\n'
        ' "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8, "sub_group_size": 1E9},\n'
        ' "x": null, "y": [], "z": {}, "fp16": {"enabled": "auto"}, "autotuning": {"fast": true}}'
    )
    runner, _ = deepspeed_job(text)
    made, _ = written(runner, zero_stage=3, micro_batch=8)
    lines = config.dump_json(made)
    for literal in ("3e-05", "[0.9, 9.5e-1]", "5e8", "1E9", '"auto"', "null", "[]", "{}"):
        assert literal in lines
    own = json.loads(text)
    own.pop("autotuning")
    own["train_micro_batch_size_per_gpu"], own["gradient_accumulation_steps"] = 8, 1
    own["zero_optimization"]["stage"] = 3
    assert json.loads(lines) == own
    assert list(json.loads(lines)) == list(own)


def test_the_baseline_is_the_file_itself(deepspeed_job):
    own = {"train_batch_size": 16, "zero_optimization": {"stage": 2}, "fp16": {"enabled": True}}
    runner, _ = deepspeed_job(own)
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
        ('{"train_batch_size": 8, "zero_optimization": []}', r"zero_optimization=\[\]: an object"),
        ('{"train_batch_size": 8, "autotuning": []}', r"autotuning=\[\]: an object"),
        ('{"train_batch_size": 8, "optimizer": "Adam"}', 'optimizer="Adam": an object'),
        ('{"train_batch_size": 8, "fp16": true}', "fp16=true: an object"),
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
def test_a_file_that_cannot_work_is_refused_by_name(deepspeed_job, text, words):
    with pytest.raises(BadInputError, match=words):
        deepspeed_job(text)


AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 0, "reduce_bucket_size": "auto"},
}


def test_auto_is_read_from_the_trainers_options_and_stays_auto(deepspeed_job):
    tail = "t.py --deepspeed ds.json --per_device_train_batch_size 4 --lr 1"
    runner, _ = deepspeed_job(AUTO, tail)
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


def test_arg_mappings_carry_values_to_the_script(deepspeed_job):
    mapped = {"train_micro_batch_size_per_gpu ": "--bs"}
    runner, _ = deepspeed_job(
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
        batch_today({"train_micro_batch_size_per_gpu": "auto"}, command, 2, {})
