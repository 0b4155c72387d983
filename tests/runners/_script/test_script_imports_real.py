"""Later starts of a script have what its first start imported, and else are as plain ones."""

import json
import signal

import pytest
from support.packages import install

from perfsearch.core.hardware import Environment
from perfsearch.core.objective import Limits
from perfsearch.core.trial import Purpose
from perfsearch.runners._script.runner import Script
from perfsearch.runners.base import Plan
from perfsearch.workers import processes

pytestmark = pytest.mark.slow

PACKAGES = {
    "heavy_stand_in": """
import os
import shutil
from torch import save
from heavy_stand_in_part import VALUE
PID = os.getpid()
SALT = os.environ["SALT"]
def saves():
    return save
""",
    "heavy_stand_in_part": "VALUE = 1\n",
    "threads_stand_in": "import os, threading, time\nPID = os.getpid()\n"
    "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n",
}

BEGINS = """
import json, multiprocessing, os, random, signal, sys
os.environ["SALT"] = "1"
import numpy
import torch
import heavy_stand_in
imported_here = heavy_stand_in.PID == os.getpid()
"""

STARTS_A_THREAD = """
import threads_stand_in
assert threads_stand_in.PID == os.getpid()
"""

TELLS = """
by = multiprocessing.current_process().name, multiprocessing.parent_process()
names = "RANK", "WORLD_SIZE", "PYTHONHASHSEED", "SALT"
ours = sorted(n for n in os.environ if n.startswith(("PERFSEARCH_SCRIPT", "PYTORCH")))
signals = signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE
print("here", imported_here)
print("found", json.dumps([
    __name__, __file__, sys.modules["__main__"].__file__, sys.argv, sys.path, os.getcwd(),
    heavy_stand_in.SALT, heavy_stand_in.saves() is torch.save, ours, str(by),
    [os.environ.get(n) for n in names], [str(signal.getsignal(n)) for n in signals],
    sys.stdout.line_buffering, sys.stdout.write_through, hash("text"),
    random.random(), numpy.random.rand(), torch.rand(1).item(),
]))
print("threads", os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads())
"""

TRAINS = """
net = torch.nn.Linear(64, 10)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(100_000):
    optimizer.zero_grad()
    net(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    if not step:
        print("loss", net(torch.ones(64)).sum().item())
"""


@pytest.fixture
def open_runner(tmp_path, monkeypatch):
    for name, value in install(tmp_path / "user", **PACKAGES).items():
        monkeypatch.setenv(name, value)
    made = []

    def open_runner(code, nproc=None, **options):
        script = tmp_path / "train.py"
        script.write_text(code)
        where = Environment(tmp_path, nproc=nproc, limits=Limits(180, 180, 5))
        asked = Script.Options((str(script), "--lr", "1"), **options)
        made.append(Script("cpu", {"omp_num_threads": "search"}, asked, where))
        made[-1].open(tmp_path)
        assert made[-1].start_failure == ""
        return made[-1]

    yield open_runner
    for one in made:
        one.close()
    assert processes.reap_groups(tmp_path) == 0


def start_again(runner, directory, number, knobs=None):
    """One more start, a few steps of it; whether it was a fork, and what it printed."""
    logs = directory / "logs" / f"{number:04d}"
    failed = runner._runs.begin(
        knobs or {}, Plan(number, Purpose.SEARCH, 60.0, log_directory=logs), False
    )
    assert failed is None, failed
    forked = runner._runs.group.forked
    runner._runs.group.send({"op": "score", "count": 4, "each": 1})
    runner._runs.group.receive("window", 60.0)
    runner._runs.end()
    return forked, read(directory, number)


def read(directory, number):
    lines = (directory / "logs" / f"{number:04d}" / "rank0.log").read_text().splitlines()
    return {word: rest for word, _, rest in (line.partition(" ") for line in lines)}


@pytest.fixture
def interruptible():
    """As in a terminal, also where what started the tests has had SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("nproc", [None, 2])
@pytest.mark.usefixtures("interruptible")
def test_a_later_start_is_a_fork_that_finds_what_a_plain_one_finds(open_runner, tmp_path, nproc):
    code = BEGINS + TELLS + TRAINS
    if nproc:
        wraps = "net = torch.nn.parallel.DistributedDataParallel(net)\noptimizer"
        code = code.replace("net = ", "torch.distributed.init_process_group('gloo')\nnet = ", 1)
        code = code.replace("optimizer", wraps, 1)
    runner = open_runner(code, nproc)
    forked, again = start_again(runner, tmp_path, 1)
    plainly, other = start_again(runner, tmp_path, 2, {"omp_num_threads": runner._threads + 1})
    assert (forked, plainly) == (True, False), "its environment is another where threads are"
    first = read(tmp_path, 0)  # plain, too, as nothing was known of what it imports
    assert (first["here"], again["here"], other["here"]) == ("True", "False", "True")
    for plain in (first, other):
        assert json.loads(again["found"]) == json.loads(plain["found"])
        assert again["loss"] == plain["loss"]
    assert again["threads"] == first["threads"] != other["threads"]


def test_what_starts_a_thread_is_imported_by_each_start(open_runner, tmp_path):
    runner = open_runner(BEGINS + STARTS_A_THREAD + TELLS + TRAINS)
    forked, printed = start_again(runner, tmp_path, 1)
    assert (forked, printed["here"]) == (True, "False")
    said = runner.closing_lines(runner.baseline, [])
    assert said == [
        "imported anew by each start, with what imports them: threads_stand_in (it starts a thread)"
    ]


def test_a_script_that_cannot_bear_it_is_started_plainly(open_runner, tmp_path):
    code = BEGINS + "if not imported_here: sys.exit(3)\n"
    runner = open_runner(code + TELLS + TRAINS)
    forked, printed = start_again(runner, tmp_path, 1)
    assert (forked, printed["here"]) == (False, "True")
    assert not start_again(runner, tmp_path, 2)[0]
    (said,) = runner.closing_lines(runner.baseline, [])
    assert "each start imported everything anew" in said and "exit code 3" in said


def test_what_follows_a_variable_of_another_value_is_imported_by_each_start(open_runner, tmp_path):
    code = BEGINS.replace("import numpy\n", "").replace("import torch\n", "", 1)
    code = "import numpy, torch\n" + code.replace('"1"', "str(os.getpid())")
    runner = open_runner(code + TELLS + TRAINS)
    assert not start_again(runner, tmp_path, 1)[0], "it was tried, and started once more"
    forked, printed = start_again(runner, tmp_path, 2)
    assert (forked, printed["here"]) == (True, "True")
    (said,) = runner.closing_lines(runner.baseline, [])
    assert "all after SALT (which the script sets otherwise in each start)" in said


def test_nothing_is_imported_ahead_where_it_is_switched_off(open_runner, tmp_path):
    runner = open_runner(BEGINS + TELLS + TRAINS, import_once=False)
    forked, printed = start_again(runner, tmp_path, 1)
    assert (forked, printed["here"]) == (False, "True")
    assert runner.closing_lines(runner.baseline, []) == []
