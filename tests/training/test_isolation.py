"""Nothing that a trial needs is left in the process that asked for it, or in the next trial."""

import os
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from perfsearch.cli import search as cli
from perfsearch.core.hardware import GroupSpec
from perfsearch.core.objective import Limits
from perfsearch.core.trial import Status
from perfsearch.training.process_groups import Groups
from perfsearch.workers.group import RankProcesses, WorkerGroup
from perfsearch.workers.launchers.local import Fork

TABLE = "bucket,status,samples_per_s,step_ms\n1,ok,10,9 9 9\n2,ok,12,5 5 5\n4,oom,,\n"


def test_the_callers_process_is_as_it_was(tmp_path, monkeypatch, capsys):
    """wandb/wandb#1567: environment, directory, arguments, handlers and threads, MLflow in use."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    (tmp_path / "table.csv").write_text(TABLE)

    def state():
        handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
        return dict(os.environ), os.getcwd(), list(sys.argv), handlers

    before, threads = state(), set(threading.enumerate())  # other tests' may still be ending
    for _ in range(2):
        arguments = ["runner=replay", "runner.table=table.csv", "strategy=grid"]
        assert cli.main(arguments) == 0, capsys.readouterr().err
        assert state() == before
    running = {t.name for t in threading.enumerate() if t not in threads}
    assert not {name for name in running if "mlflow-writer" in name or "system" in name}


def test_a_variable_of_one_generation_does_not_reach_the_next(monkeypatch, tmp_path):
    """NVIDIA-NeMo/Speech#9449: what is configured is what every rank has, and no more."""
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.delenv("NCCL_PROTO", raising=False)
    spec = GroupSpec(workload={}, device="cpu", nproc=1)
    groups = Groups(spec, tmp_path, 0, 0, 1, torch.device("cpu"))
    seen = []
    for env in ({"NCCL_ALGO": "Tree", "NCCL_PROTO": "LL"}, {"NCCL_PROTO": "Simple"}, {}):
        groups._set_env(env)
        seen.append((os.environ["NCCL_ALGO"], os.environ.get("NCCL_PROTO")))
    assert seen == [("Tree", "LL"), ("Ring", "Simple"), ("Ring", None)]


@pytest.mark.parametrize(
    ("devices", "status"),
    [(["GPU-a", "GPU-b"], None), (["GPU-a", "GPU-a"], Status.INFRASTRUCTURE)],
)
def test_ranks_on_one_device_are_refused(devices, status):
    """meta-pytorch/tritonbench#869: under torchrun every rank took GPU 0."""
    spec = GroupSpec(workload={}, device="cuda", nproc=2)
    group = WorkerGroup(spec, Limits(), Fork(SimpleNamespace(token="t", pid=1)))
    group._ranks = RankProcesses([{"host": "h", "device": name} for name in devices])
    failure = group._shared_device()
    assert (failure.status if failure else None) is status
    if failure:
        assert failure.reason == "ranks 0 and 1 are on the same device GPU-a"


def test_the_run_directory_is_all_that_a_search_writes(tmp_path, monkeypatch):
    """hydra-ecosystem/hydra#830: one store beside the runs, and no directory of Hydra's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.csv").write_text(TABLE)
    arguments = ["runner=replay", "runner.table=table.csv", "tracking.enabled=false"]
    assert cli.main([*arguments, "strategy=grid", "run_dir=mine/run"]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"table.csv", "mine"}
    assert [p.name for p in Path("mine").iterdir()] == ["run"]
