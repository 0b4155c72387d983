"""What a search over a script hands over."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from perfsearch.cli.run import split, workload
from perfsearch.core.hardware import Environment
from perfsearch.knobs.transport import Mapped
from perfsearch.runners._script import export
from perfsearch.runners._script.runner import Script
from perfsearch.runners._script.ways import Way

MAPS = [Mapped("micro_batch", "--bs"), Mapped("gradient_accumulation", "--acc", default=1)]


def test_the_hand_over_is_a_command_and_the_lines_to_change(tmp_path):
    changed = {
        "bucket_cap_mb": 100.0, "dataloader_workers": 2, "optimizer_implementation": "fused",
        "micro_batch": 4, "gradient_accumulation": 2, "nccl_algo": "Ring", "zero_stage": 2,
        "fsdp_backward_prefetch": "post",
    }  # fmt: skip
    files = export.export_files(
        changed, MAPS, Way(4, by_torchrun=True), 1, ["train.py", "--bs", "8", "it's"], False,
        ["ddp"],
        tmp_path,
    )  # fmt: skip
    assert {f.name for f in files} == {"run.sh", "changes.py", "start.py"}
    script = (tmp_path / "run.sh").read_text()
    assert "export NCCL_ALGO=Ring" in script
    command = 'torchrun --standalone --nproc-per-node=4 "$(dirname "$0")/start.py" train.py --bs 4'
    assert f"{command} 'it'\"'\"'s' --acc 2" in script
    lines = (tmp_path / "changes.py").read_text()
    for piece in ("bucket_cap_mb=100.0", "num_workers=2", "fused=True", "BACKWARD_POST",
                  "reshard_after_forward=False"):  # fmt: skip
        assert piece in lines
    for name in ("changes.py", "start.py"):
        compile((tmp_path / name).read_text(), name, "exec")


def test_what_only_the_first_steps_have_shown_is_said(tmp_path):
    changed = {"static_graph": True, "find_unused_parameters": False, "bucket_cap_mb": 8.0}
    graph, unused = export.promises(changed)
    assert graph.startswith("static_graph=true promises that every step uses the same parameters")
    assert unused.startswith("find_unused_parameters=false promises") and "'~runner" in unused
    way = Way(2, by_torchrun=True)
    export.export_files(changed, [], way, 1, ["train.py"], False, ["ddp"], tmp_path)
    assert f"# {graph}\n# {unused}\n" in (tmp_path / "changes.py").read_text()
    assert not export.promises({"static_graph": False, "find_unused_parameters": True})


def test_without_anything_to_build_differently_the_command_is_the_hand_over(tmp_path):
    way = Way(2, by_torchrun=True)
    changed = {"micro_batch": 2}
    files = export.export_files(changed, MAPS, way, 3, ["pkg.t"], True, [], tmp_path)
    assert [f.name for f in files] == ["run.sh"]
    assert (tmp_path / "run.sh").read_text() == (
        "#!/bin/sh\nexport OMP_NUM_THREADS=3\n"
        "torchrun --standalone --nproc-per-node=2 -m pkg.t --bs 2\n"
    )


@pytest.mark.parametrize(("today", "exported"), [(None, ""), ("3", "export OMP_NUM_THREADS=3\n")])
def test_threads_are_set_where_the_job_itself_sets_them(today, exported, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if today is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", today)
    script = tmp_path / "train.py"
    script.touch()
    runner = Script("cpu", {}, Script.Options((str(script),)), Environment(tmp_path, nproc=2))
    runner.export(runner.baseline, tmp_path / "apply")
    assert (tmp_path / "apply" / "run.sh").read_text() == (
        f"#!/bin/sh\n{exported}torchrun --standalone --nproc-per-node=2 {script}\n"
    )


def test_threads_are_set_where_the_search_has_found_others(tmp_path):
    changed = {"omp_num_threads": 2}
    export.export_files(
        changed, [], Way(2, by_torchrun=True), None, ["train.py"], False, [], tmp_path
    )
    assert "export OMP_NUM_THREADS=2\n" in (tmp_path / "run.sh").read_text()


@pytest.mark.parametrize(
    ("changed", "module", "last"),
    [
        ({"micro_batch": 2}, False, "python train.py --bs 2"),
        ({"micro_batch": 2}, True, "python -m train.py --bs 2"),
        ({"pin_memory": True}, True, 'python "$(dirname "$0")/start.py" train.py'),
    ],
)
def test_a_script_of_one_process_is_handed_over_as_one(changed, module, last, tmp_path):
    way = Way(1, by_torchrun=False)
    export.export_files(changed, MAPS, way, 1, ["train.py"], module, [], tmp_path)
    assert (tmp_path / "run.sh").read_text().splitlines()[-1] == last


def test_arguments_come_back_from_the_written_configuration(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    odd = ["--lr=1e-3", "1e-3", "a,b", "{}", "true", "it's", "", "0x1f", "null"]
    given = workload(split(["--search", "--map", "micro_batch=--bs", str(script), *odd]))
    back = yaml.safe_load(yaml.safe_dump(given))
    options = Script.Options(tuple(back["command"]), map=tuple(back["map"]))
    assert options.words == [str(script), *odd]
    assert options.maps() == ([Mapped("micro_batch", "--bs")], [])


def test_offloading_is_handed_over_with_a_group_for_both_memories(tmp_path):
    changed = {"cpu_offload": True, "forward_prefetch": 1, "zero_stage": 3}
    export.export_files(
        changed, [], Way(4, by_torchrun=True), 1, ["train.py"], False, ["fully_shard"],
        tmp_path,
    )  # fmt: skip
    lines = (tmp_path / "changes.py").read_text()
    for piece in ("CPUOffloadPolicy", "cpu:gloo,cuda:nccl", "[the next 1]",
                  '"reshard_after_forward": true, "cpu_offload": true'):  # fmt: skip
        assert piece in lines
    program = (tmp_path / "start.py").read_text()
    compile(program, "start.py", "exec")
    assert "cpu:gloo,cuda:nccl" in program and "CPUOffloadPolicy" in program


OF_MODELS = """
import json, sys
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 3), nn.Flatten())
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(64, 1)

    def forward(self, images):
        return self.head(self.blocks(self.body(images)))

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.Adam(net.parameters())
for step in range(4):
    net(torch.randn(2, 3, 8, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dynamo = sys.modules.get("torch._dynamo.utils")
print("FOUND", json.dumps({
    "last": net.body[2].weight.is_contiguous(memory_format=torch.channels_last),
    "graphs": dynamo.counters["stats"]["unique_graphs"] if dynamo else 0,
    "compiled": sum(m._compiled_call_impl is not None for m in net.modules()),
    "attention": torch.backends.cuda.flash_sdp_enabled(),
    "hooks": sum(len(m._forward_pre_hooks) for m in net.modules()),
}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"channels_last": True}, {"last": True, "graphs": 0}),
        (
            {"channels_last": True, "compile_mode": "default"},
            {"last": True, "graphs": 1, "compiled": 1},
        ),
        (
            {"compile_mode": "default", "compile_scope": "blocks"},
            {"last": False, "graphs": 1, "compiled": 2},
        ),
        ({"attention_backend": "math"}, {"last": False, "attention": False}),
    ],
)
def test_what_becomes_of_a_model_is_handed_over(changed, found, tmp_path):
    (tmp_path / "train.py").write_text(OF_MODELS)
    way = Way(1, by_torchrun=False)
    command = [str(tmp_path / "train.py")]
    export.export_files(changed, [], way, 1, command, False, [], tmp_path / "apply")
    done = subprocess.run(
        [sys.executable, tmp_path / "apply" / "start.py", *command],
        cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.partition("FOUND ")[2])
    assert {name: said[name] for name in found} == found and said["hooks"] == 0
    lines = (tmp_path / "apply" / "changes.py").read_text()
    assert ("channels_last" in lines) == ("channels_last" in changed)
    whole = "compile_mode" in changed and "compile_scope" not in changed
    assert ("# model = torch.compile(model)" in lines) == whole
    assert ("#     block.compile()" in lines) == ("compile_scope" in changed)


def test_no_file_holds_a_secret_and_the_command_still_runs(tmp_path):
    (tmp_path / "show.py").write_text("import sys\nprint(sys.argv[1:])\n")
    command = [str(tmp_path / "show.py"), "--token=a9SECRET", "--api_key", "b9SECRET", "--lr=1"]
    way = Way(1, by_torchrun=False)
    apply = tmp_path / "apply"
    export.export_files({"bucket_cap_mb": 4.0}, [], way, 1, command, False, ["ddp"], apply)
    assert all("SECRET" not in file.read_text() for file in apply.iterdir())
    done = subprocess.run(
        [str(apply / "run.sh")],
        env={**os.environ, "TOKEN": "a9SECRET", "API_KEY": "b9SECRET"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == str(command[1:]), done.stderr
