from __future__ import annotations

import math
import statistics
from dataclasses import replace
from itertools import pairwise

import pytest
from support.strategy_spaces import baseline_of, cost_of, drive, ended, make, mixed_space

from perfsearch.core.hints import ChainRequest, ChainResult, Hints, Prediction
from perfsearch.core.knob import Configuration, Kind, Knob, Value
from perfsearch.core.space import Space, key_of
from perfsearch.strategies.mcmc import Mcmc

SPACE = mixed_space()
START = baseline_of(SPACE)
BEST = min(SPACE.listed() or [], key=lambda p: cost_of(SPACE, p))
SIMULATED = Hints(START, predict=lambda p: Prediction(cost=cost_of(SPACE, p)))


def changed(left: object, right: dict[str, object]) -> int:
    assert isinstance(left, dict)
    return sum(left[k] != right[k] for k in right)


def test_a_greedy_chain_stays_at_the_best_so_far() -> None:
    strategy = make("mcmc", SPACE, 0, alpha=1e6)
    strategy.tell(ended(0, START, cost_of(SPACE, START)))
    best = START
    for number in range(1, 6):
        point = strategy.ask()
        assert point is not None
        # at most the changed knob and the one whose condition it switches
        assert changed(point, dict(best)) <= 2
        strategy.tell(ended(number, point, cost_of(SPACE, point)))
        best = min(best, point, key=lambda p: cost_of(SPACE, p))


def test_alpha_zero_accepts_everything() -> None:
    strategy = make("mcmc", SPACE, 0, alpha=0.0, return_every=0)
    strategy.tell(ended(0, START, 0.01))
    here = START
    for number in range(1, 10):
        point = strategy.ask()
        assert point is not None
        strategy.tell(ended(number, point, 0.01 * (1 + number)))
        here = point
        assert isinstance(strategy, Mcmc)
        assert key_of(strategy._states[0].configuration) == key_of(here)


def test_acceptance_does_not_depend_on_the_scale_of_costs() -> None:
    def proposals(scale: float) -> list[str]:
        strategy = make("mcmc", SPACE, 2)
        strategy.tell(ended(0, START, scale * cost_of(SPACE, START)))
        return [key_of(p) for p in drive(strategy, 15, lambda p: scale * cost_of(SPACE, p))]

    assert proposals(1.0) == proposals(1024.0)


def test_starts_at_an_imported_configuration() -> None:
    start = {**START, "bucket": 256}
    strategy = make("mcmc", SPACE, 0, start=start)
    assert strategy.ask() == start
    with pytest.raises(ValueError, match=r"strategy\.start"):
        make("mcmc", SPACE, 0, start={**START, "bucket": 7})


def test_chains_run_on_predicted_costs_without_trials() -> None:
    strategy = Mcmc(SPACE, SIMULATED, 0, Mcmc.Options(proposals=2000))
    strategy.tell(ended(0, START, cost_of(SPACE, START)))
    assert strategy.ask() == BEST


def test_no_proposals_measure_the_start_alone() -> None:
    strategy = Mcmc(SPACE, SIMULATED, 0, Mcmc.Options(proposals=0))
    assert strategy.ask() == START
    assert strategy.ask() is None
    assert "0 proposals" in strategy.stop_reason


def test_several_chains_take_turns() -> None:
    strategy = make("mcmc", SPACE, 0, chains=3)
    strategy.tell(ended(0, START, cost_of(SPACE, START)))
    drive(strategy, 9)
    assert isinstance(strategy, Mcmc)
    assert [c.steps > 0 for c in strategy._states] == [True] * 3


VALUES = ("x", "y", "z")
ROW = Space([Knob(name, Kind.CATEGORICAL, "x", VALUES) for name in "abcde"])
BESIDE = {"a": ("b",), "b": ("a", "c"), "c": ("b", "d"), "d": ("c", "e"), "e": ("d",)}


def proposals_from(start: dict[str, Value], seed: int, share: float | None) -> dict[str, Value]:
    hints = Hints(dict(start), neighbours=BESIDE)
    strategy = Mcmc(ROW, hints, seed, Mcmc.Options(propagation=share))
    strategy.tell(ended(0, start, 0.01))
    point = strategy.ask()
    assert point is not None
    return point


def test_a_value_is_carried_over_to_neighbours() -> None:
    start: dict[str, Value] = {"a": "y", "b": "x", "c": "x", "d": "x", "e": "x"}
    carried = [proposals_from(start, seed, 1.0) for seed in range(30)]
    assert all("z" not in point.values() for point in carried)
    spread = [sum(v == "y" for v in point.values()) for point in carried]
    assert {0, 2} <= set(spread)
    assert max(spread) >= 3
    for point in carried:  # a carried value lies beside where it came from
        assert set("".join(map(str, point.values())).strip("x")) <= {"y"}
    alone = [proposals_from(start, seed, 0.0) for seed in range(30)]
    assert all(changed(point, start) == 1 for point in alone)
    assert any("z" in point.values() for point in alone)


def test_propagation_needs_neighbours_that_can_have_the_value() -> None:
    def walk(share: float, neighbours: dict[str, tuple[str, ...]]) -> list[str]:
        hints = Hints(START, neighbours=neighbours)
        strategy = Mcmc(SPACE, hints, 1, Mcmc.Options(propagation=share))
        strategy.tell(ended(0, START, cost_of(SPACE, START)))
        return [key_of(p) for p in drive(strategy, 8)]

    assert walk(1.0, {}) == walk(0.0, {})
    apart = {"bucket": ("mode",), "mode": ("bucket",)}  # numbers beside names
    seen = walk(0.5, apart)
    assert len(set(seen)) == 8


def test_propagation_finds_what_must_agree() -> None:
    names = [f"op{i:02d}" for i in range(12)]
    space = Space([Knob(name, Kind.CATEGORICAL, "x", VALUES) for name in names])
    beside = {
        name: tuple(names[j] for j in (i - 1, i + 1) if 0 <= j < len(names))
        for i, name in enumerate(names)
    }

    def cost(point: Configuration) -> float:
        values = [str(point[name]) for name in names]
        breaks = sum(a != b for a, b in pairwise(values))
        return 0.01 * math.exp(0.04 * breaks - 0.02 * values.count("z"))

    start: dict[str, Value] = dict.fromkeys(names, "x")

    def best(share: float) -> float:
        found = []
        for seed in range(5):
            hints = Hints(start, predict=lambda p: Prediction(cost=cost(p)), neighbours=beside)
            options = Mcmc.Options(propagation=share, proposals=600, alpha=1.0)
            point = Mcmc(space, hints, seed, options).ask()
            assert point is not None
            found.append(cost(point))
        return statistics.median(found)

    assert best(0.5) < best(0.0)


def test_a_runner_that_runs_the_chain_itself_is_told_the_share() -> None:
    asked: list[ChainRequest] = []

    def run_chain(request: ChainRequest) -> ChainResult:
        asked.append(request)
        return ChainResult([dict(START)])

    hints = replace(SIMULATED, run_chain=run_chain)
    for share in (None, 0.0, 0.4):
        Mcmc(SPACE, hints, 0, Mcmc.Options(propagation=share)).ask()
    assert [request.propagation for request in asked] == [None, 0.0, 0.4]
    Mcmc(SPACE, hints, 0, Mcmc.Options(chains=3, seconds=1.5, proposals=90)).ask()
    assert (asked[-1].chains, asked[-1].seconds, asked[-1].proposals) == (3, 1.5, 90)
    assert len(asked) == 4  # the runner shares the proposals out among the chains
