"""A search over two nodes, each a network namespace with an address of its own.

Strangers, cables that are pulled, and nodes that come back are met for real.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import spread, two_nodes

from perfsearch.soap.simulator.machine import Machine, for_devices

pytestmark = pytest.mark.slow

SECRET = "a secret of these tests"
PORT = 29400
PYTHON = [sys.executable, "-P", "-m"]
LONGEST_S = 240

MEASURE = r"""
import sys
from pathlib import Path
from perfsearch.core.hardware import Environment
from perfsearch.core.objective import Limits
from perfsearch.runners.base import Plan
from perfsearch.runners.ddp.runner import DDP
from perfsearch.workers.launchers.torchrun import Torchrun
from perfsearch.workloads.spec import WorkloadSpec

def say(text):
    sys.stdout.write(text + "\n")  # in one piece, since other threads have something to say, too
    sys.stdout.flush()

directory = Path(sys.argv[1])
launcher = Torchrun(Torchrun.Options(endpoint=sys.argv[2], wait_s=120.0), 2)
environment = Environment(
    directory, nproc=1, nnodes=2, launcher=launcher, limits=Limits(180, 180, 5)
)
TRIALS = [(False, 0.05), (True, 0.05), (False, 150), (False, 0.05)]
runner = DDP(DDP.Options("cpu", {"static_graph": "search"}), WorkloadSpec("mlp"), environment)
launcher.open(runner.hardware, say)
try:
    for number, (static, seconds) in enumerate(TRIALS):
        plan = Plan(
            number=number, log_directory=directory / str(number), scored_seconds=seconds,
            scored_steps=(8, 100_000 if seconds > 1 else 8),
        )
        say(f"trial {number}")
        outcome = runner.measure({"static_graph": bool(static)}, plan)
        world = outcome.measurement and outcome.measurement.world_size
        say(f"{outcome.status} fresh={outcome.fresh_process} world={world}: {outcome.reason}")
        if world:
            say(str([rank["host"] for rank in outcome.measurement.environment["ranks"]]))
finally:
    runner.close()
    launcher.close()
"""


@pytest.fixture
def nodes():
    why = two_nodes.why_not()
    if why:
        pytest.skip(why)
    pair = two_nodes.TwoNodes()
    yield pair
    pair.close()


@pytest.fixture
def start(nodes, tmp_path):
    """Start a command on a node; what it says goes to a file."""
    started = []

    def run(node, name, words, **variables):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        with (tmp_path / name).open("ab") as file:
            process = nodes.start(
                node, words, cwd=tmp_path, env=environment, stdout=file, stderr=file,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()


def said(file: Path, pattern, limit_s=LONGEST_S):
    """Wait until a file has a line of this pattern."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        text = file.read_text() if file.exists() else ""
        if found := re.search(pattern, text, re.MULTILINE):
            return found
        time.sleep(0.1)
    raise AssertionError(f"{file.name} lacks {pattern!r}:\n{text}")


def join(nodes):
    return [*PYTHON, "perfsearch.workers.join", f"{nodes.addresses[0]}:{PORT}", "--wait-s=120"]


def test_a_node_that_is_cut_off_costs_one_trial_and_comes_back(nodes, start, tmp_path):
    (tmp_path / "measure.py").write_text(MEASURE)
    endpoint = f"{nodes.addresses[0]}:{PORT}"
    words = [sys.executable, "-P", "measure.py", str(tmp_path / "run"), endpoint]
    search = start(0, "search", words, PERFSEARCH_SECRET=SECRET)
    output = tmp_path / "search"
    said(output, "PERFSEARCH_SECRET=.* perfsearch join")
    stranger = start(1, "stranger", join(nodes), PERFSEARCH_SECRET="what a stranger may guess")
    assert stranger.wait(60) == 2
    said(tmp_path / "stranger", "it takes another secret. Copy the whole command")
    said(output, rf"warning: {nodes.addresses[1]} was turned away")
    other = start(
        1, "other", join(nodes), PERFSEARCH_SECRET=SECRET, NCCL_ALGO="Tree", NCCL_PROTO="LL"
    )
    assert other.wait(60) == 2
    said(tmp_path / "other", "refused: NCCL_ALGO=Tree there, not set here; NCCL_PROTO=LL there")
    node = start(1, "node", join(nodes), PERFSEARCH_SECRET=SECRET)
    said(output, rf"^ok fresh=True world=2.*\n.*\({nodes.addresses[1]}\)")
    second = start(1, "second", join(nodes), PERFSEARCH_SECRET=SECRET)
    assert second.wait(60) == 2
    said(tmp_path / "second", "nnodes=2, and every node is there already")
    said(output, "^trial 1\n(?:.*\n)*?ok fresh=False world=2")  # the refusal may come in between
    said(tmp_path / "run" / "2" / "rank1.log", "^request")
    time.sleep(1.0)
    nodes.cut()
    lost = said(output, r"^trial 2\n(?:.*\n)*?infrastructure [^:]*: (.*)$")
    name = f"node {os.uname().nodename} ({nodes.addresses[1]})"
    assert lost[1] == f"{name} is gone: its connection is lost"
    said(tmp_path / "node", "is out of reach: what it had here is ended")
    said(output, "waiting for 1 node more")
    nodes.mend()
    said(output, "^trial 3\n(?:.*\n)*?ok fresh=True world=2")
    assert (search.wait(60), node.wait(60)) == (0, 0)
    said(tmp_path / "node", "the search is over")


def test_only_the_gate_is_to_be_reached_by_others(nodes, start, tmp_path):
    words = spread.command(tmp_path, f"--rdzv-endpoint={nodes.addresses[0]}:{PORT}")
    search = start(0, "search", words, PERFSEARCH_SECRET=SECRET)
    node = start(1, "node", join(nodes), PERFSEARCH_SECRET=SECRET)
    said(tmp_path / "search", "^-- baseline")
    listening = subprocess.run(
        ["ip", "netns", "exec", nodes.names[0], "ss", "-Hltn"], capture_output=True, text=True
    )
    reached = {line.split()[3] for line in listening.stdout.splitlines()}
    loopback = {address for address in reached if address.startswith("127.0.0.1:")}
    assert f"{nodes.addresses[0]}:{PORT}" in reached
    assert not {a for a in reached - loopback if not a.startswith(nodes.addresses[0])}
    assert (search.wait(LONGEST_S), node.wait(60)) == (0, 0), (tmp_path / "search").read_text()
    trials = spread.finished(tmp_path)
    assert {one["status"] for one in trials} == {"ok"}
    assert spread.worlds(trials) == {2}


def test_a_plans_machine_has_links_within_and_between_nodes(nodes, start, tmp_path):
    endpoint = f"{nodes.addresses[0]}:{PORT}"
    words = [
        *(*PYTHON, "perfsearch.cli.search", "runner=soap", "mode=measure", "runner.device=cpu"),
        *(
            "workload=mlp",
            "nproc=2",
            "nnodes=2",
            "launcher=torchrun",
            f"run_dir={tmp_path / 'run'}",
        ),
        *(f"launcher.endpoint='{endpoint}'", f"runner.cache={tmp_path / 'cache'}"),
    ]
    search = start(0, "search", words, PERFSEARCH_SECRET=SECRET)
    node = start(1, "node", join(nodes), PERFSEARCH_SECRET=SECRET)
    assert (search.wait(LONGEST_S), node.wait(60)) == (0, 0), (tmp_path / "search").read_text()
    machine = Machine.read(tmp_path / "run" / "soap" / "machine.json")
    assert (machine.devices, machine.devices_per_node) == (4, 2)
    assert set(machine.within["all_reduce"]) == {2}
    assert set(machine.across["all_reduce"]) == {2, 3, 4}
    assert all(us > 0 for curve in machine.across["exchange"].values() for us in curve.values())
    assert machine.curves_among([0, 1]) == machine.within
    assert machine.curves_among([1, 2]) == machine.across
    (kept,) = (tmp_path / "cache").glob("machine-*")
    assert "x4-on-2-nodes" in kept.name
    more, why = for_devices(machine, 8)
    assert (more.devices_per_node, more.across) == (2, machine.across)
    assert why == "nodes have 2 devices, and are linked as those that were measured"
