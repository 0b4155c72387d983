"""Measure a table for `benchmarks/strategies.py`: every point of a grid, the best ones repeatedly.

    python benchmarks/measure_surface.py --out SURFACE.csv --seconds 500 \
        --grid bucket_cap_mb=8,25,64,256 static_graph=false,true \
        -- runner=ddp workload=resnet

What follows ``--`` is what the command takes. Names come from the slowest to change to the fastest:
put those first that need new processes. Points of the same processes are visited in random order,
once; then the baseline and the ``--top`` best are visited ``--visits`` times more, in fresh
processes, in rounds of random order, so that the table holds the noise between processes, too.
Knobs that the grid leaves out stay as in the baseline. The file is written anew after each visit,
and `runner=replay` reads it.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
import time
from pathlib import Path

from ddp_grid import read_grid

from perfsearch.config.compose import compose
from perfsearch.config.schema import validate
from perfsearch.core.knob import Configuration, Scope, Value
from perfsearch.core.objective import Objective
from perfsearch.core.space import key_of
from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.pipeline.search import build_runner
from perfsearch.runners.base import Plan, Runner
from perfsearch.tracking.export import write_trials


class Visits:
    """Visits configurations and keeps the table on disk."""

    def __init__(self, runner: Runner, names: list[str], out: Path, logs: Path) -> None:
        self.trials: list[Trial] = []
        self._runner, self._out, self._logs = runner, out, logs
        self._objective = Objective()
        self._knobs = [k for k in runner.space.knobs if k.name in names]

    def visit(self, point: Configuration, purpose: Purpose, fresh: bool) -> Trial:
        """Measure one configuration and write the table."""
        number, begin = len(self.trials), time.monotonic()
        directory = self._logs / str(number)
        plan = Plan(number, purpose, fresh=fresh, log_directory=directory, time_limit_s=120.0)
        outcome = self._runner.measure(point, plan)
        trial = Trial(number, dict(point), purpose, outcome.status)
        trial.measurement, trial.reason = outcome.measurement, outcome.reason
        trial.seconds = time.monotonic() - begin
        if outcome.measurement is not None and outcome.status is Status.OK:
            trial.cost = self._objective.cost(outcome.measurement)
            trial.objective = self._objective.from_cost(trial.cost)
        self.trials.append(trial)
        shown = {k.name: point[k.name] for k in self._knobs}
        told = f"{trial.objective:10.1f}" if trial.objective else f"{trial.status:>10}"
        why = f"  {trial.reason[:200]}" if trial.reason else ""
        print(f"{told} {purpose:8} {trial.seconds:6.2f} s  {shown}{why}", flush=True)
        write_trials(self._out.parent, self.trials, self._knobs, self._runner.baseline)
        (self._out.parent / "trials.csv").replace(self._out)
        return trial


def in_order(
    points: list[dict[str, Value]], runner: Runner, generator: random.Random
) -> list[dict[str, Value]]:
    """Points other than the baseline, once each; those of the same processes side by side, in
    random order.
    """
    scopes = {k.name: k.scope for k in runner.space.knobs}
    known = key_of(runner.baseline)
    apart: dict[str, dict[str, dict[str, Value]]] = {}
    for point in points:
        point = {
            n: float(v) if isinstance(runner.baseline[n], float) and isinstance(v, int) else v
            for n, v in point.items()
        }
        whole = runner.space.canonical({**runner.baseline, **point})
        if key_of(whole) == known:
            continue
        processes = key_of({n: v for n, v in whole.items() if scopes[n] is Scope.PROCESS})
        apart.setdefault(processes, {})[key_of(whole)] = whole
    ordered: list[dict[str, Value]] = []
    for group in apart.values():
        members = list(group.values())
        generator.shuffle(members)
        ordered += members
    return ordered


def main() -> int:
    """Measure and write."""
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--grid", nargs="+", required=True, help="NAME=VALUE,VALUE ...")
    parser.add_argument("--seconds", type=float, default=500.0, help="for everything")
    parser.add_argument("--share", type=float, default=0.6, help="of the seconds, for the grid")
    parser.add_argument("--top", type=int, default=10)
    parser.add_argument("--visits", type=int, default=3, help="more visits of the best")
    options = parser.parse_args(words[:cut])
    settings = validate(compose(words[cut + 1 :], {}))
    begin, generator = time.monotonic(), random.Random(settings.seed)

    def left(share: float) -> float:
        return begin + share * options.seconds - time.monotonic()

    options.out.parent.mkdir(parents=True, exist_ok=True)
    runner = build_runner(settings)
    with tempfile.TemporaryDirectory() as scratch:
        runner.open(Path(scratch))
        try:
            names = [word.partition("=")[0] for word in options.grid]
            visits = Visits(runner, names, options.out, Path(scratch) / "logs")
            visits.visit(dict(runner.baseline), Purpose.BASELINE, fresh=False)
            todo = in_order(read_grid(options.grid), runner, generator)
            for place, point in enumerate(todo):
                if left(options.share) <= 0:
                    print(f"time is up: {len(todo) - place} of {len(todo)} points are not visited")
                    break
                visits.visit(point, Purpose.SEARCH, fresh=False)
            good = [t for t in visits.trials[1:] if t.cost is not None]
            best = sorted(good, key=lambda t: t.cost or 0.0)[: options.top]
            again = [dict(runner.baseline), *(t.configuration for t in best)]
            rounds = (generator.sample(again, len(again)) for _ in range(options.visits))
            for point in itertools.chain.from_iterable(rounds):
                if left(1.0) <= 0:
                    print("time is up before the last visits")
                    break
                visits.visit(point, Purpose.CONFIRM, fresh=True)
        finally:
            runner.close()
    print(f"{len(visits.trials)} visits in {time.monotonic() - begin:.0f} s: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
