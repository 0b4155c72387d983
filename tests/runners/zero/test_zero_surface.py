"""Strategies with this runner's space, hints and screen, on rows that were really measured."""

import csv
from pathlib import Path

import pytest
from support.zero_facts import GivenFacts, gpt_large

from perfsearch.core.hardware import Environment
from perfsearch.core.space import key_of
from perfsearch.core.trial import Measurement, Purpose, Status, Trial
from perfsearch.runners.zero.runner import Zero
from perfsearch.strategies import load
from perfsearch.workloads.spec import WorkloadSpec

SURFACE = Path(__file__).parents[2] / "data" / "zero_gpt2large_4xh100.csv"
TRIALS = 13


class Replayed:
    """The runner of GPT-2 large on four H100, its measurements served from the table."""

    def __init__(self, batch, micro_batches):
        knobs = {
            "zero_stage": "search",
            "micro_batch": micro_batches,
            "gradient_accumulation": 1 if batch == "free" else "search",
            "activation_checkpointing": 0,
            "gradient_as_bucket_view": True,
            "optimizer_implementation": "fused",
        }
        self.runner = Zero(
            Zero.Options(card="H100", knobs=knobs),
            WorkloadSpec("gpt", "large", global_batch=64),
            Environment(Path("/nonexistent/run"), nproc=4),
            batch,
            planning=True,
        )
        self.runner.memory.facts = GivenFacts(gpt_large())
        with SURFACE.open() as file:
            self.rows = {
                (int(r["zero_stage"]), int(r["micro_batch"]), int(r["gradient_accumulation"])): r
                for r in csv.DictReader(file)
                if r["activation_checkpointing"] == "false"
            }
        self.trials = []
        self.screened = []

    def trial(self, number, configuration, purpose=Purpose.SEARCH):
        whole = {**self.runner.pinned, **configuration}
        times = self.runner.batch.accumulation_of(whole)
        row = self.rows[whole["zero_stage"], whole["micro_batch"], times]
        if row["status"] != "ok":
            return Trial(number, configuration, purpose, Status(row["status"]))
        steps = [float(ms) / 1e3 for ms in row["step_ms"].split()]
        measured = Measurement(
            steps,
            whole["micro_batch"] * times * 4,
            peak_allocated_gib=float(row["peak_allocated_gib"]),
            peak_reserved_gib=float(row["peak_reserved_gib"]),
        )
        assert self.runner.memory.lacks_headroom(measured) == ""
        value = measured.samples_per_s
        return Trial(number, configuration, purpose, Status.OK, measured, 1 / value, 0.01, value)

    def search(self, name, seed=0, **options):
        kind = load(name)
        hints = self.runner.hints(self.trials)
        strategy = kind(self.runner.space, hints, seed, kind.Options(**options))
        self.trials.append(self.trial(0, self.runner.baseline, Purpose.BASELINE))
        strategy.tell(self.trials[0])
        while len(self.trials) <= TRIALS and (point := strategy.ask()) is not None:
            known = [t for t in self.trials if key_of(t.configuration) == key_of(point)]
            refusal = self.runner.screen(point)
            if known:
                strategy.tell(known[0])
            elif refusal is not None:
                self.screened.append(point)
                strategy.tell(Trial(-1, point, Purpose.SEARCH, Status.INVALID, reason=refusal))
            else:
                self.trials.append(self.trial(len(self.trials), point))
                strategy.tell(self.trials[-1])
        return max(t.objective for t in self.trials if t.objective is not None)

    def best_row(self):
        return max(
            float(row["samples_per_s"])
            for (stage, micro, times), row in self.rows.items()
            if row["status"] == "ok"
            and self.runner.space.feasible(
                self.runner.space.canonical({"zero_stage": stage, "micro_batch": micro,
                                             "gradient_accumulation": times}))
        )  # fmt: skip


def free():
    # micro-batches that every stage has a row of
    return Replayed("free", [1, 2, 4, 8, 12, 16, 20, 28, 32, 40])


def fixed():
    return Replayed("fixed", [4, 16])


@pytest.mark.parametrize("make", [free, fixed])
@pytest.mark.parametrize("name", ["fast", "auto"])
def test_thirteen_trials_are_enough_for_the_best_within_two_percent(name, make):
    options = {"num_micro_batches": 1} if name == "fast" else {}
    replayed = make()
    best = replayed.search(name, **options)
    assert best >= 0.98 * replayed.best_row()
    assert len(replayed.trials) - 1 <= TRIALS


def test_nothing_that_ran_is_screened_on_the_way_and_few_trials_run_out_of_memory():
    replayed = free()
    replayed.search("fast")
    for point in replayed.screened:
        assert replayed.rows[point["zero_stage"], point["micro_batch"], 1]["status"] == "oom"
    assert sum(t.status is Status.OOM for t in replayed.trials) <= 2
    # from the second trial of a stage on, predictions are close
    expected = replayed.runner.memory.estimate(
        {"zero_stage": 2, "micro_batch": 32, "activation_checkpointing": 0}, replayed.trials
    )
    assert expected.peak_gib == pytest.approx(70.466, rel=0.05)
