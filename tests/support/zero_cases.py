"""``runner=zero`` without ranks, and trials of it."""

from pathlib import Path

from support.zero_facts import GivenFacts, gpt_large

from perfsearch.core.hardware import Environment
from perfsearch.core.trial import Measurement, Purpose, Status, Trial
from perfsearch.runners.zero.runner import Zero
from perfsearch.workloads.spec import WorkloadSpec

SEARCHED = ("zero_stage", "micro_batch", "gradient_accumulation", "activation_checkpointing")


def make(batch="fixed", nproc=4, global_batch=64, facts=None, knobs=None, **options):
    runner = Zero(
        Zero.Options(knobs=knobs or dict.fromkeys(SEARCHED, "search"), **options),
        WorkloadSpec("gpt", "large", global_batch=global_batch),
        Environment(Path("/nonexistent/run"), nproc=nproc),
        batch,
        planning=options.get("card") is not None,
    )
    runner.memory.facts = GivenFacts(facts or gpt_large())
    return runner


def trial(number, configuration, peak=None, status=Status.OK):
    measured = None
    if peak is not None:
        measured = Measurement([0.1], 64, peak_allocated_gib=peak)
    cost = 0.1 / 64 if status is Status.OK else None
    return Trial(number, configuration, Purpose.SEARCH, status, measured, cost, objective=640.0)
