"""Whether verdicts hold for jobs of uneven steps: told intervals against the jobs' own clocks.

    python benchmarks/uneven.py record --store FOLDER
    python benchmarks/uneven.py replay --store FOLDER [--searches 100]
    python benchmarks/uneven.py search --store FOLDER
    python benchmarks/uneven.py identical --store FOLDER [--searches 10]

Six kinds of scripts (``_uneven_job.py``), each with a loader that has no worker and one that has
one. ``record`` runs each plainly and keeps when its steps ended, by its own clock. ``replay``
searches the records; wanted: the interval of the one configuration holds the ratio of the clocks in
at least 95%. ``search`` searches the script itself. ``identical`` searches two configurations that
are the same; wanted: no gain.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verdict import Silent

from perfsearch.config.schema import validate
from perfsearch.core.steps import whole_periods
from perfsearch.pipeline.search import build_runner, search, strategy_factory
from perfsearch.pipeline.session import Result

JOB = Path(__file__).parent / "_uneven_job.py"
KINDS = ("pause", "bursts", "lengths", "rollout", "saving", "validation")
WORKERS = (0, 1)
KNOB = "dataloader_workers"
STEPS = 300
WARMUP = 8
BATCH = 16


def own_clock(store: Path, kind: str, workers: int) -> list[float]:
    """Seconds of each step of a plain run, by the script's own clock, once it has warmed up."""
    ends = json.loads((store / f"{kind}-{workers}.json").read_text())
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    return seconds[WARMUP:]


def step_s(store: Path, kind: str, workers: int) -> float:
    """Mean seconds of a step, by the script's own clock."""
    return statistics.fmean(whole_periods(own_clock(store, kind, workers)))


def ratio(store: Path, kind: str) -> float:
    """By how much the script is faster with workers, as its own clock says."""
    return step_s(store, kind, WORKERS[0]) / step_s(store, kind, WORKERS[1])


def record(store: Path, kind: str) -> None:
    """Run a script plainly, with each number of workers."""
    for workers in WORKERS:
        clock = store / f"{kind}-{workers}.json"
        subprocess.run(
            [
                *(sys.executable, str(JOB), kind, "--steps", str(STEPS)),
                *("--workers", str(workers), "--clock", str(clock)),
                *("--scratch", str(store / "scratch.pt")),
            ],
            check=True,
        )
    print(f"{kind}: {ratio(store, kind) - 1:+.1%} by its own clock", flush=True)


def run(settings: dict[str, Any]) -> Result:
    """One whole search."""
    checked = validate({"tracking": {"enabled": False}, "workload": {"name": "gpt"}, **settings})
    return search(checked, build_runner(checked), strategy_factory(checked), Silent())


def told(result: Result) -> tuple[float, float, float] | None:
    """Ratio and ends of the interval of what is no baseline."""
    interval = result.verdict.interval
    return None if interval is None else (interval.ratio, interval.low, interval.high)


def replayed(store: Path, kind: str, searches: int) -> None:
    """Search the records of a script, the slower being the baseline, under seeds of their own."""
    slower = max(WORKERS, key=lambda workers: step_s(store, kind, workers))
    truth = max(ratio(store, kind), 1 / ratio(store, kind))
    held, seen, ratios = 0, 0, []
    with tempfile.TemporaryDirectory() as name:
        table = Path(name) / f"{kind}.csv"
        with table.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([KNOB, "purpose", "status", "step_ms", "samples_per_s"])
            for workers in WORKERS:
                steps = own_clock(store, kind, workers)
                text = " ".join(f"{1e3 * s:.4f}" for s in steps)
                rate = BATCH / statistics.fmean(steps)
                purpose = "baseline" if workers == slower else "search"
                writer.writerow([workers, purpose, "ok", text, f"{rate:.4f}"])
        for seed in range(searches):
            result = run(
                {
                    "runner": {"name": "replay", "table": str(table), "process_noise": 0.01},
                    "strategy": {"name": "grid"},
                    "seed": seed,
                    "budget": {"trials": 2, "seconds": None},
                    "objective": {"min_gain": 0.0},
                    "run_dir": str(Path(name) / f"{kind}-{seed}"),
                }
            )
            found = told(result)
            if found is not None:
                seen += 1
                held += found[1] <= truth <= found[2]
                ratios.append(found[0])
    middle = f"{statistics.median(ratios) - 1:+.1%}" if ratios else "no finalist"
    print(
        f"{kind}: {truth - 1:+.1%} by its own clock; of {searches} searches {seen} told an "
        f"interval, {held} of them held it; median {middle}",
        flush=True,
    )


def searched(store: Path, kind: str) -> None:
    """Search a script itself, between two plain runs of it: machines are not the same for long."""
    record(store, kind)
    before = ratio(store, kind)
    command = [str(JOB), kind, "--steps", str(STEPS), "--scratch", str(store / "scratch.pt")]
    result = run(
        {
            "runner": {"name": "ddp", "device": "cpu", "knobs": {KNOB: list(WORKERS)}},
            "workload": {"name": "script", "command": command, "draws_in_loader": False},
            "strategy": {"name": "grid"},
            "nproc": 1,
            "objective": {"min_gain": 0.0},
            "budget": {"trials": 2, "seconds": None},
            "run_dir": str(store / f"search-{kind}"),
        }
    )
    record(store, kind)
    found, truth = told(result), math.sqrt(before * ratio(store, kind))
    holds = found is not None and found[1] <= truth <= found[2]
    print(
        f"{kind}: {truth - 1:+.1%} by its own clock, {'held' if holds else 'NOT held'}: "
        f"{result.verdict.reason}",
        flush=True,
    )


def identical(store: Path, seed: int) -> None:
    """Search buckets that are all larger than the model."""
    result = run(
        {
            "runner": {"name": "ddp", "device": "cpu", "knobs": {"bucket_cap_mb": [25, 26]}},
            "workload": {"name": "mlp"},
            "strategy": {"name": "grid"},
            "nproc": 2,
            "seed": seed,
            "objective": {"min_gain": 0.0},
            "budget": {"trials": 2, "seconds": None},
            "run_dir": str(store / f"identical-{seed}"),
        }
    )
    said = "no gain" if result.verdict.winner is None else "A GAIN"
    print(f"identical, seed {seed}: {said}: {result.verdict.reason}", flush=True)


def main() -> int:
    """Do what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("record", "replay", "search", "identical"))
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--searches", type=int)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    options = parser.parse_args()
    store: Path = options.store.absolute()
    store.mkdir(parents=True, exist_ok=True)
    if options.what == "identical":
        for seed in range(options.searches or 10):
            identical(store, seed)
        return 0
    actions: dict[str, Callable[[Path, str], None]] = {
        "record": record,
        "replay": lambda store, kind: replayed(store, kind, options.searches or 100),
        "search": searched,
    }
    for kind in options.kinds:
        actions[options.what](store, kind)
    return 0


if __name__ == "__main__":
    sys.exit(main())
