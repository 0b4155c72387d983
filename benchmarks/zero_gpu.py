"""`runner=zero` on real GPUs: predicted memory, searches against a grid, a rescue from OOM.

    python benchmarks/zero_gpu.py all --store STORE.jsonl [--ranks 4] [--until-s 540]
    python benchmarks/zero_gpu.py deepspeed --store STORE.jsonl --wheels DIRECTORY
    python benchmarks/zero_gpu.py report --store STORE.jsonl > benchmarks/results/zero.md

Parts: ``search-fixed``, ``search-free``, ``grid-fixed``, ``grid-free``, ``memory``, ``side``,
``rescue``; ``all`` is these in that order; ``deepspeed`` is apart. Each appends to the store as it
goes and skips what is there, so a part that was cut short goes on where it ended. Needs torch,
numpy, psutil, pynvml and scikit-learn; start it at the repository's root. On 4 H100 ``all`` is
meant to take 540 s and ``deepspeed`` 500 s.
"""

from __future__ import annotations

import argparse
import random
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import _deepspeed_side
import _zero_report
from _zero_bench import LLAMA, Bench, NoTracker, visit

from perfsearch import strategies
from perfsearch.cli.view import View
from perfsearch.config.schema import Settings
from perfsearch.core.journal import Journal
from perfsearch.core.space import key_of
from perfsearch.core.trial import Measurement, Purpose, Status, Trial
from perfsearch.pipeline import baseline, explore
from perfsearch.pipeline.session import BreakerError, Session

PER_GPU = 16
"""Samples a rank of the baseline's global batch."""
GRID_FIXED = (16, 8, 4)
GRID_FREE = (16, 24, 32, 40, 48, 56, 64)
CHECKPOINTED_FROM = 48
"""Smaller micro-batches fit without computing activations again, so the grid leaves that out."""
GRID_STEPS = (4, 60)
"""Scored steps of the grid; the side-by-side rounds have more."""
REPEATS = 2


def grid(bench: Bench, rule: str) -> None:
    """Every stage, micro-batch and checkpointing that can fit, in random order, one visit each."""
    sizes = GRID_FIXED if rule == "fixed" else GRID_FREE
    least = max(sizes) if rule == "fixed" else CHECKPOINTED_FROM
    points = [
        {"micro_batch": m, "zero_stage": z, "activation_checkpointing": c}
        for m in sizes for z in (0, 1, 2, 3) for c in (0, 1) if c == 0 or m >= least
    ]  # fmt: skip
    random.Random(0).shuffle(points)
    _visit_all(bench, f"grid-{rule}", bench.settings(rule, bench.size, bench.per_gpu), points)


def memory(bench: Bench) -> None:
    """The second model; of the first every configuration of the free grid is predicted, too."""
    points = [
        {"zero_stage": z, "micro_batch": m, "activation_checkpointing": c}
        for z in (0, 1, 2, 3) for m, c in ((8, 0), (16, 0), (16, 1))
    ]  # fmt: skip
    _visit_all(bench, f"memory-{LLAMA}", bench.settings("free", LLAMA, bench.per_gpu), points)


def _visit_all(bench: Bench, part: str, settings: Settings, points: list[dict[str, Any]]) -> None:
    """Visit what is not on record. With ``batch=free``, two small steps come first.

    What they show is all that the memory model knows when each other visit is predicted.
    """
    probes = [
        {"zero_stage": 0, "micro_batch": m, "activation_checkpointing": 0} for m in (2, 4)
    ] if settings.batch == "free" else []  # fmt: skip
    todo = [p for p in points if not bench.store.has(part, key_of(p))]
    if not todo:
        return
    small: list[Trial] = []
    with bench.runner(settings) as runner, tempfile.TemporaryDirectory() as logs:
        for number, point in enumerate([*probes, *todo]):
            if not bench.in_time():
                print(f"{part}: time is up, {len(probes) + len(todo) - number} left")
                return
            configuration, is_probe = runner.space.canonical(point), number < len(probes)
            expected = runner.memory.estimate(configuration, small)
            if not is_probe and _implied_oom(bench, part, point):
                kept: dict[str, Any] = {
                    "configuration": point, "status": "oom", "reason": "a smaller one did"
                }  # fmt: skip
            else:
                kept = visit(runner, number, configuration, Path(logs), GRID_STEPS)
            if is_probe and "peak_allocated_gib" in kept:
                measured = Measurement([1.0], 1, peak_allocated_gib=kept["peak_allocated_gib"])
                small.append(Trial(number, configuration, Purpose.SEARCH, Status.OK, measured))
            bench.store.add(
                f"{part}-probe" if is_probe else part,
                key_of(point),
                gpu=runner.hardware.device_name,
                expected=vars(expected) if expected else None,
                **kept,
            )


def _implied_oom(bench: Bench, part: str, point: Mapping[str, Any]) -> bool:
    return any(
        r["status"] == "oom"
        and all(r["configuration"][k] == point[k] for k in point if k != "micro_batch")
        and r["configuration"]["micro_batch"] <= point["micro_batch"]
        for r in bench.store.of(part)
    )


def run_search(bench: Bench, part: str, name: str, settings: Settings) -> None:
    """A search as the command does it, its seconds counted from before the first process."""
    if bench.store.has(part, name):
        return
    begin = time.monotonic()
    with bench.runner(settings) as runner, tempfile.TemporaryDirectory() as directory:
        trials: list[Trial] = []
        kind = strategies.load(settings.strategy.name)
        options = kind.Options(**settings.strategy.options)
        strategy = kind(runner.space, runner.hints(trials), settings.seed, options)
        objective = settings.objective
        journal = Journal(Path(directory) / "journal.jsonl", {})
        session = Session(
            settings, runner, strategy, journal, View(objective), NoTracker(),  # type: ignore[arg-type]
            Path(directory), objective, trials,
        )  # fmt: skip
        described_s = time.monotonic() - begin
        baseline_s = 0.0
        try:
            baseline.run(session)
            baseline_s = time.monotonic() - begin
            allowed = settings.budget.seconds
            if allowed is not None:  # here the start of processes counts, too
                left = replace(settings.budget, seconds=max(1.0, allowed - baseline_s))
                session.settings = replace(settings, budget=left)
            reason = explore.run(session)
        except BreakerError as error:
            reason = str(error)
        seconds = time.monotonic() - begin
        journal.close()
        best = session.best
        advice = "" if best else runner.advice(trials)
        predicted = []
        for place, trial in enumerate(trials):
            expected = runner.memory.estimate(trial.configuration, trials[:place])
            real = trial.measurement.peak_allocated_gib if trial.measurement else None
            predicted.append([expected.peak_gib if expected else None, real])
    bench.store.add(
        part,
        name,
        gpu=runner.hardware.device_name,
        seconds=round(seconds, 1),
        described_s=round(described_s, 1),
        baseline_s=round(baseline_s, 1),
        trials=len(session.search_trials),
        failed=sum(t.status.is_failure for t in session.search_trials),
        screened=session.screened,
        reason=reason,
        advice=advice,
        baseline=session.baseline.objective if session.baseline else None,
        baseline_status=str(session.baseline.status) if session.baseline else "",
        best=None if best is None else best.objective,
        best_configuration=None if best is None else best.configuration,
        predicted=predicted,
        visited=[[t.configuration, str(t.status), t.objective, round(t.seconds, 2)]
                 for t in trials],
    )  # fmt: skip


def searches(bench: Bench, rule: str) -> None:
    """``fast`` and ``auto`` on the job of the grid."""
    for name, options in (("fast", {"num_micro_batches": 1}), ("auto", {})):
        chosen = {"name": name, **options}
        settings = bench.settings(rule, bench.size, bench.per_gpu, strategy=chosen)
        run_search(bench, f"search-{rule}", name, settings)


def side(bench: Bench) -> None:
    """Hand-tuned DDP, the grid's best and what searches chose, in turn, warm, several rounds."""
    for rule in ("fixed", "free"):
        arms = _zero_report.arms(bench.store.records, rule)
        part = f"side-{rule}"
        todo = [
            (n, a) for n in range(REPEATS) for a in arms if not bench.store.has(part, f"{a}/{n}")
        ]
        if not todo:
            continue
        settings = bench.settings(rule, bench.size, bench.per_gpu)
        with bench.runner(settings) as runner, tempfile.TemporaryDirectory() as logs:
            for number, (turn, arm) in enumerate(todo):
                if not bench.in_time():
                    return
                configuration = runner.space.canonical(arms[arm])
                kept = visit(runner, number, configuration, Path(logs))
                bench.store.add(part, f"{arm}/{turn}", **kept)


def rescue(bench: Bench) -> None:
    """A baseline that does not fit; the search must end with something that trains."""
    settings = bench.settings(
        "fixed", bench.size, 64, strategy={"name": "fast", "num_micro_batches": 1},
        budget={"trials": 6, "seconds": 120.0},
    )  # fmt: skip
    run_search(bench, "rescue", "fast", settings)


def deepspeed(bench: Bench) -> None:
    """DeepSpeed's own tuner on the same job, and what its choice gives when it is measured."""
    on_gpu = bench.device != "cpu"
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with _deepspeed_side.environment(bench.wheels, directory, bench.ranks, on_gpu):
            if not bench.store.has("deepspeed", "tuner"):
                limit_s = bench.deadline - time.monotonic() - 45.0
                found = _deepspeed_side.tune(bench.size, bench.ranks, on_gpu, directory, limit_s)
                bench.store.add("deepspeed", "tuner", **found)
            tuned = bench.store.of("deepspeed")[0]
            print(f"  {tuned['experiments']} experiments in {tuned['seconds']} s: "
                  f"{tuned['readings']}\n{tuned['log']}", flush=True)  # fmt: skip
            if tuned["chosen"] is None or bench.store.has("deepspeed", "chosen"):
                return
            kept = _deepspeed_side.measured(tuned["chosen"], bench.size, bench.ranks, directory)
            bench.store.add("deepspeed", "chosen", **kept)
            print(f"  its choice: {kept}", flush=True)


PARTS = {
    "search-fixed": lambda bench: searches(bench, "fixed"),
    "search-free": lambda bench: searches(bench, "free"),
    "grid-fixed": lambda bench: grid(bench, "fixed"),
    "grid-free": lambda bench: grid(bench, "free"),
    "memory": memory,
    "side": side,
    "rescue": rescue,
    "deepspeed": deepspeed,
}


def main() -> int:
    """Run the parts that were asked for, in the order of ``PARTS``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("parts", nargs="+", choices=[*PARTS, "all", "report"])
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", default="cuda", help="cpu tries the script itself")
    parser.add_argument("--size", default="large")
    parser.add_argument("--wheels", type=Path, help="directory of DeepSpeed's wheels to unpack")
    parser.add_argument("--per-gpu", type=int, default=PER_GPU)
    parser.add_argument("--until-s", type=float, default=540.0)
    arguments = parser.parse_args()
    bench = Bench(arguments)
    if "report" in arguments.parts:
        print(_zero_report.markdown(bench.store.records), end="")
        return 0
    for name, part in PARTS.items():
        of_all = "all" in arguments.parts and name != "deepspeed"
        if (name in arguments.parts or of_all) and bench.in_time():
            begin = time.monotonic()
            print(f"== {name} ({socket.gethostname()})", flush=True)
            part(bench)
            print(f"   {time.monotonic() - begin:.0f} s; {bench.deadline - time.monotonic():.0f} "
                  "s left", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
