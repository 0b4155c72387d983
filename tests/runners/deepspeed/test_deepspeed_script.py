"""A DeepSpeed script as ``perfsearch-run`` is given it: no launcher, presets and maps beside it."""

import json
import sys
from pathlib import Path

import pytest
from support.deepspeed_cases import LAUNCH

from perfsearch.cli.run import check, runner_for, split, tuned
from perfsearch.core.errors import BadInputError
from perfsearch.knobs.transport import KnobFile, read_knobs
from perfsearch.runners.base import Plan
from perfsearch.runners.deepspeed.command import Command
from perfsearch.runners.deepspeed.job import command_of, names_configuration

FILE = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
TORCHRUN = (sys.executable, "-P", "-m", "torch.distributed.run", "--nproc-per-node=2")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"command": ["train.py", "--x", "a b"]}, ["train.py", "--x", "a b"]),
        ({"command": "train.py --x 'a b'"}, ["train.py", "--x", "a b"]),
        ({"command": ["pkg.train", "-x"], "module": True}, ["-m", "pkg.train", "-x"]),
    ],
)
def test_a_script_alone_is_started_as_torchrun_does(options, words):
    command, path = command_of(options, None, 2)
    assert command.words == (*TORCHRUN, *words)
    assert (command.ranks(), path) == (2, None)


def test_a_launcher_stays_and_is_no_module():
    command, path = command_of(
        {"command": "deepspeed --num_gpus 3 t.py --deepspeed d.json"}, None, 2
    )
    assert (command.launcher, command.ranks(), path) == ("deepspeed", 3, Path("d.json"))
    with pytest.raises(BadInputError, match="deepspeed is a launcher"):
        command_of({"command": ["deepspeed", "t.py"], "module": True}, None, 2)


def test_the_configuration_is_found_under_any_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(json.dumps(FILE))
    key = "ds.json:train_micro_batch_size_per_gpu"
    for options in (
        {"command": ["t.py", "--ds", "./ds.json"], "map_file": [key]},
        {"command": ["t.py", "--ds=./ds.json"], "map_file": [key]},
        {"command": ["t.py", "--ds", "ds.json"], "preset": "deepspeed"},
    ):
        command, path = command_of(options, None, 2)
        assert path == Path("ds.json")
        made = command.for_trial(Path("/r/new.json"), {}, None)
        assert made[-1].rpartition("=")[2] == "/r/new.json"
        assert names_configuration(options)
    assert not names_configuration({"command": ["t.py", "--ds", "ds.json"]})
    assert Command.parse([*TORCHRUN, "t.py", "--ds", "ds.json"]).config_path is None


def test_map_file_has_its_key_searched(deepspeed_job):
    runner, _ = deepspeed_job(
        FILE,
        workload={"map_file": ["ds.json:zero_optimization.overlap_comm"]},
        runner={"knobs": {"zero_stage": [1, 2], "overlap_comm": "configured", "micro_batch": 4}},
    )
    assert set(runner.space.by_name) == {"zero_stage", "overlap_comm"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("micro_batch=other.json:train_micro_batch_size_per_gpu", "writes ds.json alone"),
        ("lr=ds.json:optimizer.params.lr", "knows optimizer.params.lr under no name"),
        ("batch=ds.json:train_micro_batch_size_per_gpu", "under the name micro_batch"),
    ],
)
def test_what_map_file_cannot_ask_for_is_refused(deepspeed_job, text, words):
    Path("other.json").write_text(json.dumps(FILE))
    with pytest.raises(BadInputError, match=words):
        deepspeed_job(FILE, workload={"map_file": [text]})


def test_map_is_arg_mappings(deepspeed_job):
    runner, _ = deepspeed_job(
        FILE, "t.py --bs=4 --deepspeed_config ds.json", workload={"map": ["micro_batch=--bs"]}
    )
    assert runner.mappings == {"train_micro_batch_size_per_gpu": "--bs"}


def test_presets_silence_trials(deepspeed_job, tmp_path):
    runner, _ = deepspeed_job(FILE, workload={"preset": "hf-trainer"})
    whole = {**runner.pinned, **runner.baseline}
    start = runner._start(whole, Plan(0, log_directory=tmp_path / "logs"), survive=False)
    assert start.words[-2:] == ["--disable_tqdm", "True"]
    quiet, _ = deepspeed_job(FILE, workload={"preset": "deepspeed"})
    assert quiet.silence == ()
    with pytest.raises(BadInputError, match="no such preset"):
        deepspeed_job(FILE, workload={"preset": "hf"})


# ---- what perfsearch-run makes of it


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import deepspeed\n")
    Path("ds.json").write_text(json.dumps({**FILE, "zero_optimization": {"stage": 1}}))
    return "train.py"


@pytest.mark.parametrize(
    ("before", "after", "runner"),
    [
        ([], ["--deepspeed_config", "ds.json"], "deepspeed"),
        ([], ["--deepspeed", "--deepspeed_config=ds.json"], "deepspeed"),
        (["--preset", "deepspeed"], ["--ds", "ds.json"], "deepspeed"),
        (["--map-file", "ds.json:zero_optimization.stage"], ["--ds", "ds.json"], "deepspeed"),
        (["-o", "runner.ds_config=ds.json"], [], "deepspeed"),
        ([], ["--deepspeed"], "ddp"),
        ([], ["--ds", "ds.json"], "ddp"),
    ],
)
def test_the_runner_is_deepspeed_where_its_configuration_is_known(
    script, capsys, before, after, runner
):
    assert runner_for(split(["--search", *before, script, *after])) == runner
    assert ("runner.ds_config=FILE" in capsys.readouterr().err) == (runner == "ddp")


def asked(*words):
    made = split([*words])
    check(made)
    return made


def test_knobs_of_a_deepspeed_search_go_into_a_copy_of_the_configuration(script, tmp_path):
    found = KnobFile({"zero_stage": 2, "micro_batch": 8, "overlap_comm": True}, runner="deepspeed")
    start = asked("--nproc-per-node=2", "--knobs", "k.yaml", script, "--ds", "ds.json", "--x", "{}")
    start.map_files.append("ds.json:train_micro_batch_size_per_gpu")
    arguments, told, given = tuned(found, start, tmp_path / "copy")
    assert arguments[:1] + arguments[2:] == ["--ds", "--x", "{}"]
    made = json.loads(Path(arguments[1]).read_text())
    assert made["zero_optimization"] == {"stage": 2, "overlap_comm": True}
    assert (made["train_micro_batch_size_per_gpu"], made["gradient_accumulation_steps"]) == (8, 1)
    assert told["zero_stage"] == "ds.json:zero_optimization.stage=2"
    assert given["gradient_accumulation"] == 1
    assert json.loads(Path("ds.json").read_text())["zero_optimization"] == {"stage": 1}


@pytest.mark.parametrize(
    ("knobs", "arguments", "words"),
    [
        ({"micro_batch": 8}, [], "no argument of the script names a DeepSpeed"),
        ({"micro_batch": 3}, ["--deepspeed_config", "ds.json"], "does not divide the 8 samples"),
    ],
)
def test_knobs_that_cannot_reach_the_configuration_are_refused(
    script, tmp_path, knobs, arguments, words
):
    start = asked("--nproc-per-node=2", "--knobs", "k.yaml", script, *arguments)
    with pytest.raises(BadInputError, match=words):
        tuned(KnobFile(knobs, runner="deepspeed"), start, tmp_path)


def test_what_a_search_has_written_is_read(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(
        "runner: {name: deepspeed, ds_config: d.json, knobs: {zero_stage: 1}}\n"
        "workload: {name: script, preset: deepspeed}\nbatch: free\n"
    )
    workload = {"name": "script", "preset": "deepspeed"}
    assert read_knobs(str(file)) == KnobFile(
        {"zero_stage": 1}, workload, "deepspeed", "free", "d.json"
    )


def test_the_command_of_a_search_is_taken_as_the_user_wrote_it(deepspeed_job):
    runner, _ = deepspeed_job(FILE, command=["train.py", "--deepspeed_config", "ds.json"], nproc=2)
    wanted = LAUNCH.replace("node 2", "node=2").replace(" -m ", " -P -m ")
    assert " ".join(runner.command.words).startswith(wanted)


def test_a_launcher_is_no_script(script):
    with pytest.raises(BadInputError, match="deepspeed: a launcher, and perfsearch-run starts"):
        asked("--search", "deepspeed", "--num_gpus", "2", script)
