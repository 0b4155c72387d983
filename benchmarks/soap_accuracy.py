"""Simulated against measured steps of plans by operator, parts and plans timed in one sitting.

    python benchmarks/soap_accuracy.py [--ranks 2] [--device auto] [--models vit] [--drawn 6]

Parts are timed anew, the baseline tells what is beside them, then all plans that have a name and
some drawn by seed are run in turn, several rounds of each. The baseline's own row is left out of
the errors, since the machine is fitted to it. With ``--ranks 1`` each model has one plan, and
nothing is fitted: what is compared is the sum of the parts. Needs a quiet machine, and the extra
``soap`` (numba). ``SOAP_BENCH_SCALE=small`` makes the models small enough for processors.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from _soap_bench import HERE, visit, with_repository

from perfsearch.config.schema import validate
from perfsearch.core.trial import Purpose, Trial
from perfsearch.runners.base import Plan as MeasuringPlan
from perfsearch.runners.soap import space
from perfsearch.runners.soap.runner import Soap
from perfsearch.soap.plan import Plan, data_parallel

SMALL = os.environ.get("SOAP_BENCH_SCALE") == "small"
BATCHES = {
    "vit": 24 if SMALL else 64,
    "dlrm": 128 if SMALL else 1024,
    "wide": 64 if SMALL else 256,
    "convolutions": 64 if SMALL else 1024,
}
ROUNDS = 3
DRIFTS = (2, 4, 8, 16)
"""Random changes away from data parallelism of a drawn plan, in turn."""


def opened(model: str, ranks: int, device: str, directory: Path) -> Soap:
    """A runner that has timed the model's parts."""
    settings = validate(
        {
            "strategy": {"name": "mcmc"},
            "workload": {
                "name": "custom",
                "factory": f"_soap_jobs:{model}",
                "global_batch": BATCHES[model],
                "draws_in_loader": False,
            },
            "nproc": ranks,
            "limits": {"startup_s": 240, "trial_s": 300},
            "runner": {"name": "soap", "device": device, "cache": str(directory / "cache")},
            "run_dir": str(directory),
        }
    )
    runner = Soap.from_settings(settings)
    runner.open(directory)
    return runner


def calibrated(runner: Soap, directory: Path) -> float:
    """Let the baseline's step say what is beside the parts; return it, in milliseconds."""
    plan = MeasuringPlan(
        0, Purpose.BASELINE, time_limit_s=300.0, log_directory=directory / "log", scored_seconds=4.0
    )
    outcome = runner.measure(dict(runner.baseline), plan)
    if outcome.measurement is None:
        raise SystemExit(f"the baseline failed: {outcome.reason}")
    trial = Trial(0, dict(runner.baseline), Purpose.BASELINE, outcome.status, outcome.measurement)
    if runner.devices > 1:
        runner.job.calibrate([trial], directory / "soap")
    return 1e3 * outcome.measurement.step_time_s


def plans_of(runner: Soap, drawn: int) -> dict[str, Plan]:
    """All that have a name, and some drawn by seed."""
    found = dict(runner.job.named)
    start = data_parallel(runner.inputs.graph, range(runner.devices))
    for number in range(drawn if runner.devices > 1 else 0):
        changes = DRIFTS[number % len(DRIFTS)]
        found[f"drawn {number}"] = runner.simulator.drift(start, changes, seed=number)
    distinct: dict[str, Plan] = {}
    for name, plan in found.items():
        if plan not in distinct.values() and runner.simulator.estimate(plan).fits:
            distinct[name] = plan
    return distinct


def tau(pairs: list[tuple[float, float]]) -> float:
    """Kendall's: how many pairs of plans are in the same order, less those that are not."""
    signs = [
        ((a > c) - (a < c)) * ((b > d) - (b < d))
        for (a, b), (c, d) in itertools.combinations(pairs, 2)
    ]
    return sum(signs) / len(signs)


def compare(model: str, ranks: int, device: str, drawn: int) -> None:
    """Print the rows of one model."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        runner = opened(model, ranks, device, directory)
        try:
            calibrated(runner, directory)
            plans = plans_of(runner, drawn)
            steps_ms: dict[str, list[float]] = {name: [] for name in plans}
            for turn in range(ROUNDS):
                for name, plan in plans.items():
                    kept = visit(runner, space.configuration_of(plan), turn)
                    if "step_ms" in kept:
                        steps_ms[name].append(kept["step_ms"])
                    else:
                        print(f"{model}: {name}: {kept['status']}: {kept['reason']}", flush=True)
            rows = [
                (name, 1e3 * runner.simulator.estimate(plan).seconds, steps_ms[name])
                for name, plan in plans.items()
                if steps_ms[name]
            ]
        finally:
            runner.close()
    pairs, errors = [], []
    for number, (name, simulated, times) in enumerate(rows):
        measured = statistics.median(times)
        pairs.append((simulated, measured))
        error = simulated / measured - 1
        fitted = number == 0 and ranks > 1
        if not fitted:
            errors.append(abs(error))
        print(
            f"| {model} | {name} | {simulated:.4g} | {measured:.4g} ({min(times):.4g} to "
            f"{max(times):.4g}) | {error:+.1%}{', fitted' if fitted else ''} |",
            flush=True,
        )
    if errors:
        print(
            f"\n{model}: {len(errors)} plans, median error {statistics.median(errors):.1%}, worst "
            f"{max(errors):.1%}" + (f", Kendall's tau {tau(pairs):.2f}" if len(pairs) > 1 else ""),
            end="\n\n",
            flush=True,
        )


def main() -> int:
    """Print a table a model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--models", nargs="*", default=["vit"], choices=list(BATCHES))
    parser.add_argument("--drawn", type=int, default=6)
    arguments = parser.parse_args()
    os.environ.update(with_repository())
    os.chdir(HERE)  # the jobs' module is imported from where the command is run
    print("| model | plan | simulated, ms | measured, ms | error |")
    print("| --- | --- | ---: | ---: | ---: |", flush=True)
    for model in arguments.models:
        compare(model, arguments.ranks, arguments.device, arguments.drawn)
    return 0


if __name__ == "__main__":
    sys.exit(main())
