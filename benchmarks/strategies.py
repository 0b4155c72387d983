"""How many trials each strategy and each peer needs, on surfaces whose truth is known.

    python benchmarks/strategies.py run --store STORE.jsonl [--surfaces A,B] [--contenders X,Y]
    python benchmarks/strategies.py report --store STORE.jsonl > benchmarks/results/strategies.md

``run`` adds what the store lacks, a line a surface, contender and seed, and may be killed at any
time. Every contender is told the baseline as trial 0 and hands over the configuration with the
best observation; regret is taken from its true value.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

BUDGET = 60
OWN = ("auto", "bayes", "fast", "mcmc", "nevergrad", "optuna")
PEERS = (
    "random",
    "optuna_tpe",
    "optuna_tpe_paid",
    "optuna_gp",
    "ng_TwoPointsDE",
    "ng_PortfolioDiscreteOnePlusOne",
    "ng_NGOpt",
    "horovod",
    "ds_grid",
    "ds_model",
)
SEEDS = {"optuna_gp": 10}
"""Contenders with fewer than 30 seeds, as an ask of theirs takes more than 0.1 s."""

_FREE_PROPOSALS = 50
_FEWEST_SEEDS = 5
"""Contenders with fewer seeds on a surface are not reported."""


@dataclass
class Race:
    """One contender on one surface with one seed.

    Attributes:
        quality: share of the best true throughput of what would be handed over, a trial an entry.
        seconds: seconds of measurement so far, a trial an entry.
        failed: number of failed trials.
        ask_seconds: longest ask, and their mean.
        ended: why it ended before the budget, if it did.

    """

    surface: str
    contender: str
    seed: int
    tolerance: float
    quality: list[float]
    seconds: list[float]
    failed: int
    trials: int
    ask_seconds: tuple[float, float]
    ended: str


def race(surface_name: str, name: str, seed: int) -> Race:
    """Run one contender to the budget or its own end."""
    from _peers import OwnPeer, contender
    from _surfaces import surfaces

    surface = surfaces()[surface_name]()
    peer = contender(name, surface, seed, BUDGET)
    best = surface.measure(surface.baseline, 0, seed)
    worst = math.log(best.cost or 1.0)
    if isinstance(peer, OwnPeer):
        peer.tell(best)
    elif name.startswith(("optuna", "ng", "ds")):
        peer.answer(dict(surface.baseline), math.log(best.cost or 1.0), False)
    quality: list[float] = []
    seconds: list[float] = []
    asks: list[float] = []
    failed, ended = 0, ""
    for number in range(1, BUDGET + 1):
        start = time.perf_counter()
        point = peer.propose()
        if not isinstance(peer, OwnPeer) and not name.endswith("_paid"):
            for _ in range(_FREE_PROPOSALS):
                if point is None or surface.space.feasible(point):
                    break
                peer.answer(point, worst, True)
                point = peer.propose()
        asks.append(time.perf_counter() - start)
        if point is not None and name.endswith("_paid") and not surface.space.feasible(point):
            peer.answer(point, worst, True)
            failed += 1
            quality.append(surface.quality(best.configuration))
            seconds.append(seconds[-1] if seconds else 0.0)
            continue
        if point is None or not surface.space.feasible(point):
            ended = getattr(getattr(peer, "strategy", None), "stop_reason", "") or "no proposal"
            break
        trial = surface.measure(point, number, seed)
        if trial.cost is not None:
            worst = max(worst, math.log(trial.cost))
            if best.cost is None or trial.cost < best.cost:
                best = trial
        failed += trial.status.is_failure and trial.cost is None
        if isinstance(peer, OwnPeer):
            peer.tell(trial)
        else:
            loss = worst if trial.cost is None else math.log(trial.cost)
            peer.answer(point, loss, trial.cost is None)
        quality.append(surface.quality(best.configuration))
        seconds.append((seconds[-1] if seconds else 0.0) + trial.seconds)
    return Race(
        surface_name,
        name,
        seed,
        surface.tolerance,
        quality,
        seconds,
        failed,
        len(quality),
        (max(asks), statistics.mean(asks)),
        ended,
    )


def trials_needed(race: Race) -> int:
    """Trials after which what would be handed over stays within the tolerance of the best."""
    needed = BUDGET + 1
    for place in range(len(race.quality), 0, -1):
        if race.quality[place - 1] < 1 - race.tolerance:
            break
        needed = place
    return needed


def read(store: Path) -> list[Race]:
    """The races in the store; a line cut short by a kill is left out."""
    races = []
    for line in store.read_text().splitlines() if store.exists() else []:
        try:
            races.append(Race(**json.loads(line)))
        except json.JSONDecodeError:
            continue
    return races


def run(
    store: Path, surfaces: Sequence[str], contenders: Sequence[str], seeds: int, processes: int
) -> None:
    """Add what the store lacks."""
    done = {(r.surface, r.contender, r.seed) for r in read(store)}
    jobs = [
        (surface, name, seed)
        for surface in surfaces
        for name in contenders
        for seed in range(min(seeds, SEEDS.get(name, seeds)))
        if (surface, name, seed) not in done
    ]
    with ProcessPoolExecutor(processes) as pool, store.open("a") as out:
        for future in as_completed([pool.submit(race, *job) for job in jobs]):
            out.write(json.dumps(asdict(future.result())) + "\n")
            out.flush()


def bootstrap(own: Sequence[Race], peer: Sequence[Race]) -> tuple[float, float, float]:
    """Mean difference in trials needed, own less peer, over shared seeds; 95% interval."""
    import numpy as np

    left = {r.seed: trials_needed(r) for r in own}
    right = {r.seed: trials_needed(r) for r in peer}
    pairs = np.array([left[s] - right[s] for s in sorted(left.keys() & right.keys())], dtype=float)
    generator = np.random.default_rng(0)
    means = generator.choice(pairs, (4000, len(pairs))).mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(pairs.mean()), float(low), float(high)


def report(races: Sequence[Race]) -> str:
    """Tables in Markdown, a section a surface."""
    import numpy as np

    lines: list[str] = []
    surfaces = list(dict.fromkeys(r.surface for r in races))
    for surface in surfaces:
        groups: dict[str, list[Race]] = {}
        for item in races:
            if item.surface == surface:
                groups.setdefault(item.contender, []).append(item)
        groups = {name: group for name, group in groups.items() if len(group) >= _FEWEST_SEEDS}
        if not groups:
            continue
        tolerance = next(iter(groups.values()))[0].tolerance
        lines += [
            f"## {surface}",
            "",
            f"Within {tolerance:.0%} of the best. Regret of what would be handed over, mean, in %.",
            "",
            "| contender | seeds | trials: median | 90% | seconds: median | regret at 10 | 20 | 40 "
            "| failed | s/ask mean | max | ends at |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|",
        ]

        def order(name: str, groups: dict[str, list[Race]] = groups) -> tuple[float, float]:
            needed = [trials_needed(r) for r in groups[name]]
            return statistics.median(needed), statistics.mean(needed)

        for name in sorted(groups, key=order):
            lines.append(_row(name, groups[name], np))
        peers = [n for n in groups if n in PEERS]
        lines.append("")
        if peers:
            best = min(peers, key=order)
            for own in (n for n in ("auto", "bayes") if n in groups):
                mean, low, high = bootstrap(groups[own], groups[best])
                ratio = order(own)[0] / order(best)[0]
                lines.append(
                    f"`{own}` against the best peer, `{best}`: {ratio:.2f} of its median trials; "
                    f"paired difference {mean:+.1f} trials (95% {low:+.1f} to {high:+.1f})."
                )
        lines.append("")
    return "\n".join(lines)


def _row(name: str, group: Sequence[Race], np: Any) -> str:
    needed = [trials_needed(r) for r in group]

    def shown(value: float) -> str:
        return f"{value:.0f}" if value <= BUDGET else f"{BUDGET}+"

    def regret(trials: int) -> str:
        values = [1 - r.quality[min(trials, len(r.quality)) - 1] for r in group if r.quality]
        return f"{100 * statistics.mean(values):.1f}"

    spent = [
        r.seconds[n - 1] if n <= len(r.seconds) else math.inf
        for r, n in zip(group, needed, strict=True)
    ]
    median_spent = statistics.median(spent)
    seconds = "-" if math.isinf(median_spent) else f"{median_spent:.0f}"
    failed = sum(r.failed for r in group) / max(1, sum(r.trials for r in group))
    mean_ask = statistics.mean(r.ask_seconds[1] for r in group)
    max_ask = max(r.ask_seconds[0] for r in group)
    return (
        f"| `{name}` | {len(group)} | {shown(statistics.median(needed))} "
        f"| {shown(float(np.quantile(needed, 0.9)))} | {seconds} "
        f"| {regret(10)} | {regret(20)} | {regret(40)} | {100 * failed:.0f}% "
        f"| {mean_ask:.3f} | {max_ask:.2f} | {statistics.mean(r.trials for r in group):.0f} |"
    )


def main() -> None:
    from _surfaces import surfaces

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("mode", choices=["run", "report"])
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--surfaces", default=",".join(surfaces()))
    parser.add_argument("--contenders", default=",".join((*OWN, *PEERS)))
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    if given.mode == "report":
        print(report(read(given.store)))
        return
    run(
        given.store,
        given.surfaces.split(","),
        given.contenders.split(","),
        given.seeds,
        given.processes,
    )


if __name__ == "__main__":
    main()
