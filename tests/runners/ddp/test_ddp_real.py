"""Real ranks over gloo: warm, regrouped and fresh; one group is shared by most tests."""

import math
import os

import pytest

from perfsearch.core.hardware import Environment
from perfsearch.core.objective import Limits
from perfsearch.core.trial import Purpose, Status
from perfsearch.runners.base import Plan
from perfsearch.runners.ddp.runner import DDP
from perfsearch.workers import processes
from perfsearch.workers.pool import not_in_force
from perfsearch.workloads.spec import WorkloadSpec

pytestmark = pytest.mark.slow

SEARCHED = (
    "bucket_cap_mb",
    "first_bucket_mb",
    "gradient_as_bucket_view",
    "static_graph",
    "hierarchical_group_size",
    "optimizer_implementation",
    "dataloader_workers",
    "prefetch_factor",
)


class Bench:
    def __init__(self, directory, nproc, limits=None):
        self.directory = directory
        self.trials = 0
        environment = Environment(directory, nproc=nproc, limits=limits or Limits(90, 60, 5))
        knobs = dict.fromkeys(SEARCHED, "search")
        self.runner = DDP(DDP.Options("cpu", knobs), WorkloadSpec("mlp"), environment)

    def measure(self, fresh=False, stop_above_cost_s=None, **changes):
        plan = Plan(
            number=self.trials,
            purpose=Purpose.SEARCH,
            fresh=fresh,
            log_directory=self.directory / "logs" / str(self.trials),
            scored_seconds=0.05,
            time_limit_s=60.0,
            stop_above_cost_s=stop_above_cost_s,
        )
        self.trials += 1
        return self.runner.measure({**self.runner.baseline, **changes}, plan)

    @property
    def token(self):
        return self.runner._pools.pools[0]._group.token

    def left(self, token):
        """Processes of a group that ended; the one that groups are forked from stays."""
        return processes.members(token, exclude=[self.runner._pools.pools[0]._preloaded.pid])


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    bench = Bench(tmp_path_factory.mktemp("pair"), 2)
    bench.first = bench.measure()
    yield bench
    token = bench.token
    bench.runner.close()
    assert processes.members(token) == []


def test_a_trial_says_everything_that_a_measurement_holds(pair):
    outcome = pair.first
    assert outcome.status is Status.OK, outcome.reason
    assert outcome.fresh_process
    measured = outcome.measurement
    assert measured.world_size == 2
    assert measured.samples_per_step == 128
    assert 8 <= len(measured.step_seconds) <= 60
    assert all(0 < s < 10 for s in measured.step_seconds)
    assert measured.discarded_steps >= 3
    assert len(measured.first_losses) == 5
    assert {"dataloader_next", "to_device", "forward", "backward", "optimizer"} <= set(
        measured.phases_ms
    )
    assert 0.05 < measured.peak_allocated_gib < 5
    assert measured.flops_per_step == 6 * 128 * outcome.extra["info"]["parameters"]
    assert measured.in_force["bucket_cap_mb"] == 25.0
    for rank in range(2):
        assert (pair.directory / "logs" / "0" / f"rank{rank}.log").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"bucket_cap_mb": 1.0, "first_bucket_mb": 0.25},
        {"bucket_cap_mb": 3.7, "gradient_as_bucket_view": True},
        {"static_graph": True, "optimizer_implementation": "fused"},
        {"optimizer_implementation": "foreach", "dataloader_workers": 1, "prefetch_factor": 4},
    ],
)
def test_step_scope_is_warm_and_trains_the_same(pair, changes):
    outcome = pair.measure(**changes)
    assert outcome.status is Status.OK, outcome.reason
    assert not outcome.fresh_process
    found = outcome.measurement
    assert set(changes) <= set(found.in_force)
    assert not_in_force(changes, found.in_force) == []
    assert found.first_losses == pytest.approx(pair.first.measurement.first_losses, rel=1e-5)


def test_the_same_configuration_repeats_its_losses_exactly(pair):
    again = pair.measure().measurement
    assert again.first_losses == pair.first.measurement.first_losses


def test_a_slow_configuration_is_stopped_early(pair):
    outcome = pair.measure(stop_above_cost_s=1e-6)
    assert outcome.status is Status.PRUNED
    assert outcome.measurement.step_seconds


def test_a_refusal_by_the_library_is_invalid(pair):
    outcome = pair.measure(prefetch_factor=-1, dataloader_workers=1)
    assert outcome.status is Status.INVALID
    assert "prefetch_factor" in outcome.reason


def test_fresh_means_new_processes(pair):
    before = {p.pid for p in pair.left(pair.token)}
    outcome = pair.measure(fresh=True)
    assert outcome.status is Status.OK
    assert outcome.fresh_process
    assert before
    assert before.isdisjoint(p.pid for p in pair.left(pair.token))
    assert outcome.measurement.first_losses == pair.first.measurement.first_losses


def test_hierarchical_all_reduce_on_four_ranks(tmp_path):
    bench = Bench(tmp_path, 4)
    try:
        flat = bench.measure()
        assert flat.status is Status.OK, flat.reason
        split = bench.measure(hierarchical_group_size=2, bucket_cap_mb=1.0)
        assert split.status is Status.OK, split.reason
        assert not split.fresh_process
        assert split.measurement.in_force["hierarchical_group_size"] == 2
        losses = flat.measurement.first_losses
        assert split.measurement.first_losses == pytest.approx(losses, rel=1e-5)
        assert all(math.isfinite(v) for v in losses)
        assert bench.measure().measurement.first_losses == pytest.approx(losses, rel=1e-5)
    finally:
        bench.runner.close()


def test_a_start_that_takes_too_long_is_infrastructure(tmp_path):
    bench = Bench(tmp_path, 2, limits=Limits(startup_s=0.5, trial_s=60, grace_s=2))
    outcome = bench.measure()
    assert outcome.status is Status.INFRASTRUCTURE
    assert outcome.reason.startswith("start-up took longer than 0.5 s")
    assert not (tmp_path / "groups").exists()
    bench.runner.close()


def test_the_environment_of_the_controller_is_not_touched(pair):
    before = dict(os.environ)
    pair.measure()
    assert dict(os.environ) == before
