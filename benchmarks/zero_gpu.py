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
import json
import random
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import _deepspeed_side
import _zero_report

from perfsearch import strategies
from perfsearch.config import Settings, validate
from perfsearch.runners.base import Plan
from perfsearch.runners.zero import Zero
from perfsearch.search.journal import Journal
from perfsearch.search.objective import Objective
from perfsearch.search.space import key_of
from perfsearch.search.trial import Measurement, Purpose, Status, Trial
from perfsearch.stages import baseline
from perfsearch.stages import search as searching
from perfsearch.stages.session import Session
from perfsearch.view import View

PER_GPU = 16
"""Samples a rank of the baseline's global batch."""
LARGEST_PER_GPU = 64
GRID_FIXED = (16, 8, 4)
GRID_FREE = (16, 24, 32, 40, 48, 56, 64)
CHECKPOINTED_FROM = 48
"""Smaller micro-batches fit without computing activations again, so the grid leaves that out."""
GRID_STEPS = (4, 60)
"""Scored steps of the grid; the side-by-side rounds have more."""
LLAMA = "llama"
COMMON = {"optimizer_implementation": "fused", "gradient_as_bucket_view": True}
"""What a hand-tuned job has already; the same in every configuration compared."""
REPEATS = 2


class Store:
    """Records, a line each, found again by ``part`` and ``key``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.records: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def has(self, part: str, key: str) -> bool:
        """Whether it was recorded."""
        return any(r["part"] == part and r["key"] == key for r in self.records)

    def of(self, part: str) -> list[dict[str, Any]]:
        """The records of a part."""
        return [r for r in self.records if r["part"] == part]

    def add(self, part: str, key: str, **values: Any) -> None:
        """Record something at once."""
        record = {"part": part, "key": key, **values}
        self.records.append(record)
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")


class NoTracker:
    """No MLflow here."""

    def trial(self, trial: Trial) -> None:
        """Take no note."""


class Bench:
    """Where, how large, and until when.

    Args:
        arguments: of the command line.

    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.ranks: int = arguments.ranks
        self.device: str = arguments.device
        self.size: str = arguments.size
        self.wheels: Path | None = arguments.wheels
        self.tiny: bool = arguments.size == "tiny"
        self.per_gpu: int = arguments.per_gpu
        self.store = Store(arguments.store)
        self.deadline = time.monotonic() + arguments.until_s

    def in_time(self) -> bool:
        """Whether another configuration may start."""
        return time.monotonic() < self.deadline

    def workload(self, size: str) -> dict[str, Any]:
        """GPT-2 of a size, or the second model."""
        if size == LLAMA:
            factory = "build_tiny" if self.tiny else "build"
            return {"name": "custom", "factory": f"benchmarks._llama:{factory}"}
        return {"name": "gpt", "size": size}

    def settings(self, rule: str, size: str, per_gpu: int, **changes: Any) -> Settings:
        """What a user would write for this."""
        knobs = {
            "zero_stage": "search",
            "micro_batch": "search",
            "activation_checkpointing": [0, 1],
            "gradient_accumulation": 1 if rule == "free" else "search",
            **COMMON,
        }
        runner: dict[str, Any] = {"name": "zero", "device": self.device, "knobs": knobs}
        if rule == "free":
            runner["max_train_batch_size"] = LARGEST_PER_GPU * self.ranks
        plain = {
            "runner": runner,
            "strategy": {"name": "fast"},
            "workload": {**self.workload(size), "global_batch": per_gpu * self.ranks},
            "batch": rule,
            "nproc": self.ranks,
            "budget": {"trials": 13, "seconds": 90.0},
            "sentinel_every": 0,
            "limits": {"startup_s": 240},
            **changes,
        }
        return validate(plain)

    @contextmanager
    def runner(self, settings: Settings) -> Iterator[Zero]:
        """A runner of its own, with processes of its own."""
        with tempfile.TemporaryDirectory() as directory:
            made = Zero.from_settings(replace(settings, run_dir=Path(directory)))
            made.open(Path(directory))
            try:
                yield made
            finally:
                made.close()


def visit(
    runner: Zero,
    number: int,
    configuration: dict[str, Any],
    logs: Path,
    scored_steps: tuple[int, int] = (8, 60),
) -> dict[str, Any]:
    """Measure one configuration warm; what to keep of it."""
    begin = time.monotonic()
    plan = Plan(
        number, Purpose.CONFIRM, time_limit_s=180.0, log_directory=logs / str(number),
        scored_steps=scored_steps,
    )  # fmt: skip
    runner._survived.add(key_of(configuration))  # a grid makes no checkpoints
    outcome = runner.measure(configuration, plan)
    kept: dict[str, Any] = {
        "configuration": configuration,
        "status": str(outcome.status),
        "reason": outcome.reason,
        "seconds": round(time.monotonic() - begin, 2),
    }
    measured = outcome.measurement
    if measured is not None:
        kept.update(_numbers(measured))
    print(f"  {configuration} {kept['status']} {kept.get('samples_per_s', '')} "
          f"({kept['seconds']} s)", flush=True)  # fmt: skip
    return kept


def _numbers(measured: Measurement) -> dict[str, Any]:
    evidence = measured.bottleneck_evidence
    return {
        "samples_per_s": round(measured.samples_per_s, 3),
        "samples_per_step": measured.samples_per_step,
        "step_ms": [round(s * 1e3, 3) for s in measured.step_seconds],
        "peak_allocated_gib": measured.peak_allocated_gib,
        "peak_reserved_gib": measured.peak_reserved_gib,
        "first_losses": measured.first_losses,
        "retries": evidence.get("allocator_retries"),
        "evidence": {k: v for k, v in evidence.items() if "gib" in k},
    }


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
        objective = Objective(settings.objective.metric)
        journal = Journal(Path(directory) / "journal.jsonl", {})
        session = Session(
            settings, runner, strategy, journal, View(objective), NoTracker(),  # type: ignore[arg-type]
            Path(directory), objective, trials,
        )  # fmt: skip
        described_s = time.monotonic() - begin
        baseline.run(session)
        baseline_s = time.monotonic() - begin
        allowed = settings.budget.seconds
        if allowed is not None:  # here the start of processes counts, too
            left = replace(settings.budget, seconds=max(1.0, allowed - baseline_s))
            session.settings = replace(settings, budget=left)
        try:
            reason = searching.run(session)
        except searching.BreakerError as error:
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
