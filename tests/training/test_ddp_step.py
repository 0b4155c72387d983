"""DDP from knobs, on one rank in this process."""

import gc
import importlib
import itertools
import os
import weakref
from dataclasses import asdict, replace

import pytest
import torch

from perfsearch.core.hardware import GroupSpec
from perfsearch.knobs.model import graphs_compiled
from perfsearch.training import base
from perfsearch.training.process_groups import Groups
from perfsearch.workers.messages import TrialRequest
from perfsearch.workers.trial import Trainer, run_trial
from perfsearch.workloads.spec import WorkloadSpec

REQUEST = TrialRequest(
    serial=0, recipe="training.ddp", configuration={}, samples_per_step=8, scored_seconds=0.01
)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    workload = WorkloadSpec("resnet", options={"image_size": 16}).resolve("cpu", None, 1)
    spec = GroupSpec(workload=asdict(workload), device="cpu", nproc=1)
    groups = Groups(spec, tmp_path_factory.mktemp("group"), 0, 0, 1, torch.device("cpu"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more would wait for each other on a busy machine
    yield Trainer(groups)
    groups.destroy()
    torch.set_num_threads(threads)


def trial(trainer, **configuration):
    return run_trial(trainer, replace(REQUEST, configuration=configuration))


def test_everything_asked_for_is_read_back(trainer):
    asked = {
        "bucket_cap_mb": 2.0,
        "first_bucket_mb": 0.5,
        "gradient_as_bucket_view": True,
        "static_graph": True,
        "channels_last": True,
        "optimizer_implementation": "foreach",
        "omp_num_threads": 1,
        "cudnn_benchmark": True,
        "pin_memory": False,
        "dataloader_workers": 0,
        "hierarchical_group_size": 0,
    }
    found = trial(trainer, **asked).in_force
    assert {name: found[name] for name in asked} == asked


def test_nothing_passes_to_the_next_trial(trainer):
    first = trial(trainer)
    trial(trainer, channels_last=True, cudnn_benchmark=True, bucket_cap_mb=1.0)
    again = trial(trainer)
    assert again.in_force == first.in_force
    assert again.agreed["first_losses"] == first.agreed["first_losses"]


def test_closed_wrappers_are_gone(trainer, monkeypatch):
    """A wrapper that lives on takes part in every later backward pass."""
    ddp = importlib.import_module("perfsearch.training.ddp")
    wrappers = []
    build = ddp.build

    def remembering(context):
        step = build(context)
        wrappers.append(weakref.ref(step.net))
        return step

    monkeypatch.setattr(ddp, "build", remembering)
    for _ in range(3):
        trial(trainer)
    gc.collect()
    assert [w() for w in wrappers] == [None, None, None]


def test_a_loss_that_is_not_a_number_is_divergence(trainer, monkeypatch):
    job = trainer.job(reuse=True)
    count = itertools.count()
    loss = job.loss
    monkeypatch.setattr(
        job, "loss", lambda m, b: loss(m, b) * (float("nan") if next(count) > 2 else 1.0)
    )
    result = trial(trainer)
    assert result.status == "diverged"
    assert result.reason == "the loss is nan at step 4"
    assert len(result.agreed["first_losses"]) == 3


def test_group_scope_values_make_a_new_generation(trainer):
    trial(trainer)
    before = trainer.groups.generation
    trial(trainer)
    assert trainer.groups.generation == before
    request = replace(REQUEST, group_values={"nccl_algo": "Ring"}, group_env={"NCCL_ALGO": "Ring"})
    run_trial(trainer, request)
    assert trainer.groups.generation == before + 1

    assert os.environ["NCCL_ALGO"] == "Ring"
    trial(trainer)
    assert trainer.groups.generation == before + 2
    assert "NCCL_ALGO" not in os.environ


def test_a_model_that_is_taken_apart_is_a_new_object(trainer):
    one = trainer.job(reuse=False)
    two = trainer.job(reuse=False)
    assert one.model is not two.model
    for left, right in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("name", ["../x", "os.path", ""])
def test_recipes_are_modules_of_the_package(name):
    with pytest.raises(ValueError, match="is not a module name"):
        base.load(name)


@pytest.fixture
def transformer(tmp_path):
    shape = {"sequence_length": 8, "vocabulary": 16, "layers": 3, "width": 16, "heads": 2}
    workload = WorkloadSpec("gpt", options=shape).resolve("cpu", None, 1)
    spec = GroupSpec(workload=asdict(workload), device="cpu", nproc=1)
    groups = Groups(spec, tmp_path, 0, 0, 1, torch.device("cpu"))
    yield Trainer(groups)
    groups.destroy()


@pytest.mark.slow
def test_blocks_are_compiled_in_one_trial_and_no_more_in_the_next(transformer):
    plain = trial(transformer)
    asked = {"compile_mode": "default", "compile_scope": "blocks"}
    before = graphs_compiled()
    found = trial(transformer, **asked)
    assert found.status == "ok" and {name: found.in_force[name] for name in asked} == asked
    assert graphs_compiled() - before == 1  # of three blocks that are alike
    assert found.agreed["compile_seconds"] > 0
    assert found.agreed["first_losses"] == pytest.approx(plain.agreed["first_losses"], rel=1e-4)
    after = trial(transformer)
    assert after.in_force["compile_mode"] == "none" and "compile_seconds" not in after.agreed
    assert after.agreed["first_losses"] == plain.agreed["first_losses"]


def test_steps_in_which_code_is_compiled_anew_are_not_scored(trainer, monkeypatch):
    graphs = itertools.count(5, 3)
    monkeypatch.setattr(torch, "compile", lambda module, mode=None: module)
    monkeypatch.setattr("perfsearch.workers.trial.graphs_compiled", lambda: next(graphs))
    result = trial(trainer, compile_mode="default")
    assert result.status == "not_applied"
    assert result.reason.startswith("compile_mode=default compiled 3 graphs anew in the scored")
    assert trial(trainer).status == "ok"
