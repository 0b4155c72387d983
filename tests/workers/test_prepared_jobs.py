import resource
from dataclasses import asdict

import pytest
import torch

from perfsearch.workers import trial
from perfsearch.workloads.spec import WorkloadSpec


def spec(name: str = "gpt", **changes) -> dict:
    return asdict(WorkloadSpec(name, size="tiny", global_batch=8, **changes))


@pytest.fixture(autouse=True)
def _nothing_kept():
    yield
    trial._kept.clear()


@pytest.mark.parametrize("name", ["gpt", "resnet", "dlrm", "mlp"])
def test_a_prepared_job_is_the_one_that_a_rank_would_build(name: str) -> None:
    trial.prepare_job(spec(name), 3)
    job = trial.take_prepared_job(spec(name), 3)
    assert job is not None
    own = trial.build_job(WorkloadSpec(**spec(name)), 3)
    for found, expected in zip(job.model.parameters(), own.model.parameters(), strict=True):
        assert torch.equal(found, expected)
    assert trial.take_prepared_job(spec(name), 3) is None  # it is given away once


def test_another_seed_or_workload_is_not_what_was_prepared() -> None:
    trial.prepare_job(spec(), 3)
    assert trial.take_prepared_job(spec(), 4) is None
    assert trial.take_prepared_job(spec("mlp"), 3) is None
    trial.prepare_job(spec("mlp"), 3)
    assert trial.take_prepared_job(spec(), 3) is None  # the latest only


def test_the_users_own_code_is_left_to_the_ranks() -> None:
    trial.prepare_job(spec("custom", factory="no_such_module:build"), 0)
    assert not trial._kept


def test_a_workload_that_cannot_be_built_is_left_to_the_ranks() -> None:
    trial.prepare_job(spec(options={"width": 100, "heads": 3}), 0)
    assert not trial._kept


def test_a_workload_that_does_not_fit_the_memory_is_left_to_the_ranks(monkeypatch) -> None:
    monkeypatch.setattr(trial, "available_bytes", lambda: 2.0**20)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    trial.prepare_job(spec("mlp", options={"width": 8192, "layers": 4}), 0)
    assert not trial._kept
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_threads_are_as_before() -> None:
    before = torch.get_num_threads()
    trial.prepare_job(spec(), 0)
    assert torch.get_num_threads() == before
