"""Starts of a script at the same time: on shares of this machine, and apart in what they write."""

import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from support.file_states import state_of

from perfsearch.core.hardware import Environment, usable_cores
from perfsearch.core.objective import Limits
from perfsearch.core.trial import Purpose, Status
from perfsearch.instrument.user_files import ROOM
from perfsearch.runners._script.runner import Script
from perfsearch.runners.base import Plan
from perfsearch.workers import processes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(len(usable_cores()) < 2, reason="a share needs a CPU core of its own"),
]

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=16)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
steps = 0
while True:
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        steps += 1
        if steps == 500:
            open("train.log", "a").write("500 steps")
"""
FEW, MANY = (8, 8), (600, 600)
"""Steps of a window: the script writes to a file after those of the first."""


@pytest.fixture
def runner(tmp_path, monkeypatch):
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    Path("train.py").write_text(SCRIPT)
    Path("train.log").write_text("of the user\n")
    environment = Environment(work / "run", nproc=1, limits=Limits(120, 90, 5), parallel_trials=2)
    made = Script(
        "cpu", {"dataloader_workers": "search"}, Script.Options(("train.py",)), environment
    )
    yield made
    made.close()
    assert processes.reap_groups(work / "run") == 0


def plan_of(number, purpose, lane=0, steps=FEW, **more):
    logs = Path("run/logs").absolute() / f"{number}"
    plan = Plan(number, purpose=purpose, lane=lane, log_directory=logs, time_limit_s=90.0)
    return replace(plan, scored_steps=steps, scored_seconds=0.01, **more)


def at_once(runner, plans):
    """Measure the baseline by each of these plans at the same time."""
    outcomes = {}

    def measure(plan):
        outcomes[plan.lane] = runner.measure(runner.baseline, plan)

    threads = [threading.Thread(target=measure, args=(plan,), daemon=True) for plan in plans]
    for thread in threads:
        thread.start()
    return threads, outcomes


def join(threads):
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()


def test_starts_at_the_same_time_have_cores_and_files_of_their_own(runner):
    before = state_of(Path.cwd(), "run", ROOM, "__pycache__")
    runner.open(Path("run").absolute())
    assert "each of 2 trials at a time has" in "\n".join(runner.remarks)
    assert runner.measure(runner.baseline, plan_of(0, Purpose.BASELINE)).status is Status.OK
    assert runner.why_alone() == ""
    mine = usable_cores()
    threads, outcomes = at_once(runner, [plan_of(1 + n, Purpose.SEARCH, n) for n in (0, 1)])
    join(threads)
    assert {lane: o.status for lane, o in outcomes.items()} == {0: Status.OK, 1: Status.OK}
    every = [runner._runs, *runner._others]
    used = [{tuple(psutil.Process(p).cpu_affinity()) for p in runs.group.pids} for runs in every]
    assert used == [{lane.cores} for lane in runner.hardware.lanes]
    assert not every[0].group.pids & every[1].group.pids
    assert usable_cores() == mine

    # What the baseline did not come to: both write to one file.
    plans = [plan_of(3 + n, Purpose.SEARCH, n, MANY, fresh=True) for n in (0, 1)]
    threads, outcomes = at_once(runner, plans)
    join(threads)
    said = {lane: (o.status, o.reason) for lane, o in outcomes.items()}
    assert (
        Status.INFRASTRUCTURE,
        "train.log changed while another start of the script ran, which may read it",
    ) in said.values()
    assert runner.why_alone().startswith("starts of the script change train.log here")
    threads, outcomes = at_once(runner, plans)  # as a search does with what failed from outside
    join(threads)
    assert {lane: o.status for lane, o in outcomes.items()} == {0: Status.OK, 1: Status.OK}
    assert sum(runs.group is not None for runs in every) == 1
    (told,) = [line for line in runner.closing_lines({}, []) if "at a time" in line]
    assert told.startswith("one trial ran at a time, once it was seen that starts of the script")
    assert runner.not_as_before() == ""
    assert state_of(Path.cwd(), "run", ROOM, "__pycache__") == before


def test_breaking_off_ends_both_starts(runner):
    runner.open(Path("run").absolute())
    endless = {"steps": (10**9, 10**9), "fresh": True}
    plans = [plan_of(1 + n, Purpose.SEARCH, n, **endless) for n in (0, 1)]
    threads, outcomes = at_once(runner, [replace(p, time_limit_s=500.0) for p in plans])
    every = [runner._runs, *runner._others]
    both = threading.Event()
    while not both.wait(0.2):
        assert not outcomes, outcomes
        if all(runs.start is not None and runs.group is not None for runs in every):
            both.set()
    tokens = [runs.group.token for runs in every]
    runner.break_off()
    join(threads)
    assert Status.OK not in {outcome.status for outcome in outcomes.values()}
    runner.close()
    assert [processes.members(token) for token in tokens] == [[], []]
    assert Path("train.log").read_text() == "of the user\n"
