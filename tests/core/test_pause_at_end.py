"""Threads of libraries get a moment before Python ends."""

import os
import subprocess
import sys

import pytest

CHILD = """
import sys, threading
from perfsearch.core.signals import pause_at_end

pause_at_end()
pause_at_end()
work_done = threading.Event()

def drop_tensors():
    work_done.wait()
    print("dropped", flush=True)

threading.Thread(target=drop_tensors, daemon=True).start()
sys.setswitchinterval(60)  # the main thread keeps the interpreter until it waits
work_done.set()
"""


@pytest.mark.parametrize(("ranks", "told"), [("2", "dropped\n"), ("1", "")])
def test_a_thread_finishes_before_python_ends_where_there_are_ranks(ranks, told):
    """pytorch#190489: gloo's threads abort a process whose Python has begun to end."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        env={**os.environ, "WORLD_SIZE": ranks},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (done.stdout, done.stderr) == (told, "")
