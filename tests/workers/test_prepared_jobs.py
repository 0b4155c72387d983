import resource
from dataclasses import asdict

import pytest
import torch

from perfsearch.workers import prepared_job
from perfsearch.workloads.spec import WorkloadSpec


def spec(name: str = "gpt", **changes) -> dict:
    return asdict(WorkloadSpec(name, size="tiny", global_batch=8, **changes))


@pytest.fixture(autouse=True)
def _nothing_kept():
    yield
    prepared_job._kept.clear()


@pytest.mark.parametrize("name", ["gpt", "resnet", "dlrm", "mlp"])
def test_a_prepared_job_is_the_one_that_a_rank_would_build(name: str) -> None:
    prepared_job.prepare_job(spec(name), 3)
    job = prepared_job.take_prepared_job(spec(name), 3)
    assert job is not None
    own = prepared_job.build_job(WorkloadSpec(**spec(name)), 3)
    for found, expected in zip(job.model.parameters(), own.model.parameters(), strict=True):
        assert torch.equal(found, expected)
    assert prepared_job.take_prepared_job(spec(name), 3) is None  # it is given away once


def test_another_seed_or_workload_is_not_what_was_prepared() -> None:
    prepared_job.prepare_job(spec(), 3)
    assert prepared_job.take_prepared_job(spec(), 4) is None
    assert prepared_job.take_prepared_job(spec("mlp"), 3) is None
    prepared_job.prepare_job(spec("mlp"), 3)
    assert prepared_job.take_prepared_job(spec(), 3) is None  # the latest only


def test_the_users_own_code_is_left_to_the_ranks() -> None:
    prepared_job.prepare_job(spec("custom", factory="no_such_module:build"), 0)
    assert not prepared_job._kept


def test_a_workload_that_cannot_be_built_is_left_to_the_ranks() -> None:
    prepared_job.prepare_job(spec(options={"width": 100, "heads": 3}), 0)
    assert not prepared_job._kept


def test_a_workload_that_does_not_fit_the_memory_is_left_to_the_ranks(monkeypatch) -> None:
    monkeypatch.setattr(prepared_job, "available_bytes", lambda: 2.0**20)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    prepared_job.prepare_job(spec("mlp", options={"width": 8192, "layers": 4}), 0)
    assert not prepared_job._kept
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_threads_are_as_before() -> None:
    before = torch.get_num_threads()
    prepared_job.prepare_job(spec(), 0)
    assert torch.get_num_threads() == before
