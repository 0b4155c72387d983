import json

import pytest

from perfsearch.core.errors import BadInputError
from perfsearch.knobs.transport import (
    Mapped,
    apply,
    current,
    parse_map,
    parse_map_file,
    preset,
)

BATCH = Mapped("micro_batch", "--bs", default=2)


@pytest.mark.parametrize(
    ("arguments", "value", "made"),
    [
        (["--bs", "8", "--lr=1e-3"], 4, ["--bs", "4", "--lr=1e-3"]),
        (["--bs=8", "x"], 4, ["--bs=4", "x"]),
        (["x"], 4, ["x", "--bs", "4"]),
        (["--bs", "1", "--bs", "8"], 4, ["--bs", "1", "--bs", "4"]),
        (["--bs"], False, []),
        ([], True, ["--bs"]),
        ([], False, []),
        (["--bs"], True, ["--bs"]),
    ],
)
def test_a_knob_takes_its_argument_and_nothing_else(tmp_path, arguments, value, made):
    given, told = apply(arguments, [BATCH], {"micro_batch": value}, tmp_path)
    assert given == made
    assert told == {"micro_batch": f"--bs {value}"}


def test_arguments_that_no_map_names_stay_as_they_are(tmp_path):
    odd = ["a=b", "{}", "x,y", "q'\"", " ", "", "--", "\udcff"]
    assert apply(odd, [BATCH], {"micro_batch": None}, tmp_path) == (odd, {})


def test_an_argument_without_dashes_is_a_key(tmp_path):
    mapped = parse_map("micro_batch=data.batch_size")
    assert current(["data.batch_size=8"], mapped) == 8
    assert apply(["data.batch_size=8"], [mapped], {"micro_batch": 2}, tmp_path)[0] == [
        "data.batch_size=2"
    ]


@pytest.mark.parametrize(
    ("arguments", "value"), [(["--bs", "8"], 8), (["--bs=0.5"], 0.5), ([], 2), (["--bs"], True)]
)
def test_todays_value_is_read_from_the_arguments(arguments, value):
    assert current(arguments, BATCH) == value


def test_a_file_is_copied_and_its_name_replaced(tmp_path):
    file = tmp_path / "ds_config.json"
    content = {"train_micro_batch_size_per_gpu": 8, "train_batch_size": 32, "a": {"b": 1}}
    file.write_text(json.dumps(content))
    mapped = parse_map_file(f"{file}:train_micro_batch_size_per_gpu")
    deep = parse_map_file(f"depth={file}:a.c.d")
    assert mapped.name == "micro_batch" and current([], mapped) == 8
    values = {"micro_batch": 4, "depth": 7}
    given, told = apply([f"--ds={file}", str(file)], [mapped, deep], values, tmp_path / "copy")
    copy = tmp_path / "copy" / "ds_config.json"
    assert given == [f"--ds={copy}", str(copy)]
    assert json.loads(copy.read_text()) == {
        "train_micro_batch_size_per_gpu": 4,
        "a": {"b": 1, "c": {"d": 7}},
    }
    assert json.loads(file.read_text()) == content
    assert set(told) == {"micro_batch", "depth"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ds.json", "FILE:KEY"),
        ("missing.json:train_micro_batch_size_per_gpu", "missing.json"),
        ("{file}:unknown", "Name it"),
        ("n={file}:a.b.c.d", "no such key"),
    ],
)
def test_a_wrong_file_map_says_what_is_missing(tmp_path, text, says):
    file = tmp_path / "ds.json"
    file.write_text('{"a": {"b": 1}}')
    with pytest.raises(BadInputError, match=says):
        parse_map_file(text.format(file=file))


def test_a_file_that_no_argument_names_is_refused(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"gradient_accumulation_steps": 1}')
    mapped = parse_map_file(f"{file}:gradient_accumulation_steps")
    with pytest.raises(BadInputError, match="no argument of the script names this file"):
        apply(["--x"], [mapped], {"gradient_accumulation": 2}, tmp_path / "copy")


def test_deepspeeds_preset_finds_the_file(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 1}}')
    known = preset("deepspeed", ["--epochs", "3", f"--deepspeed={file}"])
    values = {mapped.name: current([], mapped) for mapped in known.maps}
    assert values == {"micro_batch": 8, "gradient_accumulation": 1, "zero_stage": 1}
    with pytest.raises(BadInputError, match="--map-file"):
        preset("deepspeed", ["--epochs", "3"])


@pytest.mark.parametrize("text", ["micro_batch", "=--x", "a b=--x", "micro_batch="])
def test_a_wrong_map_is_refused(text):
    with pytest.raises(BadInputError, match="NAME=ARGUMENT"):
        parse_map(text)


@pytest.mark.parametrize("name", ["hf-trainer", "lightning", "accelerate"])
def test_presets_silence_loggers_and_no_checkpoints(name):
    """Scripts fail without them, as with load_best_model_at_end or ckpt_path="best"."""
    words = " ".join(preset(name, []).silence)
    silenced = ("save", "checkpoint", "load_best", "limit_val", "eval_")
    assert not any(word in words for word in silenced)
    assert name == "accelerate" or "report_to none" in words or "logger=false" in words
