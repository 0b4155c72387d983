from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from perfsearch.core.hints import Hints
from perfsearch.core.knob import Configuration, Kind, Knob, Value
from perfsearch.core.space import Constraint, Space
from perfsearch.core.trial import Measurement, Purpose, Status, Trial
from perfsearch.strategies import Strategy, load

NEEDS = {"optuna": "optuna", "nevergrad": "nevergrad"}
"""Strategies that need a package of that name."""

EXAMPLES = Path(__file__).parents[2] / "examples"

REQUIRED: dict[str, dict[str, object]] = {
    "external": {"command": (sys.executable, str(EXAMPLES / "propose.py"))}
}
"""Options without a default, by strategy."""


def make(name: str, space: Space, seed: int = 0, **options: object) -> Strategy:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    kind = load(name)
    chosen = kind.Options(**{**REQUIRED.get(name, {}), **options})
    return kind(space, Hints(baseline_of(space)), seed, chosen)


def baseline_of(space: Space) -> dict[str, Value]:
    listed = space.listed()
    wanted = {k.name: k.default for k in space.knobs}
    return wanted if space.feasible(wanted) or not listed else dict(listed[0])


def mixed_space() -> Space:
    """40 configurations: log-ordinal, integer, boolean, conditional and categorical knobs."""
    return Space(
        [
            Knob("bucket", Kind.ORDINAL, 25, (1, 8, 25, 64, 256)),
            Knob("workers", Kind.INTEGER, 0, low=0, high=1),
            Knob("pinned", Kind.BOOLEAN, False),
            Knob("mode", Kind.CATEGORICAL, "a", ("a", "b", None), when={"pinned": (True,)}),
        ],
    )


def small_space() -> Space:
    return Space(
        [Knob("x", Kind.ORDINAL, 1, (1, 2, 4)), Knob("y", Kind.BOOLEAN, False)],
    )


def endless_space() -> Space:
    return Space(
        [
            Knob("rate", Kind.REAL, 0.1, low=1e-3, high=10.0, log=True),
            Knob("size", Kind.INTEGER, 4, low=1, high=1 << 20, log=True),
            Knob("mode", Kind.CATEGORICAL, "a", ("a", "b", "c")),
        ],
        [
            Constraint(
                "rate times size", lambda c: float(c["rate"] or 0) * int(c["size"] or 0) < 2e5
            )
        ],
    )


def thin_space() -> Space:
    """About one in a thousand of 160,000 combinations is feasible."""
    axis = tuple(range(1, 21))
    return Space(
        [Knob(n, Kind.ORDINAL, 1, axis) for n in "abcd"],
        [Constraint("sum", lambda c: sum(int(v or 0) for v in c.values()) % 1009 == 40 or False)],
    )


def cost_of(space: Space, configuration: Configuration) -> float:
    total = 0.0
    for place, knob in enumerate(space.knobs, 1):
        value = configuration[knob.name]
        if knob.is_ordered:
            total += (knob.unit_position(value) - 0.6) ** 2 * place
        else:
            total += 0.1 * knob.values.index(value)
    return 0.01 * math.exp(total)


def ended(
    number: int,
    configuration: Configuration,
    cost: float | None,
    status: Status = Status.OK,
    peak_gib: float | None = None,
) -> Trial:
    trial = Trial(number, dict(configuration), Purpose.SEARCH, status, cost=cost)
    if cost is not None:
        trial.measurement = Measurement([cost] * 4, 1, peak_allocated_gib=peak_gib)
        trial.cost_error = 0.01
    return trial


def drive(
    strategy: Strategy,
    asks: int,
    cost: Callable[[Configuration], float | None] | None = None,
    status: Status = Status.CRASH,
) -> list[dict[str, Value]]:
    """Ask and tell in turn; configurations without a cost fail with ``status``."""
    seen = []
    for number in range(1, asks + 1):
        point = strategy.ask()
        if point is None:
            break
        seen.append(point)
        value = cost_of(strategy.space, point) if cost is None else cost(point)
        strategy.tell(ended(number, point, value, Status.OK if value is not None else status))
    return seen
