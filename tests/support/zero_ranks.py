"""What each of several gloo ranks runs for ``test_zero``: configurations one after another."""

import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import torch
from support import ranks
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from perfsearch.core.hardware import GroupSpec
from perfsearch.training.base import LoaderOptions
from perfsearch.training.process_groups import Groups
from perfsearch.workers.messages import TrialRequest
from perfsearch.workers.trial import Trainer, _Feed
from perfsearch.workloads import gpt
from perfsearch.workloads.spec import WorkloadSpec

STEPS = 4
SAMPLES_PER_RANK = 4


def grouped():
    """The small GPT, its optimizer's groups made by the number, order and shape of parameters."""

    def optimizer(parameters):
        first, *rest = parameters
        matrices = [p for p in rest if p.ndim > 1]
        others = [p for p in rest if p.ndim < 2]
        return torch.optim.SGD(
            [
                {"params": [first], "lr": 0.3},
                {"params": matrices, "weight_decay": 0.1},
                {"params": others, "momentum": 0.5},
            ],
            lr=0.1,
        )

    job = gpt.build(WorkloadSpec("gpt", "tiny"), 0)
    return replace(job, optimizer=optimizer)


def spec_of(workload, world_size):
    """A workload by its name; ``grouped`` is the one above."""
    factory = f"{__name__}:grouped" if workload == "grouped" else None
    spec = WorkloadSpec("custom" if factory else workload, factory=factory)
    return spec.resolve("cpu", None, world_size)


def run(rank, directory, world_size, workload, half, configurations):
    torch.set_num_threads(1)
    spec = spec_of(workload, world_size)
    group = GroupSpec(workload=asdict(spec), device="cpu", nproc=world_size)
    groups = Groups(group, Path(directory), rank, rank, world_size, torch.device("cpu"))
    trainer = Trainer(groups)
    if half:
        trainer.job(True).autocast_dtype["cpu"] = torch.bfloat16  # shared by every copy of it
    request = TrialRequest(0, "training.zero", {}, samples_per_step=SAMPLES_PER_RANK * world_size)
    found = [one(trainer, replace(request, configuration=c,
                                  group_values={"shard": c.get("shard_group_size")}))
             for c in configurations]  # fmt: skip
    torch.save(found, Path(directory) / f"rank{rank}.pt")
    groups.destroy()
    time.sleep(0.1)  # pytorch#190489: see perfsearch/training/process_groups.py


def one(trainer, request):
    trainer.reset()
    trainer.groups.ensure(request.group_values, {}, 60.0)
    step = trainer.build(request)
    try:
        feed = _Feed(trainer, step, request.samples_per_step)
        losses = [float(step.run(feed, lambda phase: None)) for _ in range(STEPS)]
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(step.net, options=options)
        weights = {k.removeprefix("module."): v.clone() for k, v in weights.items()}
        result = {"losses": losses, "weights": weights, "in_force": step.in_force(),
                  "bytes": {k: round(v * 2**30) for k, v in step.evidence().items()}}  # fmt: skip
        step.survive()
        return result
    finally:
        step.close()


def run_form(rank, directory, world_size, forms, workload):
    """Train with the exported lines alone, on the same data from the same start."""
    torch.set_num_threads(1)
    spec = spec_of(workload, world_size)
    group = GroupSpec(workload=asdict(spec), device="cpu", nproc=world_size)
    groups = Groups(group, Path(directory), rank, rank, world_size, torch.device("cpu"))
    trainer = Trainer(groups)
    groups.ensure({}, {}, 60.0)
    found = []
    for code, micro_batch, times in forms:
        trainer.reset()
        job = trainer.host_job()
        names = {}
        exec(compile(code, "zero.py", "exec"), names)
        net, optimizer = names["build"](job.model, job.blocks, job.optimizer)
        step = SimpleNamespace(job=job, loader=LoaderOptions(micro_batch))
        feed = _Feed(trainer, step, SAMPLES_PER_RANK * world_size)
        for _ in range(STEPS):
            names["train_step"](net, optimizer, job.loss, [feed() for _ in range(times)])
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(net, options=options)
        found.append({k.removeprefix("module."): v.clone() for k, v in weights.items()})
    torch.save(found, Path(directory) / f"rank{rank}.pt")
    groups.destroy()
    time.sleep(0.1)  # pytorch#190489: see perfsearch/training/process_groups.py


def launch_forms(directory, world_size, forms, workload="gpt"):
    """The weights that each exported form ends with."""
    directory = tempfile.mkdtemp(dir=directory)
    arguments = (directory, world_size, forms, workload)
    ranks.start(run_form, arguments, nprocs=world_size)
    return torch.load(Path(directory) / "rank0.pt")


def launch(directory, world_size, configurations, workload="gpt", half=False):
    """Run them in new processes; what each rank found, in a list a rank."""
    directory = tempfile.mkdtemp(dir=directory)  # a store of its own
    arguments = (directory, world_size, workload, half, configurations)
    ranks.start(run, arguments, nprocs=world_size)
    return [torch.load(Path(directory) / f"rank{r}.pt") for r in range(world_size)]
