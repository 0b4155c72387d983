import dataclasses
import sys

import pytest
from torch.distributed import run as torchrun

from perfsearch.cli import run
from perfsearch.cli.run import split
from perfsearch.core.errors import BadInputError
from perfsearch.instrument.launch import ENTRY, VARIABLE, python_arguments
from perfsearch.online import AutotuneOptions

ODD = ["--", "--lr=1e-3", "--data", "a,b", "k={}", "it's", '"', "", " ", "--search", "-o", "\udcff"]


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--nproc-per-node", "2"],
        ["--nproc_per_node=2", "--standalone"],
        ["--nproc-per-node=2", "--rdzv-conf", "a=1,b=2", "-r", "3", "-t3"],
        ["--search", "-o", "budget.trials=3", "--map", "micro_batch=--bs", "--nnodes", "1:2"],
        ["--autotune-warmup-samples", "3", "--autotune", "--nproc-per", "2"],
    ],
)
def test_everything_after_the_script_is_its_own(options):
    asked = split([*options, "train.py", *ODD])
    assert (asked.script, asked.arguments) == ("train.py", ODD)
    assert "train.py" not in asked.torchrun


def test_options_are_told_apart():
    asked = split(
        [
            "--nnodes=2",
            "--search",
            "-m",
            "-o",
            "a=b=c",
            "-o",
            "x=1",
            "--max-restarts",
            "3",
            "pkg.train",
        ]
    )
    assert asked.search and asked.overrides == ["a=b=c", "x=1"]
    assert asked.torchrun == ["--nnodes=2", "-m", "--max-restarts", "3"]
    assert asked.parsed.module and asked.parsed.max_restarts == 3


def test_autotune_options_imply_it():
    asked = split(["--autotune-max-samples=5", "--retune-on-drift", "t.py"])
    assert asked.autotune == {"max_samples": 5, "retune_on_drift": True}
    assert split(["--autotune", "t.py"]).autotune == {}
    assert split(["t.py"]).autotune is None
    narrowed = split(["--autotune-knobs", "bucket_cap_mb=[8, 25]", "t.py"]).autotune
    assert narrowed == {"knobs": {"bucket_cap_mb": [8, 25]}}


BATCH_OF_A_SEARCH = """
runner: {name: ddp, knobs: {micro_batch: 32, gradient_accumulation: 1}}
workload: {name: script, map: [micro_batch=--bs, gradient_accumulation=--accumulate]}
"""


def test_every_option_of_tuning_is_an_option_of_the_command():
    """By the defaults of the dataclass, as the page on tuning promises."""
    for field in dataclasses.fields(AutotuneOptions):
        option = f"--autotune-{field.name.replace('_', '-')}"
        value = {"knobs": "a=1", "numerics": "exact", "log_file": "a.csv"}.get(field.name, "1")
        words = [option] if field.type == "bool" else [option, value]
        assert set(split([*words, "t.py"]).autotune) == {field.name}, option
    assert split(["--autotune-retune-on-drift", "t.py"]).autotune == {"retune_on_drift": True}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--search"], "no script"),
        (["--serach", "t.py"], "--serach is no option"),
        (["--nproc-per-node"], "a value is missing"),
        (["--max-restarts=x", "t.py"], "invalid int value"),
        (["--rdzv", "t.py"], "fits several options"),
    ],
)
def test_wrong_options_are_named(arguments, says):
    with pytest.raises(BadInputError, match=says):
        split(arguments)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["missing.py"], "missing.py: no such script"),
        (["train"], "There is train.py"),
        (["notebook.ipynb"], "jupyter nbconvert"),
        (["--search", "--knobs", "x.yaml", "train.py"], "one at a time"),
        (["--search", "--profile", "train.py"], "--search --profile: one at a time"),
        (["--profile", "--autotune", "train.py"], "--profile --autotune: one at a time"),
        (["--no-python", "--profile", "bash"], "only a Python script"),
        (["-o", "a=1", "train.py"], "belongs to --search"),
        (["--no-python", "--search", "bash"], "only a Python script"),
        (["--knobs", "missing.yaml", "train.py"], "missing.yaml"),
        (["--knobs", "search.yaml", "train.py"], "no single value"),
        (["--knobs", "broken.yaml", "train.py"], "broken.yaml is not valid: line 2, column 1: "),
        (["--knobs", "wrong.yaml", "train.py"], "wrong.yaml: bucket_cap_mb=x: allowed is a number"),
        (["--knobs", "soap/config.yaml", "train.py"], "strategy.yaml"),
        (
            ["--knobs", "good.yaml", "-o", "budget.trials=3", "train.py"],
            "-o runner.knobs.NAME=VALUE",
        ),
        (
            ["--knobs", "good.yaml", "-o", "runner.knobs.a=[1,2]", "train.py"],
            "a single value is needed",
        ),
        (
            ["--knobs", "good.yaml", "-o", "runner.knobs.bucket_cap=1", "train.py"],
            "mean 'bucket_cap_mb'",
        ),
        (
            ["--knobs", "good.yaml", "-o", "runner.knobs.bucket_cap_mb=x", "train.py"],
            "-o runner.knobs.b",
        ),
        (["--map", "micro_batch=--nope", "train.py"], "--map: it belongs to --search"),
        (["--map-file", "a.json:b", "--autotune", "train.py"], "--map-file: it belongs to"),
        (["--search", "."], ".: a directory, and a script is needed"),
        (["soap"], "soap: a directory"),
        (["--autotune-freeze", "train.py", "train.py"], "train.py: it is no log of tuning"),
        (["--autotune-start-from", "train.py", "train.py"], "train.py: it is no log of tuning"),
        (["--autotune-knobs", "bucket_cap_mb=-1", "train.py"], "autotune.knobs.bucket_cap_mb=-1: "),
        (["--autotune-knobs", "bucket_cap_mb=abc", "train.py"], "allowed is 0.0625 to 512 MiB"),
        (["--autotune-knobs", "bucket_cap_mb=[]", "train.py"], "a list needs at least one choice"),
        (["--autotune-knobs", "bucket_cap_mb=[1", "train.py"], "bucket_cap_mb=[1: not a list"),
        (["--autotune-numerics", "wild", "train.py"], "autotune.numerics=wild"),
        (["--autotune-seed", "-1", "train.py"], "autotune.seed=-1"),
        (["--map", "x", "--search", "train.py"], "NAME=ARGUMENT"),
        (["--map", "a=--x", "--map", "a=--y", "--search", "train.py"], "mapped twice"),
    ],
)
def test_bad_input_ends_with_2_and_the_way_out(arguments, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise AssertionError('it was started')")
    (tmp_path / "notebook.ipynb").write_text("{}")
    (tmp_path / "search.yaml").write_text("runner: {knobs: {bucket_cap_mb: [1, 2]}}")
    (tmp_path / "good.yaml").write_text("bucket_cap_mb: 8\n")
    (tmp_path / "wrong.yaml").write_text("bucket_cap_mb: x\n")
    (tmp_path / "soap").mkdir()
    (tmp_path / "soap" / "config.yaml").write_text("runner: {name: soap, knobs: {}}")
    (tmp_path / "broken.yaml").write_text("runner: {knobs: [1\n")
    assert run.main(arguments) == 2
    told = capsys.readouterr().err
    assert says in told
    assert told.count("\n") == 1


def test_help_and_version(capsys):
    assert run.main(["--help"]) == 0
    assert "--autotune-steps-per-sample" in capsys.readouterr().out
    assert run.main(["--version"]) == 0
    assert run.main([]) == 2


@pytest.mark.parametrize(
    "options", [[], ["--autotune"], ["--knobs", "knobs.json"], ["--no-python"]]
)
def test_torchruns_parser_never_sees_the_scripts_arguments(options, tmp_path, monkeypatch):
    started = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "")  # put back afterwards
    monkeypatch.setattr(torchrun, "run", started.append)
    (tmp_path / "train.py").touch()
    (tmp_path / "knobs.json").write_text("{}")
    words = ["--log", "x", "--nproc", "-m", "--", "--rdzv", *ODD]  # --log: --log-dir or --log_dir?
    assert run.main(["--nproc-per-node", "2", *options, "train.py", *words]) == 0
    plain = options == ["--no-python"]
    python = [*python_arguments(), "-m", ENTRY]
    assert started[0].training_script == ("train.py" if plain else sys.executable)
    assert started[0].training_script_args == (words if plain else [*python, "train.py", *words])
    assert (started[0].nproc_per_node, started[0].module) == ("2", False)


@pytest.mark.parametrize(
    ("changes", "given"),
    [
        ([], "--bs 32 --accumulate 1"),
        (["micro_batch=8"], "--bs 8 --accumulate 4"),
        (["micro_batch=8", "gradient_accumulation=2"], "--bs 8 --accumulate 2"),
        (["gradient_accumulation=2"], "--bs 32 --accumulate 2"),
    ],
)
def test_a_step_keeps_its_samples_unless_both_are_named(changes, given, tmp_path, monkeypatch):
    started = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "")  # put back afterwards
    monkeypatch.setattr(torchrun, "run", started.append)
    (tmp_path / "train.py").touch()
    (tmp_path / "config.yaml").write_text(BATCH_OF_A_SEARCH)
    options = [word for change in changes for word in ("-o", f"runner.knobs.{change}")]
    script = ["train.py", "--bs", "4", "--accumulate", "8"]
    assert run.main(["--nproc-per-node=2", "--knobs", "config.yaml", *options, *script]) == 0
    assert " ".join(started[0].training_script_args).endswith(f"train.py {given}")


def test_a_micro_batch_that_does_not_divide_a_steps_samples_is_refused(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "config.yaml").write_text(BATCH_OF_A_SEARCH)
    options = ["--knobs", "config.yaml", "-o", "runner.knobs.micro_batch=5"]
    assert run.main([*options, "train.py"]) == 2
    told = capsys.readouterr().err
    assert "allowed: what divides the 32 samples" in told and told.count("\n") == 1


def test_options_that_a_search_found_are_found_again(tmp_path, monkeypatch):
    started = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "")  # put back afterwards
    monkeypatch.setattr(torchrun, "run", started.append)
    (tmp_path / "train.py").write_text(
        'parser.add_argument("--bs", default=4)\nparser.add_argument("--accumulate", default=8)\n'
    )
    (tmp_path / "config.yaml").write_text(BATCH_OF_A_SEARCH.replace(", map:", ", more:"))
    assert run.main(["--nproc-per-node=2", "--knobs", "config.yaml", "train.py", "--lr", "1"]) == 0
    given = " ".join(started[0].training_script_args)
    assert given.endswith("train.py --lr 1 --bs 32 --accumulate 1")
