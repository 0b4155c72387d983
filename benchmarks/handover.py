"""Whether what a search hands over is as fast where perfsearch cannot be imported.

    python benchmarks/handover.py                         # two CPU processes
    python benchmarks/handover.py --device cuda --nproc 4
    python benchmarks/handover.py --given knobs.yaml      # without a search
    python benchmarks/handover.py --run-dir DIR           # of a search that this has made before

An unchanged script is searched by ``perfsearch-run --search``. Then three arms are started in turn,
in an order that is drawn anew each round: ``baseline`` (the script under torchrun), ``applied``
(``best/apply/run.sh``, with perfsearch blocked from import) and ``by perfsearch``
(``perfsearch-run --knobs best/config.yaml``). Each start trains for some epochs and prints its own
samples per second; the first epochs are discarded, and a start counts with the median of the rest.
Intervals are Student's, of the mean log ratio of starts of the same round.

The hand-over stands alone where ``applied`` over ``by perfsearch`` has 1 in its interval, and
``applied`` over ``baseline`` agrees with the speed-up that the search has confirmed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _handed_over import ENDLESS, shortened, without_perfsearch
from _searched import key_words

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "scripts" / "ddp_train.py"
RATE = re.compile(r"(\d+) samples/s")

# Small batches, so that the optimizer and the reduction of gradients are worth tuning.
SIZES = {"cpu": ["--width", "512", "--batch-size", "16"],
         "cuda": ["--width", "4096", "--batch-size", "64"]}  # fmt: skip
DISCARDED_EPOCHS = 1
PAIRS = (("applied", "baseline"), ("by perfsearch", "baseline"), ("applied", "by perfsearch"))


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4, help="of each start")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--trials", type=int, default=12, help="of the search")
    parser.add_argument("--seconds", type=float, default=120.0, help="of the search, at most")
    parser.add_argument("--repeats", type=int, default=8, help="of the confirmation, at most")
    parser.add_argument("--given", type=Path, help="YAML file of knobs to hand over, unsearched")
    parser.add_argument("--run-dir", type=Path, help="of a search; made where it is not there")
    parser.add_argument("--seed", type=int, default=0, help="of the order of starts")
    return parser.parse_args()


class Bench:
    """One script, its search, and the ways to start what was found.

    Args:
        options: of the command line.
        directory: for the search, and for what keeps perfsearch from being imported.

    """

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self.options = options
        self.run_dir = (options.run_dir or directory / "run").absolute()
        self.script = [str(SCRIPT), *SIZES[options.device]]
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if options.device == "cpu":
            self.environment["CUDA_VISIBLE_DEVICES"] = ""
        self.elsewhere = directory / "alone"  # python looks for modules where it is started
        self.alone = without_perfsearch(self.elsewhere, self.environment)

    def search(self) -> dict[str, Any]:
        """Search, unless the directory holds a finished search; return its summary."""
        file = self.run_dir / "best" / "summary.json"
        if self.options.given is not None:
            return self._handed_over(self.options.given)
        if not file.exists():
            keys = {
                "budget.trials": self.options.trials,
                "budget.seconds": self.options.seconds,
                "confirm.max_repeats": self.options.repeats,
                "run_dir": self.run_dir,
                "tracking.enabled": "false",
            }
            search = self._perfsearch_run("--search", *key_words(keys))
            command = [*search, *self.script, "--epochs", ENDLESS]
            subprocess.run(command, env=self.environment, check=True, timeout=1800)
        found: dict[str, Any] = json.loads(file.read_text())
        if found["is_baseline"]:
            raise SystemExit(
                f"{found['verdict']}: the baseline is handed over, so that there is nothing to "
                "compare. Search on a quieter machine, with more --repeats, or name --given FILE"
            )
        return found

    def _handed_over(self, file: Path) -> dict[str, Any]:
        """Write the knobs of a file as a search writes what it has found."""
        import yaml

        from perfsearch.runners._script import export
        from perfsearch.runners._script.ways import Way

        best = self.run_dir / "best"
        best.mkdir(parents=True, exist_ok=True)
        knobs = yaml.safe_load(file.read_text())
        (best / "config.yaml").write_text(yaml.safe_dump(knobs))
        way = Way(self.options.nproc, by_torchrun=True)
        command = [*self.script, "--epochs", ENDLESS]
        export.export_files(knobs, [], way, 1, command, False, ["ddp"], best / "apply")
        return {"verdict": f"as {file} says, unsearched", "knobs": knobs, "speed_up": None}

    def _perfsearch_run(self, *words: str) -> list[str]:
        nproc = f"--nproc-per-node={self.options.nproc}"
        return [sys.executable, "-m", "perfsearch.cli.run", nproc, *words]

    def rate(self, arm: str) -> float:
        """Samples per second of one start."""
        epochs = ["--epochs", str(self.options.epochs + DISCARDED_EPOCHS)]
        environment = self.alone
        if arm == "baseline":
            launch = ["torchrun", "--standalone", f"--nproc-per-node={self.options.nproc}"]
            command = [*launch, *self.script, *epochs]
        elif arm == "applied":
            command = ["sh", str(shortened(self.run_dir, epochs[1]))]
        else:
            best = str(self.run_dir / "best" / "config.yaml")
            command = [*self._perfsearch_run("--quiet", "--knobs", best), *self.script, *epochs]
            environment = self.environment
        # torch's own threads now and then abort a process that has done all it was to do
        place = self.elsewhere if environment is self.alone else None
        done = subprocess.run(
            command, env=environment, cwd=place, capture_output=True, text=True, timeout=600,
            check=False,
        )  # fmt: skip
        rates = [float(rate) for rate in RATE.findall(done.stdout)]
        if len(rates) != self.options.epochs + DISCARDED_EPOCHS:
            raise RuntimeError(f"{arm} did not train to its end:\n{done.stderr[-3000:]}")
        return statistics.median(rates[DISCARDED_EPOCHS:])


def table(rates: dict[str, list[float]], summary: dict[str, Any]) -> list[str]:
    """Gains of the arms beside what the search has confirmed."""
    from perfsearch.core.verdict import Interval, Plan, read

    lines = ["| throughput of | gain (95% interval) | starts each |", "| --- | --- | --- |"]
    for arm, over in PAIRS:
        logs = [math.log(a / b) for a, b in zip(rates[arm], rates[over], strict=True)]
        found = read(logs, Plan((len(logs),))).interval
        lines.append(f"| {arm} over {over} | {found.gain} | {found.pairs} |")
    confirmed = summary["speed_up"]
    shown = "-" if confirmed is None else Interval(**confirmed).gain
    pairs = "-" if confirmed is None else confirmed["pairs"]
    lines.append(f"| confirmed by the search | {shown} | {pairs} |")
    return lines


def main() -> int:
    options = options_of()
    generator = random.Random(options.seed)
    arms = ["baseline", "applied", "by perfsearch"]
    rates: dict[str, list[float]] = {arm: [] for arm in arms}
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(options, Path(directory))
        summary = bench.search()
        for place in range(options.rounds):
            for arm in generator.sample(arms, len(arms)):
                rates[arm].append(bench.rate(arm))
            shown = ", ".join(f"{arm} {rates[arm][-1]:.0f}" for arm in arms)
            print(f"round {place + 1}, samples/s: {shown}", flush=True)
        print(f"\n{summary['verdict']}\nfound: {summary['knobs']}")
        print((bench.run_dir / "best" / "apply" / "run.sh").read_text())
    print("\n".join(table(rates, summary)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
