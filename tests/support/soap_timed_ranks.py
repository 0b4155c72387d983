"""What each of two gloo ranks runs for ``test_execute_times``: trials with and without timing."""

import random
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
from support import ranks
from support.soap_ranks import random_plan

from perfsearch.core.hardware import GroupSpec
from perfsearch.soap.executor.passes import OperatorClock
from perfsearch.soap.formats import dump_plan
from perfsearch.soap.recipe import captured_of
from perfsearch.training.process_groups import Groups
from perfsearch.workers.messages import TrialRequest
from perfsearch.workers.trial import Trainer, run_trial
from perfsearch.workloads.spec import WorkloadSpec

SAMPLES = 8


def launch(directory, workload):
    ranks.start(run, (str(directory), workload), nprocs=2)
    return torch.load(f"{directory}/found.pt")


def run(rank, directory, workload):
    """For data parallelism and two random plans: what a trial says without and with timing."""
    torch.set_num_threads(1)
    spec = WorkloadSpec(workload).resolve("cpu", None, 2)
    group = GroupSpec(workload=asdict(spec), device="cpu", nproc=2)
    groups = Groups(group, Path(directory), rank, rank, 2, torch.device("cpu"))
    trainer = Trainer(groups)
    doing = []
    span = OperatorClock.span

    def noted(self, column, owners):
        doing.append(trainer.phase)
        return span(self, column, owners)

    OperatorClock.span = noted
    usual = TrialRequest(
        0, "soap.recipe", {}, samples_per_step=SAMPLES, scored_steps=(4, 4), scored_seconds=0.01
    )
    graph = captured_of(trainer.job(True), SAMPLES, torch.device("cpu")).graph
    rng = random.Random(4)
    found = []
    for text in [None, *(dump_plan(graph, random_plan(graph, 2, rng), 2) for _ in range(2))]:
        plain = run_trial(trainer, replace(usual, configuration={"plan": text}))
        untimed = len(doing)
        timed = run_trial(
            trainer,
            replace(usual, configuration={"plan": text}, recipe_options={"examine": True}),
        )
        found.append((asdict(plain), untimed, asdict(timed), sorted(set(doing))))
        doing.clear()
    if rank == 0:
        torch.save(([o.name for o in graph.planned], found), f"{directory}/found.pt")
    groups.destroy()
    time.sleep(0.1)  # pytorch#190489: see perfsearch/training/process_groups.py
