from __future__ import annotations

from support.strategy_spaces import baseline_of, cost_of, drive, make, mixed_space, small_space

from perfsearch.core.hints import ChainResult, Hints, Prediction
from perfsearch.strategies.auto import Auto


def test_tries_all_of_a_small_space() -> None:
    strategy = make("auto", small_space())
    assert len(drive(strategy, 20)) == 6
    assert "6 configurations are few enough to try all" in strategy.describe()


def test_uses_a_gaussian_process_on_a_larger_one() -> None:
    strategy = make("auto", mixed_space())
    assert "Gaussian process" in strategy.describe()
    assert "too many to try all" in strategy.describe()


def test_runs_chains_on_predictions_where_costs_are_simulated() -> None:
    space = mixed_space()
    hints = Hints(baseline_of(space), predict=lambda p: Prediction(cost=cost_of(space, p)))
    strategy = Auto(space, hints, 0)
    assert "the runner predicts costs" in strategy.describe()
    first = strategy.ask()
    assert first is not None
    assert cost_of(space, first) == min(cost_of(space, p) for p in space.listed() or [])


def test_hands_on_the_expected_gain() -> None:
    strategy = make("auto", mixed_space())
    assert strategy.expected_gain is None
    drive(strategy, 12)
    assert strategy.expected_gain is not None
    assert 0 <= strategy.expected_gain < 1


def test_hands_on_why_it_ended() -> None:
    strategy = make("auto", mixed_space(), min_gain=0.01)
    drive(strategy, 60)
    assert strategy.stop_reason.startswith("converged")


def test_asks_the_runner_nothing_before_it_must_choose() -> None:
    space = mixed_space()
    asked: list[object] = []

    def predict(point: object) -> Prediction:
        asked.append(point)
        return Prediction()

    strategy = Auto(space, Hints(baseline_of(space), predict=predict), 0)
    assert not asked  # describing a job takes seconds, which may pass beside the baseline
    assert strategy.ask() is not None
    assert asked


def test_shows_the_chains_that_the_runner_ran() -> None:
    space = mixed_space()
    result = ChainResult([baseline_of(space)])
    hints = Hints(
        baseline_of(space),
        predict=lambda p: Prediction(cost=cost_of(space, p)),
        run_chain=lambda request: result,
    )
    strategy = Auto(space, hints, 0)
    strategy.ask()
    assert strategy.chain_results
