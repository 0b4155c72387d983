"""Trials at the same time on shares of this machine."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from perfsearch.core import hardware
from perfsearch.core.hardware import Environment, Gpu, GroupSpec, usable_cores
from perfsearch.core.objective import Limits
from perfsearch.core.trial import Outcome, Status
from perfsearch.runners.base import Plan
from perfsearch.runners.ddp.runner import DDP
from perfsearch.runners.zero.runner import Zero
from perfsearch.workers import processes
from perfsearch.workloads.spec import WorkloadSpec


def runner_of(directory: Path, kind: type[DDP | Zero] = DDP) -> DDP | Zero:
    environment = Environment(directory, nproc=1, limits=Limits(90, 60, 5), parallel_trials=2)
    knob = "static_graph" if kind is DDP else "zero_stage"
    options = kind.Options(device="auto", knobs={knob: "search"})
    return kind(options, WorkloadSpec("mlp"), environment)


def plan_of(directory: Path, lane: int, **more: object) -> Plan:
    logs = directory / "logs" / str(lane)
    plan = Plan(lane, lane=lane, log_directory=logs, scored_seconds=0.05, time_limit_s=60.0)
    return replace(plan, **more)


def at_once(
    runner: DDP | Zero, plans: list[Plan]
) -> tuple[list[threading.Thread], dict[int, Outcome]]:
    outcomes: dict[int, Outcome] = {}

    def measure(plan: Plan) -> None:
        outcomes[plan.lane] = runner.measure(runner.baseline, plan)

    threads = [threading.Thread(target=measure, args=(plan,), daemon=True) for plan in plans]
    for thread in threads:
        thread.start()
    return threads, outcomes


@pytest.mark.slow
@pytest.mark.skipif(len(usable_cores()) < 2, reason="a share needs a CPU core of its own")
def test_each_lane_has_processes_and_cores_of_its_own(tmp_path: Path) -> None:
    runner, mine = runner_of(tmp_path, Zero), usable_cores()
    try:
        threads, outcomes = at_once(runner, [plan_of(tmp_path, lane) for lane in (0, 1)])
        for thread in threads:
            thread.join(240)
        assert {lane: o.status for lane, o in outcomes.items()} == {0: Status.OK, 1: Status.OK}
        used = []
        for pool in runner._pools.pools:
            pids = pool._group.pids
            used.append({tuple(psutil.Process(pid).cpu_affinity()) for pid in pids})
            assert pids
        assert used == [{lane.cores} for lane in runner.hardware.lanes]
        assert not set(runner.hardware.lanes[0].cores) & set(runner.hardware.lanes[1].cores)
        assert usable_cores() == mine
    finally:
        runner.close()


@pytest.mark.slow
@pytest.mark.skipif(len(usable_cores()) < 2, reason="a share needs a CPU core of its own")
def test_breaking_off_ends_both_trials_and_every_process(tmp_path: Path) -> None:
    runner = runner_of(tmp_path)
    try:
        endless = {"scored_steps": (10**9, 10**9), "scored_seconds": 1e9, "time_limit_s": 500.0}
        plans = [plan_of(tmp_path, lane, **endless) for lane in (0, 1)]
        threads, outcomes = at_once(runner, plans)
        both = threading.Event()
        while not both.wait(0.2):
            assert not outcomes, outcomes
            if all(p._group is not None for p in runner._pools.pools):
                both.set()
        tokens = [pool._group.token for pool in runner._pools.pools]
        runner.break_off()
        for thread in threads:
            thread.join(60)
        assert {outcome.status for outcome in outcomes.values()} != {Status.OK}
        assert len(outcomes) == 2
    finally:
        runner.close()
    assert [processes.members(token) for token in tokens] == [[], []]


CARDS = [Gpu(f"GPU-{i}", "NVIDIA H100", 80.0) for i in range(4)]


@pytest.mark.skipif(len(usable_cores()) < 2, reason="a share needs a CPU core of its own")
@pytest.mark.parametrize("kind", [DDP, Zero])
def test_each_lane_sees_gpus_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[DDP | Zero]
) -> None:
    monkeypatch.setattr(hardware, "visible_gpus", lambda: CARDS)
    monkeypatch.setattr(hardware, "torch_version", lambda: "2.9.0")
    runner = runner_of(tmp_path, kind)
    shown: dict[int, dict[str, str]] = {}

    class Kept:
        def __init__(self, lane: int) -> None:
            self.lane = lane

        def measure(
            self, spec: GroupSpec, request: object, time_limit_s: float, fresh: bool = False
        ) -> Outcome:
            shown[self.lane] = spec.env
            return Outcome(Status.CRASH)

    runner._pools.pools = [Kept(0), Kept(1)]
    for lane in (0, 1):
        runner.measure(runner.baseline, plan_of(tmp_path, lane))
    assert [shown[lane]["CUDA_VISIBLE_DEVICES"] for lane in (0, 1)] == ["GPU-0", "GPU-1"]
    assert runner.device_set() == "GPU-0,GPU-1"
    assert "GPUs GPU-0; GPU-1" in runner.remarks[0]
