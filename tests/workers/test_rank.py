"""A rank's beginning."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, sys, torch
from perfsearch.workers import rank

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
assert torch.get_num_threads() == 3 and threads() >= 3
pid = os.fork()
if pid == 0:
    before = threads()
    rank.own_thread_pool()
    print(before, threads(), torch.get_num_threads(), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in procfs")
def test_a_forked_rank_makes_its_thread_pool_before_any_thread_needs_it():
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True
    )
    assert found.stdout.split() == ["1", "3", "3"], found.stderr
