"""What is left of a launcher when its controller is killed, and what of one that is killed."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from perfsearch.workers import processes
from perfsearch.workers.processes import EXIT_ORPHANED

LONGEST_S = 60
"""A launcher waits five times as long for a store that does not answer."""

CONTROLLER = """
import os, sys, time
from pathlib import Path
from perfsearch.instrument.launch import ENTRY, LaunchConfig, torchrun_arguments
from perfsearch.workers import processes
from perfsearch.workers.messages import TOKEN_VARIABLE, Place
from perfsearch.workers.preload import Preloaded

room, port = Path(sys.argv[1]), int(sys.argv[2])
group, me = room / "group", os.getpid()
group.mkdir()
source = Preloaded(os.environ, room, room / "log", "perfsearch.instrument.launch")
place = Place(
    "g", source.token, me, processes.started_at(me), source.pid, node=1, nnodes=2, store_port=port
)
place.write(group)
whole = {**os.environ, **LaunchConfig("train.py").to_environment(), TOKEN_VARIABLE: source.token}
source.fork(group, whole, room / "log", 120.0, arguments=[*torchrun_arguments(1), "-m", ENTRY, "a"])
print(source.token, flush=True)
time.sleep(600)
"""


LAUNCHER = """
import os, sys, tempfile
from pathlib import Path
from torch.distributed import run
from perfsearch.workers import processes
from perfsearch.workers.forkserver import agent_arguments, run_ranks
from perfsearch.workers.messages import Place

group = Path(sys.argv[1])
me = os.getpid()
Place("g", "t", me, processes.started_at(me), me).write(group)

def tell(path):
    frame = sys._getframe()
    while "error_file" not in frame.f_locals:
        frame = frame.f_back
    Path(path).write_text(f"{frame.f_locals['error_file']}\\n{tempfile.gettempdir()}")

words = [*agent_arguments(group, 1), "--start-method=fork", "-m", "nothing"]
sys.exit(run_ranks(group, lambda: run.parse_args(words), (tell, [sys.argv[2]])))
"""


@pytest.mark.slow
def test_torchs_file_for_a_ranks_error_goes_with_the_group(tmp_path):
    """It stays where its launcher is killed before it is read; ranks have ``TMPDIR`` as it is."""
    group, temporary, told = tmp_path / "group", tmp_path / "temporary", tmp_path / "told"
    group.mkdir()
    temporary.mkdir()
    command = [sys.executable, "-c", LAUNCHER, str(group), str(told)]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    subprocess.run(command, env=environment, check=True, timeout=120)
    error_file, of_rank = told.read_text().splitlines()
    assert Path(error_file).parent == group
    assert Path(of_rank) == temporary


@pytest.mark.slow
def test_a_launcher_that_waits_for_a_store_ends_with_its_controller(tmp_path: Path) -> None:
    """As where ``perfsearch join`` is killed, which has carried the store's bytes."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        words = [sys.executable, "-c", CONTROLLER, str(tmp_path), str(silent.getsockname()[1])]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as controller:
            token = controller.stdout.readline().strip()
            silent.settimeout(LONGEST_S)
            asks, _ = silent.accept()  # the launcher, which hears nothing
            assert len(processes.members(token)) == 2
            controller.kill()
        deadline = time.monotonic() + LONGEST_S
        while (left := processes.members(token)) and time.monotonic() < deadline:
            time.sleep(0.1)
        processes.end_all(token, 0.0)
        asks.close()
    assert not left
    assert not (tmp_path / "group").exists()


BLOCK = """
import sys, time
from perfsearch.workers.processes import ending_with_controller

with ending_with_controller(int(sys.argv[1]), float(sys.argv[2]), lambda: print("end", flush=True)):
    print("up", flush=True)
    time.sleep(float(sys.argv[3]))
print("through", flush=True)
"""


def test_what_takes_long_before_a_fork_ends_with_the_controller() -> None:
    with subprocess.Popen(["sleep", "600"]) as controller:
        known = [str(controller.pid), repr(processes.started_at(controller.pid))]
        words = [sys.executable, "-c", BLOCK, *known]
        blocks = [
            subprocess.Popen([*words, seconds], stdout=subprocess.PIPE, text=True)
            for seconds in ("0.01", "600")
        ]
        assert blocks[1].stdout.readline() == "up\n"
        assert blocks[0].communicate(timeout=LONGEST_S)[0] == "up\nthrough\n"
        controller.kill()
        controller.wait()
        assert blocks[1].communicate(timeout=LONGEST_S)[0] == "end\n"
    assert [block.returncode for block in blocks] == [0, EXIT_ORPHANED]
