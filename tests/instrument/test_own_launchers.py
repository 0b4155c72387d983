import subprocess
import sys

import pytest

from perfsearch.instrument.patching import launcher_of


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["/usr/bin/torchrun", "--nproc-per-node=2", "t.py"], "torchrun"),
        (["accelerate", "launch", "t.py"], "accelerate"),
        ([sys.executable, "-m", "torch.distributed.run", "t.py"], "torch.distributed.run"),
        (["deepspeed t.py"], "deepspeed"),
        ([sys.executable, "-m", "http.server"], ""),
        (["nvidia-smi"], ""),
        ([b"torchrun"], "torchrun"),
        ([], ""),
    ],
)
def test_a_launcher_is_recognised_by_its_command_line(command, name):
    assert launcher_of(command) == name


def test_the_script_is_told_before_it_starts_ranks_of_its_own():
    code = (
        "import subprocess, torch.multiprocessing as mp\n"
        "from perfsearch.instrument.patching import watch_for_launchers\n"
        "watch_for_launchers('train.py', lambda text: print('TOLD', text))\n"
        "subprocess.run(['true'])\n"
        "try:\n    subprocess.run(['torchrun', '--nosuchoption'])\nexcept OSError: pass\n"
        "try:\n    mp.spawn(None, nprocs=0)\nexcept Exception: pass\n"
        "import os, sys\n"
        "child = os.fork()\n"
        "if child == 0: os.execv('/bin/true', ['true'])\n"
        "os.waitpid(child, 0)\n"
        "sys.stdout.flush()\n"
        "try:\n    os.execv('/no/such', ['such'])\nexcept OSError: pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True,
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    told = [line for line in done.stdout.splitlines() if line.startswith("TOLD")]
    assert "train.py starts ranks of its own (torchrun)" in told[0]
    assert "torch.multiprocessing.spawn" in told[1]
    assert all("RANK, LOCAL_RANK and WORLD_SIZE" in line for line in told[:2])
    assert "train.py has another program take the place" in told[2] and len(told) == 3
