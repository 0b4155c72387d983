"""What each of several gloo ranks runs for ``test_zero``: configurations one after another."""

from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.multiprocessing
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from perfsearch.workers.bootstrap import Groups
from perfsearch.workers.messages import GroupSpec, TrialRequest
from perfsearch.workers.trainer import Trainer
from perfsearch.workers.trial import _Feed
from perfsearch.workloads.spec import WorkloadSpec

STEPS = 4
SAMPLES_PER_RANK = 4


def run(rank, directory, world_size, workload, configurations):
    torch.set_num_threads(1)
    spec = WorkloadSpec(workload).resolve("cpu", None, world_size)
    group = GroupSpec(workload=asdict(spec), device="cpu", nproc=world_size)
    groups = Groups(group, Path(directory), rank, rank, world_size, torch.device("cpu"))
    trainer = Trainer(groups)
    request = TrialRequest(0, "zero", {}, samples_per_step=SAMPLES_PER_RANK * world_size)
    found = [one(trainer, replace(request, configuration=c,
                                  group_values={"shard": c.get("shard_group_size")}))
             for c in configurations]  # fmt: skip
    torch.save(found, Path(directory) / f"rank{rank}.pt")
    groups.destroy()


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


def launch(directory, world_size, configurations, workload="gpt"):
    """Run them in new processes; what each rank found, in a list a rank."""
    arguments = (str(directory), world_size, workload, configurations)
    torch.multiprocessing.spawn(run, arguments, nprocs=world_size)
    return [torch.load(Path(directory) / f"rank{r}.pt") for r in range(world_size)]
