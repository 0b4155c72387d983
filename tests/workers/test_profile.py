"""A profile of real recipes, on one rank in this process."""

import gzip
import json
from dataclasses import asdict, replace

import pytest
import torch

from perfsearch.core.hardware import GroupSpec
from perfsearch.training.clock import PHASES
from perfsearch.training.process_groups import Groups
from perfsearch.workers.messages import TrialRequest, trace_file
from perfsearch.workers.trial import Trainer, run_trial
from perfsearch.workloads.spec import WorkloadSpec

LIGHT = TrialRequest(
    serial=0,
    recipe="training.ddp",
    configuration={},
    samples_per_step=8,
    scored_steps=(4, 4),
    scored_seconds=0.01,
)
FULL = replace(LIGHT, detail="full")


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    workload = WorkloadSpec("dlrm", size="tiny").resolve("cpu", None, 1)
    spec = GroupSpec(workload=asdict(workload), device="cpu", nproc=1)
    groups = Groups(spec, tmp_path_factory.mktemp("group"), 0, 0, 1, torch.device("cpu"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more would wait for each other on a busy machine
    yield Trainer(groups)
    groups.destroy()
    torch.set_num_threads(threads)


def test_every_phase_of_the_step_is_timed_and_together_they_are_the_step(trainer):
    found = run_trial(trainer, FULL)
    assert list(found.phases_ms) == [*PHASES[:4], "comm_exposed", "optimizer"]
    total = sum(found.phases_ms.values())
    assert total == pytest.approx(found.evidence["detailed_step_ms"], rel=0.03)
    assert found.environment["detailed_steps"][0] == found.agreed["discarded_steps"] + 4 + 1
    assert found.agreed["detail_seconds"] > 0
    parts = ("with_everything", "without_loading", "without_communication")
    assert all(found.evidence[f"{part}_ms"] > 0 for part in parts)


def test_the_score_and_the_next_trial_know_nothing_of_it(trainer):
    before = run_trial(trainer, LIGHT)
    profiled = run_trial(trainer, FULL)
    after = run_trial(trainer, LIGHT)
    assert before.agreed["first_losses"] == profiled.agreed["first_losses"]
    assert before.agreed["first_losses"] == after.agreed["first_losses"]
    assert len(profiled.agreed["step_seconds"]) == 4
    assert "detailed_step_ms" not in before.evidence
    assert "detailed_step_ms" not in after.evidence


def test_phases_of_a_light_trial_sum_to_the_step_and_have_an_error(trainer):
    found = run_trial(trainer, LIGHT)
    assert sum(found.phases_ms.values()) == pytest.approx(
        found.evidence["phases_step_ms"],
        rel=0.15,  # medians of a busy machine do not add up
    )
    assert set(found.phases_ms) >= {"backward", "comm_exposed", "optimizer"}
    assert all(f"{phase}_error_ms" in found.evidence for phase in found.phases_ms)


def test_operations_are_counted_where_the_job_states_none(trainer, monkeypatch):
    job = trainer.job(reuse=True)
    linear = sum(p.numel() for n, p in job.model.named_parameters() if p.dim() == 2)
    counted = run_trial(trainer, FULL).evidence["counted_flops"]
    assert 0 < counted < 6 * 8 * linear
    new_job = trainer._new_job

    def stating():
        return replace(new_job(), flops_per_sample=7.0)

    monkeypatch.setattr(trainer, "_warm", None)
    monkeypatch.setattr(trainer, "_new_job", stating)
    assert "counted_flops" not in run_trial(trainer, FULL).evidence
    monkeypatch.setattr(trainer, "_warm", None)


def test_a_trace_is_left_among_the_logs(trainer, tmp_path):
    run_trial(trainer, replace(FULL, trace=True, log_directory=str(tmp_path)))
    with gzip.open(trace_file(tmp_path, 0), "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert "aten::mm" in names


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_stages_of_zero_can_be_profiled(trainer, stage):
    configuration = {"zero_stage": stage, "micro_batch": 4}
    found = run_trial(trainer, replace(FULL, recipe="training.zero", configuration=configuration))
    assert ("comm_exposed" in found.phases_ms) is (stage < 2)
    assert ("without_communication_ms" in found.evidence) is (stage < 2)
    assert found.evidence["without_loading_ms"] > 0


def test_a_score_is_not_risked_where_the_time_is_nearly_over(trainer):
    found = run_trial(trainer, replace(FULL, timeout_s=0.02))
    assert found.status == "ok"
    assert "limits.trial_s" in found.environment["unsupported"]["close look"]
    assert "with_everything_ms" not in found.evidence


def test_a_profiler_that_fails_is_named_and_the_rest_is_there(trainer, monkeypatch, tmp_path):
    def fail(self):
        raise RuntimeError("no permission")

    monkeypatch.setattr(torch.profiler.profile, "start", fail)
    found = run_trial(trainer, replace(FULL, trace=True, log_directory=str(tmp_path)))
    assert found.environment["unsupported"] == {"profiler": "RuntimeError: no permission"}
    assert found.evidence["without_loading_ms"] > 0
