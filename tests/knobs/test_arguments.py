"""Which of a script's own options are its micro-batch and its accumulation."""

import pytest

from perfsearch.knobs.arguments import batch_arguments

PLAIN = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("-b", "--batch-size", type=int, default=4)
parser.add_argument("--grad_accum_steps", type=int, default=8)
args = parser.parse_args()
"""
CERTAIN = PLAIN.replace("--batch-size", "--micro-batch-size")
TRAINER = """
from transformers import HfArgumentParser, Trainer, TrainingArguments
(arguments,) = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()
"""


def found(directory, source, *words):
    (directory / "train.py").write_text(source)
    return batch_arguments(str(directory / "train.py"), words)


@pytest.mark.parametrize(
    ("source", "words", "places", "today"),
    [
        (PLAIN, (), ("--batch-size", "--grad_accum_steps"), (4, 8)),
        (PLAIN, ("-b", "16"), ("-b", "--grad_accum_steps"), (16, 8)),
        (PLAIN, ("--batch-size=2", "data"), ("--batch-size", "--grad_accum_steps"), (2, 8)),
        (CERTAIN, (), ("--micro-batch-size", "--grad_accum_steps"), (4, 8)),
        (
            TRAINER,
            ("--gradient_accumulation_steps", "4"),
            ("--per_device_train_batch_size", "--gradient_accumulation_steps"),
            (8, 4),
        ),
    ],
)
def test_both_are_found_with_todays_values(tmp_path, source, words, places, today):
    made = found(tmp_path, source, *words)
    assert [mapped.name for mapped in made.maps] == ["micro_batch", "gradient_accumulation"]
    assert tuple(mapped.argument for mapped in made.maps) == places
    assert (made.micro_batch, made.accumulation) == today
    assert made.is_certain is (source is not PLAIN)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        pytest.param("def broken(", (), id="no Python"),
        pytest.param(PLAIN.replace("grad_accum_steps", "depth"), (), id="no accumulation"),
        pytest.param(PLAIN.replace("--batch-size", "--rate"), (), id="no batch"),
        pytest.param(PLAIN + 'parser.add_argument("--bs", default=1)\n', (), id="two batches"),
        pytest.param(
            PLAIN + 'parser.add_argument("--global-batch-size")\n', (), id="that of a step, too"
        ),
        pytest.param(
            CERTAIN + 'parser.add_argument("--batch-size", default=64)\n', (), id="perhaps a step's"
        ),
        pytest.param(PLAIN, ("--batch", "16"), id="cut short"),
        pytest.param(PLAIN, ("-b16",), id="with its value"),
        pytest.param(PLAIN, ("-b", "16", "--batch-size", "8"), id="given by two names"),
        pytest.param(PLAIN, ("--batch-size", "many"), id="no number"),
        pytest.param(PLAIN, ("--batch-size", "0"), id="none"),
        pytest.param(PLAIN.replace("default=4", "default=SIZE"), (), id="unknown default"),
        pytest.param(PLAIN.replace("default=4", "choices=[4], default=4"), (), id="choices"),
        pytest.param(PLAIN.replace("default=4", "nargs=2, default=4"), (), id="several values"),
        pytest.param(PLAIN.replace("default=4", "default=4, **more"), (), id="anything more"),
        pytest.param(PLAIN + "args.batch_size //= 2\n", (), id="changed afterwards"),
        pytest.param(PLAIN + "parser.set_defaults(**settings)\n", (), id="other defaults"),
        pytest.param(TRAINER.replace("(TrainingArguments,)", "Own"), (), id="not the Trainer's"),
        pytest.param(TRAINER.replace("HfArgumentParser, ", ""), (), id="another parser"),
    ],
)
def test_what_is_not_plain_is_left_alone(tmp_path, source, words):
    assert found(tmp_path, source, *words).maps == ()


def test_values_on_the_command_line_need_no_defaults(tmp_path):
    source = PLAIN.replace("default=4", "default=SIZE") + "parser.set_defaults(**settings)\n"
    made = found(tmp_path, source, "--batch-size", "2", "--grad_accum_steps=3")
    assert (made.micro_batch, made.accumulation) == (2, 3)


def test_what_is_no_file_has_none(tmp_path):
    assert batch_arguments(str(tmp_path / "gone.py"), []).maps == ()
    (tmp_path / "binary.py").write_bytes(b"\xff\x00")
    assert batch_arguments(str(tmp_path / "binary.py"), []).maps == ()
