"""A workload that fails on demand: the file that ``PERFSEARCH_TEST_FAULT`` names says how."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset, get_worker_info


def loss(model, batch):
    inputs, targets = batch
    path = Path(os.environ["PERFSEARCH_TEST_FAULT"])
    factor = strike(path, json.loads(path.read_text())) if path.exists() else 1.0
    return F.mse_loss(model(inputs), targets) * factor


def strike(path, fault):
    """Do what the fault says, on its rank; return what to multiply the loss by."""
    if fault.get("rank", dist.get_rank()) != dist.get_rank():
        return 1.0
    kind = fault["kind"]
    if kind == "raise":
        raise {"RuntimeError": RuntimeError, "MemoryError": MemoryError}[fault["type"]](
            fault["message"]
        )
    if kind == "raise while others hang":
        if dist.get_rank() == 1:
            raise RuntimeError("boom")
        time.sleep(600)
    if kind == "cuda memory":
        torch.empty(2**42, device="cuda")
    if kind == "tell":
        raise RuntimeError(f"rank {dist.get_rank()} has {os.environ.get(fault['variable'])}")
    if kind == "exit":
        os._exit(fault["code"])
    if kind == "signal":
        os.kill(os.getpid(), getattr(signal, fault["signal"]))
    if kind == "hang":
        time.sleep(600)
    if kind == "rlimit":
        allocate_beyond_limit()
    if kind == "grandchild":
        leave_grandchild(path.with_suffix(".pid"))
        time.sleep(600)
    return float("nan") if kind == "nan" else 1.0


def allocate_beyond_limit():
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, hard))
    try:
        torch.empty(2**34)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def leave_grandchild(pid_file):
    """A process in a session of its own that holds the rank's output open."""
    if not pid_file.exists():
        script = "import os, time; os.setsid(); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", script])
        pid_file.write_text(str(child.pid))


class Data(TensorDataset):
    """Data whose loader process dies on demand."""

    def __getitem__(self, index):
        path = Path(os.environ["PERFSEARCH_TEST_FAULT"])
        in_loader = get_worker_info() is not None and path.exists()
        if in_loader and json.loads(path.read_text())["kind"] == "loader":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def build():
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    data = Data(torch.randn(64, 16), torch.randn(64, 1))
    return model, data, loss, lambda parameters: torch.optim.SGD(parameters, lr=0.01)


def broken():
    if os.environ["RANK"] == "1":
        raise RuntimeError("CUDA out of memory. Tried to allocate the model")
    return build()


def stuck():
    time.sleep(600)
