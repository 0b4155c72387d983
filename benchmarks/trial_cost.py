"""What a trial costs beside its scored steps: a real search, read back from its journal.

    python benchmarks/trial_cost.py [--trials 20] [KEY=VALUE ...]

Runs ``perfsearch runner=ddp`` on the built-in workload with step-scope knobs (warm trials), then
confirms in fresh processes. Cost is the wall time from one ``tell`` to the next less scored and
discarded steps; discarded steps are shown apart.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from perfsearch.core.journal import read
from perfsearch.core.trial import Purpose, Status, Trial


def trials_of(run_dir: Path) -> list[Trial]:
    """The trials of a journal that ended well."""
    _, events = read(run_dir / "journal.jsonl")
    ended = [Trial.from_json(e.data["trial"]) for e in events if e.name == "finished"]
    return [t for t in ended if t.status is Status.OK]


def row(label: str, trials: list[Trial]) -> str:
    """A Markdown row."""
    costs = sorted(t.overhead_seconds for t in trials)
    p90 = costs[min(len(costs) - 1, int(0.9 * len(costs)))]
    measured = [t.measurement for t in trials if t.measurement is not None]
    discarded = statistics.median(m.discarded_seconds for m in measured)
    rewrap = statistics.median(m.rewrap_seconds for m in measured)
    return (
        f"| {label} | {len(trials)} | {statistics.median(costs):.3f} | {p90:.3f} | "
        f"{discarded:.3f} | {rewrap:.3f} |"
    )


def main() -> int:
    """Run the search and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--strategy", default="bayes")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name) / "run"
        command = [
            *(sys.executable, "-m", "perfsearch.cli.search", "runner=ddp"),
            *(f"strategy={options.strategy}", f"run_dir={run_dir}", "budget.seconds=null"),
            *(f"budget.trials={options.trials}", "confirm.max_repeats=3"),
            *options.overrides,
        ]
        subprocess.run(command, cwd=name, check=True, stdout=subprocess.DEVNULL)
        trials = trials_of(run_dir)
    search = [t for t in trials if t.purpose is Purpose.SEARCH]
    groups = {
        "warm": [t for t in search if not t.fresh_process],
        "search, new processes": [t for t in search if t.fresh_process],
        "confirmation, new processes": [t for t in trials if t.purpose is Purpose.CONFIRM],
    }
    print("| trials | number | cost s, median | cost s, p90 | discarded steps s | re-wrap s |")
    print("|---|---|---|---|---|---|")
    for label, members in groups.items():
        if members:
            print(row(label, members))
    return 0


if __name__ == "__main__":
    sys.exit(main())
