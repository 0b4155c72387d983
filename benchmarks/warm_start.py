"""How many trials a prior search of a similar job saves, and what a misleading one costs.

    python benchmarks/warm_start.py [--seeds 8] [--surfaces interactions ...]

Each surface is searched by ``bayes`` for 25 trials, with a seed of its own; then anew, starting
from nothing (``cold``) or from what that search found: as it is (``same``); as another job might
have seen it, with effects of 0.7 of the size, 5% more noise and without its three best
(``similar``); with costs and configurations shuffled (``shuffled``); or with fast and slow
exchanged (``reversed``). Trials are those until a configuration within the
surface's tolerance was tried; regret is that of the best tried, in true value. Nothing is timed.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import _surfaces
import numpy as np

from perfsearch.core.hints import PriorSearch
from perfsearch.core.knob import Value
from perfsearch.core.trial import Trial
from perfsearch.strategies.bayes import Bayes

SURFACES = ["zero_gpt2large_4xh100", "ddp_gpt2small_4xh100_tcp", "interactions", "half_space"]
TRIALS = 40
BEFORE = 25
"""Trials of the prior search."""

Costs = list[tuple[dict[str, Value], float]]


def search(
    surface: _surfaces.Surface, seed: int, most: int, prior: PriorSearch | None
) -> tuple[Costs, list[float]]:
    """Relative costs of what was measured, and the regret after each trial."""
    trials: list[Trial] = []
    strategy = Bayes(surface.space, replace(surface.hints(trials), prior_search=prior), seed)
    found, regret, best = [], [], 0.0
    for number in range(most + 1):
        point = surface.baseline if number == 0 else strategy.ask()
        if point is None:
            break
        trial = surface.measure(point, number, seed)
        trials.append(trial)
        strategy.tell(trial)
        best = max(best, surface.quality(surface.space.canonical(point)))
        regret.append(1 / best - 1 if best else math.inf)
        if trial.cost is not None:
            found.append((dict(point), trial.cost))
    base = found[0][1]
    return [(point, math.log(cost / base)) for point, cost in found], regret


def similar(costs: Costs, seed: int) -> Costs:
    """As another job might have seen it."""
    generator = np.random.default_rng(seed)
    rest = sorted(costs, key=lambda pair: pair[1])[3:]
    return [(point, 0.7 * log + float(generator.normal(0, 0.05))) for point, log in rest]


def shuffled(costs: Costs, seed: int) -> Costs:
    """With costs and configurations shuffled."""
    logs = np.random.default_rng(seed).permutation([log for _, log in costs])
    return [(point, float(log)) for (point, _), log in zip(costs, logs, strict=True)]


KINDS: dict[str, Callable[[Costs, int], Costs] | None] = {
    "cold": None,
    "same": lambda costs, seed: costs,
    "similar": similar,
    "shuffled": shuffled,
    "reversed": lambda costs, seed: [(point, -log) for point, log in costs],
}


def prior_search_of(costs: Costs) -> PriorSearch:
    """The costs as a strategy gets them."""
    return PriorSearch("a prior search", tuple(sorted(costs, key=lambda pair: pair[1])))


def main() -> int:
    makers = _surfaces.surfaces()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--surfaces", nargs="*", default=SURFACES, choices=list(makers))
    arguments = parser.parse_args()
    marks = (2, 5, 10, 20, TRIALS)
    head = " | ".join(f"regret at {mark}" for mark in marks)
    print(f"| surface | start | trials: median | 90% | {head} | ends at |")
    print("|" + "---|" * (5 + len(marks)))
    for name in arguments.surfaces:
        surface = makers[name]()
        before = [search(surface, 1000 + s, BEFORE, None)[0] for s in range(arguments.seeds)]
        for kind, change in KINDS.items():
            needed, regrets, ends = [], [], []
            for seed in range(arguments.seeds):
                prior = None if change is None else prior_search_of(change(before[seed], seed))
                _, regret = search(surface, seed, TRIALS, prior)
                arrived = [n for n, r in enumerate(regret) if r <= surface.tolerance]
                needed.append(arrived[0] if arrived else TRIALS + 1)
                regrets.append([100 * regret[min(m, len(regret) - 1)] for m in marks])
                ends.append(len(regret) - 1)
            cells = [_trials(statistics.median(needed)), _trials(float(np.quantile(needed, 0.9)))]
            cells += [f"{value:.1f}" for value in np.mean(regrets, axis=0)]
            cells.append(f"{statistics.median(ends):g}")
            print(f"| {name} | {kind} | {' | '.join(cells)} |", flush=True)
    return 0


def _trials(value: float) -> str:
    return f"{TRIALS}+" if value > TRIALS else f"{value:.0f}"


if __name__ == "__main__":
    sys.exit(main())
