"""A profile on two real ranks over gloo."""

import pytest

from perfsearch.core.hardware import Environment
from perfsearch.core.objective import Limits
from perfsearch.core.trial import Purpose, Status
from perfsearch.runners.base import Plan
from perfsearch.runners.ddp.runner import DDP
from perfsearch.workloads.spec import WorkloadSpec

pytestmark = pytest.mark.slow

FACTORY = """
import torch
from torch import nn
from perfsearch.workloads.base import Job

calls = 0


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((8,), float(index) / 64)


def loss(model, batch):
    global calls
    calls += 1
    if calls == 15 and torch.distributed.get_rank() == 1:
        raise RuntimeError("the profile went wrong")
    return model(batch).square().mean()


def build():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    return Job(model, Data(), loss, lambda parameters: torch.optim.SGD(parameters, lr=1e-3))
"""


@pytest.fixture
def runner(tmp_path, monkeypatch):
    (tmp_path / "failing_job.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    made = DDP(
        DDP.Options("cpu", {"static_graph": "search"}),
        WorkloadSpec("custom", factory="failing_job:build"),
        Environment(tmp_path, nproc=2, limits=Limits(90, 60, 5)),
    )
    yield made
    made.close()


def plan(tmp_path, number, **changes):
    return Plan(
        number=number,
        purpose=Purpose.BASELINE,
        log_directory=tmp_path / str(number),
        scored_steps=(4, 4),
        time_limit_s=60.0,
        detail="full",
        **changes,
    )


def test_a_profile_that_fails_costs_no_score_and_the_next_one_works(runner, tmp_path):
    first = runner.measure(runner.baseline, plan(tmp_path, 0, begin_step=14, end_step=20))
    assert first.status is Status.OK, first.reason
    assert "the profile went wrong" in first.measurement.environment["unsupported"]["close look"]
    assert "comm_exposed" not in first.measurement.phases_ms or (
        "with_everything_ms" not in first.measurement.bottleneck_evidence
    )
    again = runner.measure(runner.baseline, plan(tmp_path, 1))
    assert again.status is Status.OK, again.reason
    assert again.measurement.bottleneck_evidence["without_communication_ms"] > 0
    ranks = again.measurement.environment["ranks"]
    assert [set(r) for r in ranks] == [{"host", "device", "phases_ms", "step_ms"}] * 2
    assert again.measurement.environment["precision"] == "fp32"
    assert again.measurement.flops_per_step > 0
    told = (tmp_path / "1" / "rank1.log").read_text()
    places = [told.index(f"s] {what}") for what in ("the trial begins", "the step is built")]
    places += [told.index(" steps are scored"), told.index("s] the trial has ended")]
    assert places == sorted(places)
