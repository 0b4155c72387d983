"""How often the verdict is right, where the truth is known.

    python benchmarks/verdict.py [starts] [steps] [searches]

`starts`: simulated comparisons between starts, by noise and by rule; `steps`: the same of what a
running job can switch between its steps. `searches`: whole searches on replayed tables. All of them
where none is named.

Of searches, table A: every configuration is as fast as the baseline. Wanted: "no gain" in at least
95%. Table B: one configuration is truly 3% faster. Wanted: its interval covers 1.03 in at least
93%. Steps vary by 2%, and each process by a factor of its own with a standard deviation of 1%.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import _verdict_tables as tables
import numpy as np

from perfsearch.cli.view import View
from perfsearch.config.schema import validate
from perfsearch.core.trial import Purpose
from perfsearch.pipeline.search import build_runner, search, strategy_factory
from perfsearch.pipeline.session import Result

GAIN = 1.03
STEP_S = 0.1
BATCH = 32


class Silent(View):
    """Says nothing."""

    def print(self, line: str) -> None:
        """Keep a line to itself."""


def write_table(path: Path, gain: float) -> None:
    """Twelve configurations of two knobs; the last is ``gain`` times as fast as the rest."""
    generator = np.random.default_rng(0)
    factors = np.exp(generator.normal(0, 0.02, 40))
    factors /= np.median(factors)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["bucket_cap_mb", "static_graph", "status", "samples_per_s", "step_ms"])
        for bucket in (1, 4, 16, 25, 64, 256):
            for static in ("false", "true"):
                faster = gain if (bucket, static) == (256, "true") else 1.0
                steps = STEP_S / faster * factors * 1e3
                rate = BATCH / float(np.median(steps)) * 1e3
                text = " ".join(f"{s:.4f}" for s in steps)
                writer.writerow([bucket, static, "ok", f"{rate:.4f}", text])


def run_one(table: Path, seed: int, directory: Path) -> Result:
    """One whole search: baseline, twelve trials, confirmation."""
    settings = validate(
        {
            "runner": {"name": "replay", "table": str(table), "process_noise": 0.01},
            "strategy": {"name": "random"},
            "workload": {"name": "gpt"},
            "seed": seed,
            "budget": {"trials": 12, "seconds": None},
            "tracking": {"enabled": False},
            "run_dir": str(directory / f"{table.stem}-{seed}"),
        }
    )
    return search(settings, build_runner(settings), strategy_factory(settings), Silent())


def fast_one(result: Result) -> int | None:
    """Number of the search trial that is truly faster, where the search visited it."""
    for trial in result.trials:
        fast = trial.configuration == {"bucket_cap_mb": 256, "static_graph": True}
        if fast and trial.purpose is Purpose.SEARCH:
            return trial.number
    return None


def searches(count: int) -> None:
    """Run both tables and print what came of them."""
    no_gain = covered = confirmed = gains = 0
    widths: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        same, faster = directory / "same.csv", directory / "faster.csv"
        write_table(same, 1.0)
        write_table(faster, GAIN)
        for seed in range(count):
            no_gain += run_one(same, seed, directory).verdict.winner is None
            result = run_one(faster, seed, directory)
            interval = result.verdict.intervals.get(fast_one(result) or -1)
            gains += result.verdict.winner is not None
            if interval is not None:
                confirmed += 1
                covered += interval.low <= GAIN <= interval.high
                widths.append(interval.half_width)
    print(f"identical: 'no gain' in {no_gain} of {count} ({no_gain / count:.1%})")
    print(
        f"3% faster: the interval covers it in {covered} of {confirmed} confirmations of that "
        f"configuration ({covered / confirmed:.1%}); half-width {statistics.median(widths):.3f} "
        f"(median); a gain was claimed in {gains} of {count} searches"
    )


def show(table: Callable[[int], Iterator[str]], count: int) -> None:
    """Print a table of ``count`` comparisons under its heading."""
    print(f"\n### {(table.__doc__ or '').splitlines()[0]}\n\n{count} comparisons each.\n")
    for line in table(count):
        print(line, flush=True)


def main() -> int:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", metavar="starts|steps|searches")
    parser.add_argument("--searches", type=int, default=200)
    parser.add_argument("--comparisons", type=int, default=4000, help="simulated ones of a row")
    options = parser.parse_args()
    what = options.what or ["starts", "steps", "searches"]
    begin = time.monotonic()
    if "starts" in what:
        for table in (tables.starts, tables.time_ends, tables.overstated, tables.kinds):
            show(table, options.comparisons)
    if "steps" in what:
        for table in (tables.steps, tables.lengths, tables.comes_and_goes):
            show(table, max(1, options.comparisons // 4))
    if "searches" in what:
        searches(options.searches)
    print(f"\n{time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
