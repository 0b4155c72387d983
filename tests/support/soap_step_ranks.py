"""What each of several gloo ranks runs for ``test_soap_step``: recipes one after another."""

import random
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
from support import ranks
from support.soap_ranks import random_plan

from perfsearch.core.hardware import GroupSpec
from perfsearch.soap.formats import dump_plan
from perfsearch.soap.recipe import captured_of
from perfsearch.training.process_groups import Groups
from perfsearch.workers.messages import TrialRequest
from perfsearch.workers.trial import Trainer, run_trial
from perfsearch.workloads.spec import WorkloadSpec

SAMPLES_PER_RANK = 4


def launch(directory, world, workload, plans):
    arguments = (str(directory), world, workload, plans)
    ranks.start(run, arguments, nprocs=world)
    return torch.load(f"{directory}/found.pt")


def run(rank, directory, world, workload, plans):
    torch.set_num_threads(1)
    spec = WorkloadSpec(workload).resolve("cpu", None, world)
    group = GroupSpec(workload=asdict(spec), device="cpu", nproc=world)
    groups = Groups(group, Path(directory), rank, rank, world, torch.device("cpu"))
    trainer = Trainer(groups)
    batch = SAMPLES_PER_RANK * world
    request = TrialRequest(
        0, "training.ddp", {}, samples_per_step=batch, scored_steps=(3, 3), scored_seconds=0.01
    )
    results = [run_trial(trainer, request)]
    graph = captured_of(trainer.job(True), batch, torch.device("cpu")).graph
    rng = random.Random(1)
    texts = [None, *(dump_plan(graph, random_plan(graph, world, rng), world) for _ in range(plans))]
    for text in texts:
        soap = replace(request, recipe="soap.recipe", configuration={"plan": text})
        results.append(run_trial(trainer, soap))
    rounded = replace(request, recipe="soap.recipe", recipe_options={"perturbed": True})
    results.append(run_trial(trainer, rounded))
    if rank == 0:
        found = [(r.status, r.agreed["first_losses"], r.in_force, r.evidence) for r in results]
        torch.save(found, f"{directory}/found.pt")
    groups.destroy()
    time.sleep(0.1)  # pytorch#190489: see perfsearch/training/process_groups.py
