"""Runs examples and scripts as a user would, and reads the losses that they print."""

import os
import re
import subprocess
import sys

TORCH_ABORTS = "terminate called without an active exception"
"""A gloo rank of a plain script now and then does so at its end: pytorch#190489."""


def run(directory, *arguments):
    """Standard output and error of a Python command that succeeds."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    plain = "torch.distributed.run" in arguments
    for _ in range(4 if plain else 1):
        done = subprocess.run(
            [sys.executable, *arguments], cwd=directory, env=environment, capture_output=True,
            text=True, timeout=280, check=False,
        )  # fmt: skip
        if TORCH_ABORTS not in done.stderr:
            break
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, done.stderr


def losses(text):
    """What the training printed."""
    return [float(value) for value in re.findall(r"loss'?:? '?([0-9.]+)", text)]
