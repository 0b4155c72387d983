"""What is asked of `perfsearch-run --search`: the runner that it calls for, and refusals."""

import re

import pytest

from perfsearch.cli.run import as_search, runner_for, search, split
from perfsearch.config.schema import MetricsSettings
from perfsearch.core.errors import BadInputError
from perfsearch.core.hardware import Environment
from perfsearch.instrument.facts import Facts
from perfsearch.runners._script.runner import Script, TimingOptions

FACTS = {"values": {"dataloader_workers": 0}}


@pytest.mark.parametrize(
    ("source", "arguments", "runner"),
    [
        ("from torch.distributed.fsdp import fully_shard", [], "zero"),
        ("from torch.nn.parallel import DistributedDataParallel", [], "ddp"),
        ("from transformers import Trainer", ["--fsdp", "full_shard"], "zero"),
        ("print()", [], "ddp"),
    ],
)
def test_the_runner_is_what_the_script_calls_for(tmp_path, source, arguments, runner):
    script = tmp_path / "train.py"
    script.write_text(source)
    assert runner_for(split(["--search", str(script), *arguments])) == runner


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--nnodes=1:2"], "a search is of one number of nodes. Give --nnodes=2"),
        (["--nnodes=few"], "--nnodes=few"),
        (["--rdzv-endpoint=a:1"], "--rdzv-endpoint --search"),
        (["--nnodes=2", "--node-rank=1"], "--node-rank --search"),
        (["-o", "workload.command=[x]"], "stand after it"),
    ],
)
def test_what_a_search_cannot_honour_is_refused(tmp_path, options, says):
    (tmp_path / "train.py").write_text("")
    with pytest.raises(BadInputError, match=says):
        search(split(["--search", *options, str(tmp_path / "train.py")]))


def test_a_profile_is_a_search_in_its_mode(tmp_path, monkeypatch):
    from perfsearch.cli import search as cli

    script = tmp_path / "train.py"
    script.write_text("")
    asked = []
    monkeypatch.setattr(cli, "main", lambda overrides, groups: asked.append(overrides) or 0)
    assert search(split(["--profile", "-o", "seed=3", "--nproc-per-node=2", str(script)])) == 0
    assert {"workload=script", "mode=profile", "runner=ddp", "seed=3", "nproc=2"} <= set(asked[0])
    with pytest.raises(BadInputError, match="--profile is -o mode=profile"):
        search(split(["--profile", "-o", "mode=search", str(script)]))


def test_options_on_several_nodes_are_keys_of_the_launcher(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text("")
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)

    def words(*options):
        return set(as_search(split(["--search", *options, str(script)]))[0])

    meeting = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=a:1"]
    assert {"nnodes=2", "launcher=torchrun", "launcher.endpoint='a:1'"} <= words(*meeting)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    assert "launcher=slurm" in words("--nnodes=2")
    assert "launcher=torchrun" in words(*meeting)
    assert "launcher=slurm" not in words("--nnodes=2", "-o", "launcher=torchrun")


@pytest.mark.parametrize(
    ("timings", "on_gpu", "facts", "says"),
    [
        ({"min_gain": 0.9, "staged": True}, False, Facts(**FACTS), []),
        ({"min_gain": 0.03}, True, Facts(**FACTS), []),
        ({"min_gain": 0.9, "searches": False}, True, Facts(**FACTS), []),
        ({"min_gain": 0.9}, True, Facts(**FACTS), ["objective.min_gain=0.9 .*ahead of the GPU"]),
        ({"staged": True}, False, Facts(["ddp"], **FACTS), ["runner.knobs=auto .*amid the back"]),
        (
            {"staged": True, "min_gain": 0.1},
            False,
            Facts(values={"dataloader_workers": 2}),
            ["runner.knobs=auto .*processes of its", "objective.min_gain=0.1 .*processes of its"],
        ),
        (
            {"metrics": MetricsSettings(detail="full", begin_step=5, end_step=9)},
            False,
            None,
            ["metrics.detail=full ", "metrics.begin_step=5 ", "metrics.end_step=9 "],
        ),
    ],
)
def test_keys_without_effect_are_named_once(timings, on_gpu, facts, says):
    told = TimingOptions(**timings).remarks(on_gpu, facts)
    assert len(told) == len(says)
    for line, pattern in zip(told, says, strict=True):
        assert re.match(f"warning: .*{pattern}", line), line


def test_a_missing_script_is_bad_input(tmp_path):
    with pytest.raises(BadInputError, match="there is no such script"):
        Script.Options((str(tmp_path / "missing.py"),))
    with pytest.raises(BadInputError, match="give the script"):
        Script.Options(())


def test_what_a_script_sends_out_of_reach_is_named_before_a_start(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import wandb")
    environment = Environment(tmp_path, nproc=1)
    made = Script("cpu", {}, Script.Options((str(script),)), environment)
    assert [line.partition(":")[0] for line in made.cautions] == ["the script may use wandb"]
    script.write_text("import torch")
    assert Script("cpu", {}, Script.Options((str(script),)), environment).cautions == []
