"""Whole searches in surroundings that other people have: what is missing, full, or secret there."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from support.stores import migrated_database as migrated_database

from perfsearch.config.schema import validate
from perfsearch.core.hardware import Environment
from perfsearch.core.objective import Limits, Metric
from perfsearch.core.trial import Purpose, Status
from perfsearch.pipeline import transfer
from perfsearch.pipeline.search import build_runner
from perfsearch.runners.base import Plan
from perfsearch.runners.ddp.runner import DDP
from perfsearch.tracking.history import PriorSearches
from perfsearch.tracking.location import locate
from perfsearch.workloads.spec import WorkloadSpec

pytestmark = pytest.mark.slow

DATA = Path(__file__).parents[1] / "data"
CALM = {"MLFLOW_DISABLE_TELEMETRY": "true", "OMP_NUM_THREADS": "1"}
SHORT = ["budget.trials=6", "confirm.finalists=0", "sentinel_every=0"]


def command(words, directory, environment=None, **more):
    """What a search did and printed, started in a directory."""
    done = subprocess.run(
        [sys.executable, "-m", "perfsearch", *words],
        cwd=directory,
        env={**os.environ, **CALM, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
        **more,
    )
    return done.returncode, done.stdout


def events(run_dir):
    return [json.loads(line) for line in (run_dir / "journal.jsonl").read_text().splitlines()]


def trials(run_dir):
    return [e["trial"] for e in events(run_dir) if e.get("event") == "finished"]


TABLE = """bucket_cap_mb,view,algorithm,workers,step_ms,samples_per_s
64.0,true,null,0,8 8 8,8000
25.0,false,Ring,1,9 9 9,7111.1
64,false,Tree,2,10 10 10,6400
8,true,null,-1,11 11 11,5818.2
25,true,Ring,2,7 7 7,9142.9
8.5,false,null,0,12 12 12,5333.3
1,true,Tree,1,13 13 13,4923.1
"""


@pytest.fixture(scope="module")
def replayed(tmp_path_factory, migrated_database):
    """A search on a file system without locks where Python raises warnings; what it printed."""
    directory = tmp_path_factory.mktemp("here")
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc"))), None)
    environment = {"PYTHONWARNINGS": "error"}
    if compiler is not None and sys.platform.startswith("linux"):
        shim = directory / "noflock.so"
        source = DATA / "noflock.c"
        subprocess.run([compiler, "-shared", "-fPIC", "-o", shim, source, "-ldl"], check=True)
        environment |= {"LD_PRELOAD": str(shim), "NOFLOCK_UNDER": str(directory)}
    shutil.copy(migrated_database, directory / "mlflow.db")
    (directory / "table.csv").write_text(TABLE)
    words = ["runner=replay", "runner.table=table.csv", "runner.batch=free", "batch=free"]
    code, told = command([*words, "strategy=grid", "run_dir=run", *SHORT], directory, environment)
    return directory, "LD_PRELOAD" in environment, code, told


def test_a_whole_search_on_a_file_system_without_locks(replayed):
    """tox-dev/filelock#67, spack/spack#12501"""
    directory, without_locks, code, told = replayed
    if not without_locks:
        pytest.skip("no C compiler, to stand in for such a file system")
    assert code == 0, told
    assert "Traceback" not in told
    assert told.count("has no locks") == 1
    assert "MLflow does not have" not in told
    assert len([t for t in trials(directory / "run") if t["purpose"] == "search"]) == 6


def test_a_warm_start_is_the_same_from_the_store_as_from_the_directory(replayed, monkeypatch):
    directory, *_ = replayed
    monkeypatch.chdir(directory)
    options = {"name": "replay", "table": "table.csv", "batch": "free"}
    plain = {"runner": options, "strategy": {"name": "grid"}, "workload": {"name": "mlp"}}
    runner = build_runner(validate({**plain, "batch": "free"}))
    by_directory = transfer.in_directory(Path("run"), Metric.THROUGHPUT, runner)
    store = PriorSearches(locate(None, directory))
    (search,) = store.of_runner("perfsearch", "replay")
    by_store = transfer.in_store(store, search, Metric.THROUGHPUT, runner)
    assert len(by_directory) == 7
    assert by_store._points == by_directory._points
    assert {k: [type(v) for v in p.values()] for k, p in by_store._points.items()} == {
        k: [type(v) for v in p.values()] for k, p in by_directory._points.items()
    }
    for key, costs in by_directory._costs.items():
        assert by_store._costs[key] == pytest.approx(costs, rel=1e-6)


def test_ranks_of_a_built_in_job_have_a_temporary_directory_that_sockets_fit_into(
    tmp_path, short_tmp, monkeypatch
):
    """riga/law#184"""
    long = short_tmp / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setenv("PYTHONWARNINGS", "error")  # torch warns while it is imported
    knobs = {"dataloader_workers": [0, 1]}
    where = Environment(tmp_path, nproc=2, limits=Limits(120, 60, 5))
    runner = DDP(DDP.Options("cpu", knobs), WorkloadSpec("mlp", global_batch=8), where)
    runner.open(tmp_path)
    try:
        plan = Plan(0, scored_steps=(4, 4), scored_seconds=0.0, log_directory=tmp_path / "logs")
        outcome = runner.measure({"dataloader_workers": 1}, plan)
        assert (outcome.status, outcome.reason) == (Status.OK, "")
    finally:
        runner.close()


# -----------------------------------------------------------------------------
# A process that the kernel kills for memory, in a control group with a limit.

LIMIT_MIB = 900
HUNGRY = """
import torch
from torch.utils.data import DataLoader, TensorDataset

net = torch.nn.Linear(16, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
held = []
while True:
    for (x,) in DataLoader(TensorDataset(torch.randn(512, 16)), batch_size=16):
        optimizer.zero_grad()
        net(x).mean().backward()
        optimizer.step()
        held.append(torch.ones(2**23))  # 32 MiB, touched
"""
INSIDE = """
import os, sys
group, words = sys.argv[1], sys.argv[2:]
with open(os.path.join(group, "cgroup.procs"), "w") as file:
    file.write(str(os.getpid()))
os.execv(sys.executable, [sys.executable, "-m", "perfsearch", *words])
"""


def limited_group():
    """A directory of a new control group with a limit of memory; why there is none, otherwise."""
    for parent, limit in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ("/sys/fs/cgroup", "memory.max"),
    ):
        group = Path(parent) / f"perfsearch-test-{uuid.uuid4().hex[:8]}"
        try:
            group.mkdir()
            (group / limit).write_text(str(LIMIT_MIB * 2**20))
        except OSError as error:
            why = f"no control group with a limit can be made here: {error}"
            if group.is_dir():
                group.rmdir()
            continue
        return group, ""
    return None, why


def dissolve(group):
    """End what is in a control group, and remove it."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.1)


def test_a_process_that_the_kernel_kills_for_memory_is_out_of_memory_and_not_repeated(tmp_path):
    """lzhxmu/CPPO#6"""
    group, why = limited_group()
    if group is None:
        pytest.skip(why)
    (tmp_path / "train.py").write_text(HUNGRY)
    words = ["workload=script", "workload.command=[train.py]", "runner=ddp", "runner.device=cpu"]
    words += ["tracking.enabled=false", "run_dir=run", "strategy=random", "budget.trials=0"]
    try:
        done = subprocess.run(
            [sys.executable, "-c", INSIDE, group, *words],
            cwd=tmp_path,
            env={**os.environ, **CALM},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    finally:
        dissolve(group)
    told = done.stdout + done.stderr
    assert done.returncode == 1, told
    (baseline, *others) = trials(tmp_path / "run")
    assert baseline["purpose"] == str(Purpose.BASELINE)
    assert baseline["status"] == str(Status.OOM), told
    assert not others, "it was started again"
    assert "GiB, limit of its control group 0.88 GiB" in baseline["reason"]


# -----------------------------------------------------------------------------
# Secrets among a script's arguments.

SECRET = "tulip5tulip5tulip5"
PRIVATE = """
import argparse
import torch
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
for name in ("--token", "--api_key", "--db", "--password-file", "--bs"):
    parser.add_argument(name)
args = parser.parse_args()
assert args.token == args.api_key == "SECRET" and "SECRET@" in args.db
net = torch.nn.Linear(16, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for _ in range(200):
    for (x,) in DataLoader(TensorDataset(torch.randn(512, 16)), batch_size=16):
        optimizer.zero_grad()
        net(x).mean().backward()
        optimizer.step()
""".replace("SECRET", SECRET)


def test_a_secret_stands_nowhere_in_what_a_search_leaves(tmp_path, migrated_database):
    database = tmp_path / "mlflow.db"
    shutil.copy(migrated_database, database)
    (tmp_path / "train.py").write_text(PRIVATE)
    script = [f"--token={SECRET}", "--api_key", SECRET, "--db", f"postgres://me:{SECRET}@h/db"]
    listed = ",".join(f"'{word}'" for word in ["train.py", *script])
    words = [f"workload.command=[{listed}]", "workload=script", "runner=ddp", "runner.device=cpu"]
    words += ["~runner.knobs", "+runner.knobs={pin_memory: search}", "run_dir=run"]
    words += ["strategy=random", "budget.trials=1", "confirm.finalists=0"]
    code, told = command(words, tmp_path, {"WANDB_API_KEY": SECRET})
    assert code == 0, told
    assert SECRET not in told
    left = [p for p in tmp_path.rglob("*") if p.is_file() and p.name != "train.py"]
    assert database in left
    assert any(p.name == "run.sh" for p in left)
    assert len(left) > 15
    assert [p for p in left if SECRET.encode() in p.read_bytes()] == []
