"""A training job that fails once, where and how ``fault.json`` in the current directory says.

It stands in for the user's own code: it knows the trial only by the log that its output goes to.
"""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

_FAULT = Path("fault.json")
_STRUCK = Path("struck")


def build():
    """Two small layers; loading takes longer than computing, so that loader processes help."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    return model, _Slow(), _loss, lambda parameters: torch.optim.SGD(parameters, lr=0.01)


class _Slow(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.002)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(16, generator=generator), torch.randn(1, generator=generator)


def _loss(model, batch):
    inputs, targets = batch
    if _FAULT.exists():
        fault = json.loads(_FAULT.read_text())
        due = _trial() >= fault["trial"] and dist.get_rank() == fault["rank"]
        if due and _is_first():
            _strike(fault)
    time.sleep(0.006)
    return F.mse_loss(model(inputs), targets)


def _trial():
    """Number of the trial: this process's output goes to ``logs/NUMBER/rankN.log``."""
    return int(Path(os.readlink("/proc/self/fd/1")).parent.name)


def _is_first():
    try:
        mark = os.open(_STRUCK, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return False
    os.write(mark, f"{_trial()}\n".encode())
    os.close(mark)
    return True


def _strike(fault):
    kind = fault["kind"]
    if kind == "exception":
        raise RuntimeError(f"boom {fault['word']}")
    if kind == "exit code":
        os._exit(fault["code"])
    if kind == "SIGKILL of a rank":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "SIGKILL of the launcher":
        os.kill(_launchers()[fault["generation"]], signal.SIGKILL)
        if fault["generation"] == 0:
            time.sleep(600)  # without the process that groups are forked from, ranks can go on
    if kind in ("SIGKILL of the controller", "torn journal", "SIGINT", "SIGTERM"):
        number = getattr(signal, kind) if kind.startswith("SIG") and " " not in kind else 9
        time.sleep(fault["delay_s"])
        os.kill(int(Path("controller.pid").read_text()), number)
        time.sleep(600)
    if kind == "hang":
        time.sleep(600)
    if kind == "OOM text on stderr":
        print(fault["text"], file=sys.stderr, flush=True)
        os._exit(1)
    if kind == "OOM by rlimit":
        _allocate_beyond_limit()
    if kind == "full disk":
        _fill(Path(fault["directory"]))
    if kind == "tracking server killed":
        os.kill(int(Path("server.pid").read_text()), signal.SIGKILL)
    if kind == "port taken":
        _bind_twice()
    if kind == "grandchild holding a pipe":
        _leave_grandchild(fault["hidden"])
        time.sleep(600)


def _launchers():
    """The parent of this rank, torch's launcher, and the process that one was forked from."""
    parent = os.getppid()
    fields = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()
    return parent, int(fields[1])


def _allocate_beyond_limit():
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, hard))
    try:
        torch.empty(2**34)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _fill(directory):
    with (directory / "filler").open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(1024))
        except OSError:
            return


def _bind_twice():
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        first.listen(1)
        second.bind(first.getsockname())


def _leave_grandchild(hidden):
    """A process in a session of its own that holds the rank's output open.

    A hidden one has lost its parent and its environment too.
    """
    script = "import os, time; os.setsid(); open('grandchild.pid', 'w').write(str(os.getpid()))"
    sleeper = [sys.executable, "-S", "-c", f"{script}; time.sleep(600)"]
    if hidden:
        spawn = "import subprocess, sys; subprocess.Popen(sys.argv[1:])"
        subprocess.run([sys.executable, "-S", "-c", spawn, *sleeper], env={}, check=True)
    else:
        subprocess.Popen(sleeper)
    while not Path("grandchild.pid").exists():
        time.sleep(0.01)
