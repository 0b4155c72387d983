"""What a grid finds where a search was run: the yardstick for the search's gain, in one sitting.

Measures every point of a grid once in warm workers, then the grid's best, the search's best and
the baseline again, interleaved, in fresh processes. Run it right after the search:

    perfsearch runner=ddp strategy=bayes run_dir=out/search
    python benchmarks/ddp_grid.py --search out/search \
        --grid nccl_nsocks_perthread=1,2,4,8 nccl_socket_nthreads=1,2,4 bucket_cap_mb=8,25,64,256
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from perfsearch.config.schema import validate
from perfsearch.core.knob import Value
from perfsearch.core.space import key_of
from perfsearch.core.trial import Outcome, Purpose
from perfsearch.runners.base import Plan
from perfsearch.runners.ddp.runner import DDP


def read_grid(arguments: list[str]) -> list[dict[str, Value]]:
    """Every combination of ``NAME=VALUE,VALUE`` arguments, process-scope names outermost."""
    names, values = [], []
    for argument in arguments:
        name, _, text = argument.partition("=")
        names.append(name)
        values.append([yaml.safe_load(v) for v in text.split(",")])
    return [dict(zip(names, point, strict=True)) for point in itertools.product(*values)]


def samples_per_s(outcome: Outcome) -> float | None:
    """The reading, or nothing where it failed."""
    return None if outcome.measurement is None else outcome.measurement.samples_per_s


def main() -> int:
    """Run the grid and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--search", type=Path, required=True, help="run_dir of the search")
    parser.add_argument("--grid", nargs="+", required=True, help="NAME=VALUE,VALUE ...")
    parser.add_argument("--repeats", type=int, default=3, help="fresh processes of each finalist")
    parser.add_argument("--seconds", type=float, default=300.0, help="time for the grid")
    options = parser.parse_args()
    plain: dict[str, Any] = yaml.safe_load((options.search / "config.yaml").read_text())
    plain["run_dir"] = str(options.search.parent / f"{options.search.name}-grid")
    summary = json.loads((options.search / "best" / "summary.json").read_text())
    runner = DDP.from_settings(validate(plain))
    logs = Path(plain["run_dir"]) / "logs"
    number = itertools.count()

    def measure(point: dict[str, Value], fresh: bool) -> float | None:
        n = next(number)
        purpose = Purpose.CONFIRM if fresh else Purpose.SEARCH
        plan = Plan(n, purpose, fresh=fresh, log_directory=logs / str(n), time_limit_s=60.0)
        outcome = runner.measure(point, plan)
        if outcome.measurement is None:
            print(f"  {outcome.status}: {outcome.reason[:120]}", flush=True)
        return samples_per_s(outcome)

    runner.open(Path(plain["run_dir"]))
    results: list[tuple[float, dict[str, Value]]] = []
    try:
        begin = time.monotonic()
        grid = read_grid(options.grid)
        for place, point in enumerate(grid):
            if time.monotonic() - begin > options.seconds:
                print(f"the grid's time is over after {place} of {len(grid)} points", flush=True)
                break
            reading = measure(runner.space.canonical({**runner.baseline, **point}), False)
            if reading is not None:
                results.append((reading, point))
                print(f"{reading:8.1f} samples/s  {point}", flush=True)
        seconds = time.monotonic() - begin
        results.sort(key=lambda r: -r[0])
        best_point = runner.space.canonical({**runner.baseline, **results[0][1]})
        found = {k: v for k, v in summary["knobs"].items() if k in runner.space.by_name}
        arms = {"baseline": runner.baseline, "grid": best_point, "search": found}
        if key_of(found) == key_of(runner.baseline):
            del arms["search"]
        readings: dict[str, list[float]] = {arm: [] for arm in arms}
        for repeat in range(options.repeats):
            for arm in list(arms) if repeat % 2 == 0 else list(arms)[::-1]:
                reading = measure(arms[arm], True)
                if reading is not None:
                    readings[arm].append(reading)
                    print(f"{arm:9s} {reading:8.1f}", flush=True)
    finally:
        runner.close()
    base = statistics.median(readings["baseline"])
    print(f"\ngrid: {len(results)} points in {seconds:.0f} s; best reading {results[0]}")
    print("| arm | samples/s, median of fresh processes | over the baseline |")
    print("|---|---|---|")
    for arm, values in readings.items():
        middle = statistics.median(values)
        print(
            f"| {arm} | {middle:.1f} ({min(values):.1f} to {max(values):.1f}) "
            f"| {middle / base - 1:+.1%} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
