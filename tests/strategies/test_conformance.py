"""What every strategy of the registry must do."""

from __future__ import annotations

import math
import time
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from support.strategy_spaces import (
    baseline_of,
    cost_of,
    drive,
    ended,
    endless_space,
    make,
    mixed_space,
    small_space,
    thin_space,
)

from perfsearch.core.knob import Configuration, Kind, Knob
from perfsearch.core.space import Constraint, Space, key_of
from perfsearch.core.trial import Status, Trial
from perfsearch.strategies import load, names

CONF = Path(__file__).parents[2] / "conf" / "strategy"
NEVER_STOP: dict[str, dict[str, object]] = {
    "bayes": {"min_gain": 0.0},
    "auto": {"min_gain": 0.0},
    "fast": {"early_stopping": 10_000, "num_trials": 10_000},
}
"""Options under which a strategy goes on until nothing is left."""


def test_yaml_lists_the_options_with_their_defaults(name: str) -> None:
    yaml = pytest.importorskip("yaml")
    written = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    options = load(name).Options
    assert is_dataclass(options)
    assert written.pop("name") == name
    assert list(written) == [f.name for f in fields(options)]
    defaults = {f.name: "???" if f.default is MISSING else f.default for f in fields(options)}
    assert written == defaults


def test_proposes_feasible_configurations_only_and_none_twice(name: str) -> None:
    """optuna/optuna#2021, optuna/optuna#4237, optuna/optuna#5440: no repeats in a finite space"""
    for space in (mixed_space(), endless_space()):
        seen = drive(make(name, space, **NEVER_STOP.get(name, {})), 15)
        assert len(seen) == 15 or name in ("fast", "grid")
        assert all(space.feasible(point) for point in seen)
        assert all(space.canonical(point) == point for point in seen)
        assert len({key_of(point) for point in seen}) == len(seen)


def test_uses_up_a_finite_space_and_says_so(name: str) -> None:
    space = small_space()
    strategy = make(name, space, **NEVER_STOP.get(name, {}))
    seen = drive(strategy, 50)
    assert {key_of(p) for p in seen} == {key_of(p) for p in space.listed() or []}
    assert len(seen) == 6
    assert strategy.ask() is None
    assert strategy.stop_reason == "space exhausted"


def test_uses_up_a_space_whose_every_trial_fails(name: str) -> None:
    strategy = make(name, small_space(), **NEVER_STOP.get(name, {}))
    assert len(drive(strategy, 50, cost=lambda point: None)) == 6
    assert strategy.ask() is None


def test_outstanding_proposals_are_distinct(name: str) -> None:
    """optuna/optuna#6392: asks before any tell are distinct points."""
    strategy = make(name, mixed_space(), **NEVER_STOP.get(name, {}))
    strategy.tell(ended(0, baseline_of(strategy.space), 0.02))
    drive(strategy, 6)
    points = [strategy.ask() for _ in range(4)]
    assert None not in points
    assert len({key_of(p) for p in points if p is not None}) == 4
    told_late = points[0]
    assert told_late is not None
    strategy.tell(ended(9, told_late, 0.03))
    assert strategy.ask() not in points


@pytest.mark.parametrize("lanes", [2, 4])
def test_several_trials_at_a_time_are_distinct_and_depend_on_the_order_of_tells(
    name: str, lanes: int
) -> None:
    """As many asks as there are lanes before the first tell, then one for each that ended."""

    def proposals(space: Space) -> list[str]:
        strategy = make(name, space, 1, **NEVER_STOP.get(name, {}))
        strategy.tell(ended(0, baseline_of(space), cost_of(space, baseline_of(space))))
        under_way: list[Configuration] = []
        seen: list[str] = []
        order = iter([1, 0, 1, 1, 0, 0, 1, 0] * 2)  # which of those under way ends next
        while len(seen) < 12:
            while len(under_way) < lanes and (point := strategy.ask()) is not None:
                assert space.feasible(point)
                seen.append(key_of(point))
                under_way.append(point)
            if not under_way:
                break
            point = under_way.pop(min(next(order), len(under_way) - 1))
            failed = len(seen) % 5 == 0
            trial = ended(len(seen), point, None if failed else cost_of(space, point))
            trial.status = Status.OOM if failed else Status.OK
            strategy.tell(trial)
        return seen

    found = proposals(mixed_space())
    assert len(found) >= 12
    assert len(set(found)) == len(found)
    assert proposals(mixed_space()) == found
    assert len(set(proposals(small_space()))) == 5  # used up, though some were out when asked


def test_the_same_seed_gives_the_same_proposals(name: str) -> None:
    def proposals(seed: int) -> list[str]:
        return [key_of(p) for p in drive(make(name, mixed_space(), seed), 9)]

    assert proposals(3) == proposals(3)
    if name not in ("grid", "fast"):
        assert any(proposals(3) != proposals(seed) for seed in (4, 5))


def test_repeating_asks_and_tells_restores_the_next_proposal(name: str) -> None:
    space = mixed_space()
    first = make(name, space, 1, **NEVER_STOP.get(name, {}))
    calls: list[Trial | None] = []
    first.tell(baseline := ended(0, baseline_of(space), 0.02))
    for number in range(1, 9):
        point = first.ask()
        calls.append(None)
        assert point is not None
        failed = number % 3 == 0
        trial = ended(number, point, None if failed else cost_of(space, point))
        trial.status = Status.OOM if failed else Status.OK
        if number != 4:  # one stays outstanding
            first.tell(trial)
            calls.append(trial)
    second = make(name, space, 1, **NEVER_STOP.get(name, {}))
    second.tell(Trial.from_json(baseline.to_json()))
    for call in calls:
        if call is None:
            second.ask()
        else:
            second.tell(Trial.from_json(call.to_json()))
    assert second.ask() == first.ask()


def test_what_failed_matters_and_how_does_not(name: str) -> None:
    space = mixed_space()

    def proposals(status: Status) -> list[str]:
        def cost(point: Configuration) -> float | None:
            return None if point["bucket"] in (64, 256) else cost_of(space, point)

        strategy = make(name, space)
        strategy.tell(ended(0, baseline_of(space), cost_of(space, baseline_of(space))))
        return [key_of(p) for p in drive(strategy, 12, cost, status)]

    expected = proposals(Status.OOM)
    for status in (Status.CRASH, Status.TIMEOUT, Status.INVALID, Status.DIVERGED):
        assert proposals(status) == expected


def test_takes_every_kind_of_trial_that_it_did_not_ask_for(name: str) -> None:
    space = mixed_space()
    strategy = make(name, space)
    base = baseline_of(space)
    strategy.tell(ended(0, base, 0.02))
    strategy.tell(ended(0, base, 0.021))  # a sentinel
    strategy.tell(ended(1, {"bucket": 8}, 0.02))  # another search's, a knob missing
    strategy.tell(ended(2, {**base, "bucket": 9999}, 0.001))  # out of the space
    strategy.tell(ended(3, {**base, "bucket": 8}, 0.05, Status.PRUNED))
    strategy.tell(ended(4, {**base, "bucket": 1}, None, Status.INFRASTRUCTURE))
    strategy.tell(ended(5, {**base, "bucket": 64}, None, Status.INTERRUPTED))
    seen = drive(strategy, 8)
    assert len(seen) >= 1
    told = [{**base, "bucket": b} for b in (25, 8)]
    assert all(key_of(p) not in {key_of(t) for t in told} for p in seen)
    assert all(space.feasible(p) for p in seen)


def test_equal_costs_do_no_harm(name: str) -> None:
    space = mixed_space()
    seen = drive(make(name, space, **NEVER_STOP.get(name, {})), 12, cost=lambda point: 0.02)
    assert len(seen) == 12


def test_a_hundred_asks_under_a_thin_constraint_are_bounded(name: str) -> None:
    """facebook/Ax#1568, and nevergrad 1.0.12's ask that does not return: feasible, or a stop."""
    space = thin_space()
    strategy = make(name, space)
    size = space.size
    assert size is not None
    start = time.monotonic()
    points = [strategy.ask() for _ in range(100)]
    assert time.monotonic() - start < 100
    found = [p for p in points if p is not None]
    assert found
    assert all(space.feasible(p) for p in found)
    assert len(found) == 100 or strategy.stop_reason


def test_an_empty_space_ends_at_once(name: str) -> None:
    space = Space(
        [Knob("x", Kind.ORDINAL, 1, (1, 2, 4))], [Constraint("never", lambda point: False)]
    )
    strategy = make(name, space)
    assert strategy.ask() is None
    assert strategy.stop_reason


def test_says_in_one_line_what_it_does(name: str) -> None:
    strategy = make(name, mixed_space())
    drive(strategy, 3)
    assert strategy.describe()
    assert "\n" not in strategy.describe()


@pytest.mark.parametrize("name", ["bayes", *(n for n in names() if n == "auto")])
def test_the_share_of_failures_drops(name: str) -> None:
    """optuna/optuna#332: failures are told as bad, so the region is left."""
    values = tuple(range(1, 11))
    space = Space([Knob("x", Kind.ORDINAL, 1, values), Knob("y", Kind.ORDINAL, 1, values)])
    early, late = 0, 0
    for seed in range(3):
        failed = []

        def cost(point: Configuration, failed: list[bool] = failed) -> float | None:
            bad = int(point["x"] or 0) > 5  # half of the space, and it would be the faster one
            failed.append(bad)
            return None if bad else 0.01 * math.exp(-0.1 * int(point["y"] or 0))

        strategy = make(name, space, seed, **NEVER_STOP[name])
        strategy.tell(ended(0, {"x": 1, "y": 1}, 0.01))
        drive(strategy, 30, cost)
        early += sum(failed[:10])
        late += sum(failed[20:30])
    assert late < early


@some.composite
def spaces(draw: some.DrawFn) -> Space:
    knobs = []
    for place in range(draw(some.integers(1, 3))):
        kind = draw(some.sampled_from([Kind.ORDINAL, Kind.CATEGORICAL, Kind.BOOLEAN, Kind.INTEGER]))
        label = f"k{place}"
        if kind is Kind.BOOLEAN:
            knobs.append(Knob(label, kind, False))
        elif kind is Kind.INTEGER:
            high = draw(some.integers(1, 5))
            knobs.append(Knob(label, kind, 1, low=1, high=high, log=draw(some.booleans())))
        else:
            values = tuple(range(1, draw(some.integers(2, 5))))
            knobs.append(Knob(label, kind, 1, values))
    modulus = draw(some.integers(2, 4))
    rule = Constraint("rule", lambda c: sum(int(v or 0) for v in c.values()) % modulus != 1)
    return Space(knobs, [rule])


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(space=spaces(), seed=some.integers(0, 2**64), failing=some.integers(2, 4))
def test_any_small_space_is_used_up_without_repeats(
    name: str, space: Space, seed: int, failing: int
) -> None:
    strategy = make(name, space, seed, **NEVER_STOP.get(name, {}))
    numbers = iter(range(10_000))

    def cost(point: Configuration) -> float | None:
        return None if next(numbers) % failing == 0 else cost_of(space, point)

    size = space.size or 0
    seen = drive(strategy, min(size, 12) + 1, cost)
    assert len(seen) == min(size, 13)
    assert len({key_of(p) for p in seen}) == len(seen)
    assert all(space.feasible(p) for p in seen)
