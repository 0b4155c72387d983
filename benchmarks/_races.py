"""One contender on one surface with one seed, and what is kept of it."""

from __future__ import annotations

import json
import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

BUDGET = 60

BUDGET_SECONDS = 400.0
PRICED_BUDGET = 120
"""Seconds of trials, and most of them, of a race where trials have prices by scope."""

_FREE_PROPOSALS = 50


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
    most, most_s = (PRICED_BUDGET, BUDGET_SECONDS) if surface.is_priced else (BUDGET, math.inf)
    for number in range(1, most + 1):
        if seconds[-1:] > [most_s]:
            break
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
    needed = max(BUDGET, len(race.quality)) + 1
    for place in range(len(race.quality), 0, -1):
        if race.quality[place - 1] < 1 - race.tolerance:
            break
        needed = place
    return needed


def seconds_needed(race: Race) -> float:
    """Seconds after which what would be handed over stays within the tolerance of the best; all
    that there were, at least, where it never did.
    """
    needed = trials_needed(race)
    return (
        max(BUDGET_SECONDS, *race.seconds[-1:])
        if needed > len(race.seconds)
        else race.seconds[needed - 1]
    )


def read(store: Path) -> list[Race]:
    """The races in the store; a line cut short by a kill is left out."""
    races = []
    for line in store.read_text().splitlines() if store.exists() else []:
        try:
            races.append(Race(**json.loads(line)))
        except json.JSONDecodeError:
            continue
    return races
