from __future__ import annotations

import pytest
from conftest import baseline_of, cost_of, drive, ended, make, mixed_space

from perfsearch.search.hints import Hints, Prediction
from perfsearch.search.space import key_of
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
        assert key_of(strategy._chains[0].configuration) == key_of(here)


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


def test_predicted_costs_are_walked_without_trials() -> None:
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
    assert [c.steps > 0 for c in strategy._chains] == [True] * 3


@pytest.mark.parametrize("key", ["alpha", "proposals", "return_every"])
def test_bad_options_name_the_key(key: str) -> None:
    with pytest.raises(ValueError, match=rf"strategy\.{key}=-1"):
        Mcmc.Options(**{key: -1})  # type: ignore[arg-type]
