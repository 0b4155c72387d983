"""A workload that fails on demand: what ``PERFSEARCH_TEST_FAULT`` names says how."""

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
from torch.utils.data import TensorDataset

_calls = 0


def loss(model, batch):
    inputs, targets = batch
    _strike(Path(os.environ["PERFSEARCH_TEST_FAULT"]))
    return F.mse_loss(model(inputs), targets)


def _strike(path):
    global _calls
    _calls += 1
    if not path.exists():
        return
    fault = json.loads(path.read_text())
    if fault.get("rank", dist.get_rank()) != dist.get_rank():
        return
    kind = fault["kind"]
    if kind == "raise":
        raise RuntimeError(fault["message"])
    if kind == "exit":
        os._exit(fault["code"])
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        time.sleep(600)
    if kind == "rlimit":
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (2**30, hard))
        try:
            torch.empty(2**34)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    if kind == "grandchild" and not path.with_suffix(".pid").exists():
        # in a session of its own, holding the rank's output open
        script = "import os, time; os.setsid(); print('here', flush=True); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", script])
        path.with_suffix(".pid").write_text(str(child.pid))
    if kind == "nan":
        raise_nan(fault)


def raise_nan(fault):
    raise AssertionError("not used: nan comes from the data")


def build():
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    data = TensorDataset(torch.randn(64, 16), torch.randn(64, 1))
    return model, data, loss, lambda parameters: torch.optim.SGD(parameters, lr=0.01)
