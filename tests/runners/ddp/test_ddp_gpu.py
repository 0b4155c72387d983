"""On real GPUs: NCCL's knobs, recovery from exhausted memory, memory given back."""

import os
from pathlib import Path

import pytest

from perfsearch.core import hardware
from perfsearch.core.hardware import Environment, detect_hardware
from perfsearch.core.objective import Limits
from perfsearch.core.trial import Status
from perfsearch.runners.base import Plan
from perfsearch.runners.ddp.runner import DDP
from perfsearch.workloads.spec import WorkloadSpec

FAULTS = Path(__file__).parents[2] / "support"
CARDS = detect_hardware("auto", Environment(Path())).gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(len(CARDS) < 2, reason="needs two GPUs and a CUDA build of torch"),
]


class Bench:
    def __init__(self, directory, workload, knobs, **environment):
        self.directory = directory
        self.trials = 0
        self.runner = DDP(
            DDP.Options("cuda", knobs),
            workload,
            Environment(directory, limits=Limits(180, 120, 15), **environment),
        )

    def measure(self, fresh=False, **changes):
        logs = self.directory / "logs" / str(self.trials)
        self.trials += 1
        plan = Plan(self.trials, fresh=fresh, log_directory=logs, scored_seconds=0.3)
        return self.runner.measure({**self.runner.baseline, **changes}, plan)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    made = Bench(
        tmp_path_factory.mktemp("gpu"),
        WorkloadSpec("gpt", size="tiny"),
        dict.fromkeys(
            ["bucket_cap_mb", "pin_memory", "nccl_algo", "nccl_proto", "nccl_buffsize"], "search"
        ),
    )
    made.before = hardware.used_gib(CARDS)
    made.first = made.measure()
    yield made
    made.runner.close()
    assert hardware.wait_until_free(CARDS, made.before, 20)


def test_a_measurement_on_gpus(bench):
    outcome = bench.first
    assert outcome.status is Status.OK, outcome.reason
    found = outcome.measurement
    assert found.world_size == len(CARDS)
    assert 0 < found.peak_allocated_gib <= found.peak_reserved_gib
    assert set(found.environment) >= {f"gpu_{i}" for i in range(len(CARDS))}
    phases = found.phases_ms
    inside = sum(phases[p] for p in ("to_device", "forward", "backward", "optimizer"))
    assert 0 < inside < 2 * found.step_time_s * 1e3


def test_step_scope_is_warm(bench):
    outcome = bench.measure(bucket_cap_mb=1.0, pin_memory=True)
    assert outcome.status is Status.OK, outcome.reason
    assert not outcome.fresh_process
    losses = bench.first.measurement.first_losses
    assert outcome.measurement.first_losses == pytest.approx(losses, rel=1e-3)


def test_new_processes_survive_their_first_backward_pass(bench):
    for _ in range(3):  # ranks begin with weights that their launcher drew: see own_thread_pool
        outcome = bench.measure(fresh=True)
        assert outcome.status is Status.OK, outcome.reason


@pytest.mark.parametrize("algo", ["Ring", "Tree"])
def test_group_scope_reaches_nccl(bench, algo):
    outcome = bench.measure(nccl_algo=algo)
    assert not outcome.fresh_process
    assert outcome.measurement.in_force["nccl_algo_used"] in ("Ring", "Tree", "NVLS")
    if outcome.measurement.in_force["nccl_algo_used"] != algo:
        assert outcome.status is Status.NOT_APPLIED
        pytest.xfail(f"NCCL used {outcome.measurement.in_force['nccl_algo_used']}: {algo} refused")
    assert outcome.status is Status.OK


def test_process_scope_is_fresh(bench):
    outcome = bench.measure(nccl_buffsize=2**20)
    assert outcome.status is Status.OK, outcome.reason
    assert outcome.fresh_process
    assert bench.measure().fresh_process


def test_exhausted_memory_on_one_rank_leaves_the_group_usable(tmp_path, monkeypatch):
    monkeypatch.chdir(FAULTS)
    fault = tmp_path / "fault.json"
    bench = Bench(
        tmp_path,
        WorkloadSpec("custom", factory="faults:build"),
        {},
        variables={"PERFSEARCH_TEST_FAULT": str(fault), "CUDA_LAUNCH_BLOCKING": "0"},
    )
    try:
        assert bench.measure().status is Status.OK
        fault.write_text('{"kind": "cuda memory", "rank": 1}')
        outcome = bench.measure()
        assert outcome.status is Status.OOM, outcome.reason
        assert outcome.reason.startswith("rank 1: OutOfMemoryError")
        fault.unlink()
        after = bench.measure()
        assert after.status is Status.OK, after.reason
        assert not after.fresh_process
    finally:
        bench.runner.close()
    assert "NCCL_ALGO" not in os.environ
