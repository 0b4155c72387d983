"""What a search hands over works where perfsearch is not installed: ``best/apply/`` alone."""

import json
import os
import re
import subprocess
import sys

import pytest

from perfsearch.core.hardware import Environment
from perfsearch.runners._script import export
from perfsearch.runners._script.ways import Way
from perfsearch.runners.ddp.runner import DDP
from perfsearch.runners.zero.runner import Zero
from perfsearch.workloads.spec import WorkloadSpec

pytestmark = pytest.mark.slow

SCRIPT = """
import json, os, sys
try:
    import perfsearch
except ImportError as error:
    assert "blocked" in str(error), error
else:
    raise AssertionError("perfsearch can be imported")
import torch
import torch.distributed as dist

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 256
    def __getitem__(self, i):
        x = torch.randn(64, generator=torch.Generator().manual_seed(i + 256 * dist.get_rank()))
        return x, x.sum()

dataset = Data()
loader = torch.utils.data.DataLoader(dataset, batch_size=8)
dist.init_process_group("gloo")
found = []
def loss_of(model, batch):
    return (model(batch[0]).squeeze(1) - batch[1]).square().mean()
def make_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)
"""

MODEL = """
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)], torch.nn.Linear(64, 1))
"""

PLAIN_DDP = """
optimizer = make_optimizer(model.parameters())
model = torch.nn.parallel.DistributedDataParallel(model)
"""

TRAINS = """
losses = []
for batch in loader:
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
losses = torch.stack(losses)
dist.all_reduce(losses)
caps = list(getattr(model, "bucket_bytes_cap_list", [])) or [model.bucket_bytes_cap]
found.append({
    "losses": (losses / dist.get_world_size()).tolist(),
    "caps_mb": [c / 2**20 for c in caps],
    "view": model.gradient_as_bucket_view,
    "hooks": len(model._comm_hooks),
    "optimizer": [optimizer.param_groups[0][n] for n in ("foreach", "fused")],
    "threads": torch.get_num_threads(),
    "workers": loader.num_workers,
})
"""

ZERO_TRAINS = """
sys.path.insert(0, os.path.join(os.environ["APPLY"], "{stage}"))
sys.modules.pop("zero", None)
import zero
model, optimizer = zero.build(model, list(model), make_optimizer)
losses, batches = [], iter(loader)
def recorded(net, batch):
    loss = loss_of(net, batch)
    losses.append(loss.detach())
    return loss
for _ in range(16):
    zero.train_step(model, optimizer, recorded, [next(batches) for _ in range(2)])
losses = torch.stack(losses)
dist.all_reduce(losses)
found.append({{"losses": (losses / dist.get_world_size()).tolist()}})
"""

ACCUMULATES = """
losses = []
for number, batch in enumerate(loader):
    loss = loss_of(model, batch)
    losses.append(loss.detach())
    (loss / 2).backward()
    if number % 2:
        optimizer.step()
        optimizer.zero_grad()
losses = torch.stack(losses)
dist.all_reduce(losses)
found.append({"losses": (losses / dist.get_world_size()).tolist()})
"""

ENDS = """
if dist.get_rank() == 0:
    print("FOUND", json.dumps(found))
dist.barrier()
sys.stdout.flush()
os._exit(0)  # torch's own threads now and then abort a process that takes them down
"""


def without_perfsearch(directory):
    """A directory that blocks perfsearch as part of a path, and in which torchrun is this one's."""
    place = directory / "without"
    place.mkdir(exist_ok=True)
    (place / "perfsearch.py").write_text("raise ImportError('blocked')\n")
    launcher = place / "torchrun"
    launcher.write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    launcher.chmod(0o755)
    return place


def run(script, apply, directory, nproc):
    """Start a script by the command that was handed over, with perfsearch blocked."""
    (directory / "train.py").write_text(script)
    blocked = without_perfsearch(directory)
    text = "" if apply is None else (apply / "env.sh").read_text()
    match = re.search(r"^#\s+(torchrun .*train\.py)$", text, re.MULTILINE)
    command = (
        match.group(1) if match else f"torchrun --standalone --nproc-per-node={nproc} train.py"
    )
    source = f". {apply / 'env.sh'}; " if text else ""
    environment = {
        **os.environ,
        "PATH": f"{blocked}:{os.environ['PATH']}",
        "PYTHONPATH": str(blocked),
        "APPLY": str(directory / "apply"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["sh", "-c", source + command], cwd=directory, env=environment,
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[:4000]
    line = next(text for text in done.stdout.splitlines() if text.startswith("FOUND "))
    return json.loads(line.removeprefix("FOUND "))


def patched(code):
    """The lines of ``ddp.py`` where the wrapper is made."""
    loader = re.search(r"^# (loader = .*)$", code, re.MULTILINE)
    lines = loader.group(1).replace("dataset, ...", "dataset, batch_size=8") if loader else ""
    return f"\noptimizer = make_optimizer(model.parameters())\n{code}\n{lines}\n"


def test_ddp_lines_and_command_train_the_same(tmp_path):
    """As the plain lines do, in the same start."""
    options = DDP.Options(
        "cpu", dict.fromkeys(("bucket_cap_mb", "optimizer_implementation"), "search")
    )
    runner = DDP(options, WorkloadSpec("mlp"), Environment(tmp_path, nproc=4))
    changes = {
        "bucket_cap_mb": 0.02, "first_bucket_mb": 0.01, "gradient_as_bucket_view": True,
        "hierarchical_group_size": 2, "optimizer_implementation": "foreach",
        "dataloader_workers": 1, "prefetch_factor": 4, "omp_num_threads": 2,
    }  # fmt: skip
    apply = tmp_path / "apply"
    runner.export(changes, apply)
    ours = patched((apply / "ddp.py").read_text())
    parts = [SCRIPT, MODEL, PLAIN_DDP, TRAINS, MODEL, ours, TRAINS, ENDS]
    before, after = run("".join(parts), apply, tmp_path, 4)
    assert before["losses"][0] > 1.2 * before["losses"][-1]
    assert after["losses"] == pytest.approx(before["losses"], rel=1e-4)
    assert after["caps_mb"] == pytest.approx([0.01, 0.02], rel=1e-3)
    assert (after["view"], after["hooks"], after["optimizer"]) == (True, 1, [True, False])
    assert (after["threads"], after["workers"]) == (2, 1)
    assert (before["view"], before["hooks"], before["workers"]) == (False, 0, 0)
    assert max(before["caps_mb"]) == 25.0


def test_zero_lines_train_the_same(tmp_path):
    """Of two stages, as a script that has none of the lines, in one start."""
    parts = [SCRIPT, MODEL, PLAIN_DDP, ACCUMULATES]
    for stage in (1, 3):
        workload = WorkloadSpec("mlp", global_batch=32)
        runner = Zero(Zero.Options(device="cpu"), workload, Environment(tmp_path, nproc=2))
        chosen = {**runner.baseline, **runner.pinned}
        changes = {"zero_stage": stage, "micro_batch": 8, "gradient_accumulation": 2}
        apply = tmp_path / "apply" / str(stage)
        runner.export({**chosen, **{k: v for k, v in changes.items() if k in chosen}}, apply)
        parts += [MODEL, ZERO_TRAINS.format(stage=stage)]
    plain, *found = run("".join([*parts, ENDS]), None, tmp_path, 2)
    for trained in found:
        assert trained["losses"] == pytest.approx(plain["losses"], rel=1e-3)
    texts = [(tmp_path / "apply" / stage / "zero.py").read_text() for stage in "13"]
    assert texts[0] != texts[1]


FACTS = """
import json, os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 64, generator=torch.Generator().manual_seed(dist.get_rank())))
loader = DataLoader(data, batch_size=8)
net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)], torch.nn.Linear(64, 1))
model = DistributedDataParallel(net, bucket_cap_mb=25)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batches, losses = iter(loader), []
for (inputs,) in batches:
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
if dist.get_rank() == 0:
    buckets = str(model._get_ddp_logging_data()["rebuilt_bucket_sizes"])
    print("FOUND", json.dumps({
        "losses": losses,
        "bucket_bytes": [int(size) for size in buckets.split(",")],
        "implementation": [optimizer.param_groups[0][name] for name in ("foreach", "fused")],
        "loader_processes": len(getattr(batches, "_workers", [])),
        "threads": torch.get_num_threads(),
        "environment": {n: os.environ.get(n) for n in ("OMP_NUM_THREADS", "NCCL_BUFFSIZE")},
        "perfsearch": sorted(name for name in sys.modules if name.startswith("perfsearch")),
    }))
dist.barrier()
sys.stdout.flush()
os._exit(0)  # torch's own threads now and then abort a process that takes them down
"""


def test_what_a_search_over_a_script_hands_over_is_in_force_without_perfsearch(tmp_path):
    """The values themselves; what they are worth is timed by ``benchmarks/handover.py``."""
    script = tmp_path / "train.py"
    script.write_text(FACTS)
    changed = {
        "bucket_cap_mb": 0.04, "first_bucket_mb": 0.02, "optimizer_implementation": "fused",
        "dataloader_workers": 1, "omp_num_threads": 2, "nccl_buffsize": 1048576,
    }  # fmt: skip
    apply = tmp_path / "apply"
    export.export_files(
        changed, [], Way(2, by_torchrun=True), 1, [str(script)], False, ["ddp"], apply
    )
    (tmp_path / "knobs.yaml").write_text(json.dumps(changed))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    plain = start([sys.executable, *launch, str(script)], tmp_path)
    alone = start(["sh", str(apply / "run.sh")], tmp_path)
    file = str(tmp_path / "knobs.yaml")
    knobs = ["-m", "perfsearch.cli.run", "--nproc-per-node=2", "--knobs", file]
    ours = start([sys.executable, *knobs, str(script)], tmp_path, blocked=False)
    assert len(plain["bucket_bytes"]) == 1 and plain["implementation"] == [None, None]
    assert (plain["loader_processes"], plain["threads"]) == (0, 1)
    assert len(alone["bucket_bytes"]) > 2
    assert max(alone["bucket_bytes"]) < 0.04 * 2**20 + 64 * 65 * 4  # a parameter is never split
    assert alone["implementation"] == [False, True]
    assert (alone["loader_processes"], alone["threads"]) == (1, 2)
    assert alone["environment"] == {"OMP_NUM_THREADS": "2", "NCCL_BUFFSIZE": "1048576"}
    assert alone["perfsearch"] == [] and ours["perfsearch"]
    for name in ("bucket_bytes", "implementation", "loader_processes", "threads", "environment"):
        assert ours[name] == alone[name], name
    assert alone["losses"] == pytest.approx(plain["losses"], rel=1e-4)


def start(command, directory, blocked=True):
    """Run a command that starts ``FACTS``, where perfsearch is blocked; what rank 0 has found."""
    place = without_perfsearch(directory)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if blocked:
        environment.update(PYTHONPATH=str(place), PATH=f"{place}:{os.environ['PATH']}")
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=180,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(text for text in done.stdout.splitlines() if text.startswith("FOUND "))
    return json.loads(line.removeprefix("FOUND "))
