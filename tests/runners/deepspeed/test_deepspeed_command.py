"""The launch command of a DeepSpeed job."""

import shlex
from pathlib import Path

import pytest

from perfsearch.cli.run import as_search, split
from perfsearch.config.schema import validate
from perfsearch.core.errors import BadInputError
from perfsearch.pipeline.search import build_runner
from perfsearch.runners.deepspeed.command import Command


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


INSTEAD = "perfsearch-run --search --nnodes N -o runner=ddp SCRIPT"


def test_several_hosts_are_refused_with_what_to_do_instead(tmp_path, monkeypatch):
    """Whoever starts them: the command's own launcher, or torchrun's options."""
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=4\nb slots=4\n")
    hostfile = f"deepspeed --hostfile {hosts} t.py"
    for line, says in (
        (hostfile, "lists 2 hosts"),
        ("deepspeed --include h1@h2 t.py", "--include h1@h2: runner=deepspeed starts ranks on one"),
        ("torchrun --nnodes=2 t.py", "--nnodes 2: runner=deepspeed starts ranks on one"),
        ("accelerate launch --num_machines 2 t.py", "--num_machines 2: runner=deepspeed"),
    ):
        with pytest.raises(BadInputError, match=says) as refused:
            Command.parse(line).ranks()
        assert INSTEAD in str(refused.value)
    monkeypatch.chdir(tmp_path)
    Path("t.py").write_text("import deepspeed")
    Path("a.json").write_text("{}")
    words, groups = as_search(
        split(["--search", "--nnodes=2", "t.py", "--deepspeed_config", "a.json"])
    )
    assert "runner=deepspeed" in words
    asked = {"runner": {"name": "deepspeed"}, "nnodes": 2, "launcher": {"name": "torchrun"}}
    asked["strategy"] = {"name": "random"}
    with pytest.raises(
        BadInputError, match="nnodes=2: runner=deepspeed runs on one node"
    ) as refused:
        build_runner(validate({**asked, "workload": {"name": "script", **groups["workload"]}}))
    assert INSTEAD in str(refused.value)
    # which is taken, and then the ranks are those of any other script
    taken = ["--search", "--nnodes=2", "-o", "runner=ddp", "t.py", "--deepspeed_config", "a.json"]
    assert {"runner=ddp", "nnodes=2", "launcher=torchrun"} <= set(as_search(split(taken))[0])
