from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from support.strategy_spaces import (
    baseline_of,
    cost_of,
    drive,
    ended,
    endless_space,
    make,
    mixed_space,
)

from perfsearch.core.hardware import Environment
from perfsearch.core.hints import Hints, Prediction
from perfsearch.core.knob import Configuration, Kind, Knob, Value
from perfsearch.core.objective import Objective, log_cost_error
from perfsearch.core.space import Space, key_of
from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.runners.base import Plan
from perfsearch.runners.replay import Replay
from perfsearch.strategies._acquisition import Feasibility, Scores
from perfsearch.strategies.bayes import Bayes

ZERO = Path(__file__).parents[1] / "data" / "zero_gpt2large_4xh100.csv"
BATCHES = tuple(range(1, 21))
MEMORY = Space([Knob("batch", Kind.ORDINAL, 1, BATCHES), Knob("fused", Kind.BOOLEAN, False)])


def test_reaches_two_percent_of_a_recorded_surface_within_25_trials() -> None:
    objective = Objective()
    reached = 0
    for seed in range(3):
        runner = Replay(Replay.Options(table=str(ZERO)), Environment(Path(), seed=seed))
        strategy = Bayes(runner.space, runner.hints([]), seed)
        best = (math.inf, 0.0)
        for number in range(26):
            point = runner.baseline if number == 0 else strategy.ask()
            if point is None:
                break
            outcome = runner.measure(point, Plan(number=number))
            trial = Trial(number, dict(point), Purpose.SEARCH, outcome.status, outcome.measurement)
            if outcome.measurement is not None:
                trial.cost = objective.cost(outcome.measurement)
                trial.cost_error = log_cost_error(outcome.measurement)
                true = runner.true_step_seconds(point)
                best = min(best, (trial.cost, outcome.measurement.samples_per_step / (true or 1)))
            strategy.tell(trial)
        reached += best[1] > 0.98 * 252.5
    assert reached >= 2


def test_finds_the_best_of_a_noise_free_space_before_a_third_of_it() -> None:
    space = mixed_space()
    strategy = make("bayes", space, 0, min_gain=0.0)
    strategy.tell(ended(0, baseline_of(space), cost_of(space, baseline_of(space))))
    seen = drive(strategy, 13)
    best = min(cost_of(space, p) for p in space.listed() or [])
    assert min(cost_of(space, p) for p in seen) == pytest.approx(best)


def test_converges_with_a_reason() -> None:
    space = mixed_space()
    strategy = make("bayes", space, 0, min_gain=0.01)
    drive(strategy, 40)
    assert strategy.stop_reason.startswith("converged")
    assert "strategy.min_gain" in strategy.stop_reason


def test_max_samples_ends_it() -> None:
    strategy = make("bayes", mixed_space(), 0, max_samples=4)
    assert len(drive(strategy, 10)) == 4
    assert "strategy.max_samples=4" in strategy.stop_reason


def test_first_proposals_lean_to_the_promising_end() -> None:
    def mean_batch(sign: int) -> float:
        batches = []
        for seed in range(12):
            hints = Hints({"batch": 1, "fused": False}, monotonic={"batch": sign})
            strategy = Bayes(MEMORY, hints, seed, Bayes.Options(initial_points=4))
            batches += [int(p["batch"] or 0) for p in (strategy.ask() for _ in range(3)) if p]
        return float(np.mean(batches))

    assert mean_batch(1) > mean_batch(-1) + 2


@pytest.mark.parametrize("alpha", [0.1, 0.8])
def test_alpha_fixes_the_noise(alpha: float) -> None:
    strategy = make("bayes", mixed_space(), 0, alpha=alpha)
    assert len(drive(strategy, 8)) == 8


def test_a_bound_steers_away_from_a_losing_configuration() -> None:
    space = mixed_space()

    def next_after(status: Status, cost: float) -> list[str]:
        strategy = make("bayes", space, 0)
        base = baseline_of(space)
        strategy.tell(ended(0, base, 0.02))
        for number, bucket in enumerate((1, 8, 64), 1):
            strategy.tell(ended(number, {**base, "bucket": bucket}, 0.02))
        strategy.tell(ended(9, {**base, "bucket": 256}, cost, status))
        return [key_of(p) for p in drive(strategy, 4)]

    assert next_after(Status.PRUNED, 0.2) != next_after(Status.PRUNED, 0.021)


def test_the_runners_prediction_is_the_prior() -> None:
    space = Space([Knob("x", Kind.ORDINAL, 1, tuple(range(1, 41)))])

    def cost(point: Configuration) -> float:
        return 0.01 * math.exp(abs(int(point["x"] or 0) - 33) * 0.1)

    hints = Hints({"x": 1}, predict=lambda p: Prediction(cost=2 * cost(p)))
    strategy = Bayes(space, hints, 0)
    for number, x in enumerate((1, 5, 9)):
        strategy.tell(ended(number, {"x": x}, cost({"x": x})))
    assert strategy.ask() == {"x": 33}


def peaks(batch: int) -> float:
    return 4.0 + 3.0 * batch


def told(batches: list[int], status: Status = Status.OK) -> list[Trial]:
    return [
        ended(
            number,
            {"batch": b, "fused": False},
            0.01 if status is Status.OK else None,
            status,
            peaks(b) if status is Status.OK else None,
        )
        for number, b in enumerate(batches)
    ]


def likely(model: Feasibility, batch: int) -> float:
    points: list[dict[str, Value]] = [{"batch": batch, "fused": False}]
    return float(model.probability(points, MEMORY.encode(points))[0])


def test_failures_beyond_the_largest_peak_mark_a_cliff() -> None:
    model = Feasibility(MEMORY, Hints({}), told([1, 4, 8, 12]), told([20], Status.OOM))
    assert likely(model, 12) > 0.7
    assert likely(model, 13) > likely(model, 18)
    assert likely(model, 20) < 0.2


def test_a_known_limit_needs_no_failure() -> None:
    hints = Hints({}, memory_limit_gib=50.0)  # batch 15 is the last to fit
    model = Feasibility(MEMORY, hints, told([1, 4, 8, 12]), [])
    assert likely(model, 13) > 0.6
    assert likely(model, 19) < 0.3


def test_predicted_peaks_work_from_the_first_trial() -> None:
    hints = Hints(
        {},
        memory_limit_gib=50.0,
        predict=lambda p: Prediction(peak_gib=peaks(int(p["batch"] or 0))),
    )
    model = Feasibility(MEMORY, hints, told([1]), [])
    assert likely(model, 10) > 0.8
    assert likely(model, 20) < 0.3


def test_other_failures_are_learned_by_their_knobs() -> None:
    failed = told([2, 6, 10], Status.CRASH)
    for trial in failed:
        trial.configuration["fused"] = True
    model = Feasibility(MEMORY, Hints({}), told([1, 5, 9, 13]), failed)
    points: list[dict[str, Value]] = [{"batch": 7, "fused": f} for f in (False, True)]
    plain, fused = model.probability(points, MEMORY.encode(points))
    assert plain > 0.7
    assert fused < 0.3


def test_without_failures_or_a_limit_everything_may_run() -> None:
    assert likely(Feasibility(MEMORY, Hints({}), told([1, 4, 8]), []), 20) == 1.0


def test_an_endless_space_is_searched_beyond_the_first_points() -> None:
    space = endless_space()
    strategy = make("bayes", space, 1)
    seen = drive(strategy, 14)
    costs = [cost_of(space, p) for p in seen]
    assert min(costs[3:]) < min(costs[:3])


def low(points: Sequence[dict[str, Value]], bucket: int, most: float) -> np.ndarray:
    return np.array([most if p["bucket"] == bucket else most / 2 for p in points])


@pytest.mark.parametrize(
    ("hope", "second", "seen"),
    [
        (0.1, 0.0, [256, 256]),
        (1e-5, 0.0, []),
        (1e-5, 0.1, [64, 64, 64, 64, 64, 64]),
        (0.1, 0.1, [256, 256, 64, 64, 64, 64]),
    ],
)
def test_before_the_end_it_explores_where_it_doubts_and_where_trees_see_a_gain(
    monkeypatch: pytest.MonkeyPatch, hope: float, second: float, seen: list[int]
) -> None:
    strategy = make("bayes", mixed_space(), 0)
    assert isinstance(strategy, Bayes)
    for number, workers in enumerate((0, 1)):
        best = {"bucket": 25, "workers": workers, "pinned": False, "mode": "a"}
        strategy.tell(ended(number, best, 0.001))
    drive(strategy, 6)

    def scores(points: Sequence[dict[str, Value]], rows: np.ndarray, share: float) -> Scores:
        trees = low(points, 64, second)
        return Scores(np.zeros(len(points)), low(points, 256, hope), by_forest=lambda: trees)

    monkeypatch.setattr(strategy, "_scores", scores)
    monkeypatch.setattr(strategy, "_settled", lambda: True)
    assert [point["bucket"] for point in drive(strategy, 10)] == seen
    assert strategy.stop_reason.startswith("converged")


def scripted(
    monkeypatch: pytest.MonkeyPatch, largest: float, surprise: float
) -> list[dict[str, Value]]:
    """What is proposed where the model always expects most at one end of the space."""
    strategy = make("bayes", mixed_space(), 0)
    assert isinstance(strategy, Bayes)
    best: dict[str, Value] = {"bucket": 1, "workers": 0, "pinned": False, "mode": "a"}
    strategy.tell(ended(0, best, 0.001))
    drive(strategy, 4)
    strategy._turn = 0

    def scores(points: Sequence[dict[str, Value]], rows: np.ndarray, share: float) -> Scores:
        gain = low(points, 256, 0.005)
        return Scores(gain, gain, surprise=surprise, largest_improvement=largest)

    monkeypatch.setattr(strategy, "_scores", scores)
    return drive(strategy, 4)


def test_where_all_is_flat_every_other_proposal_is_spread_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flat = scripted(monkeypatch, largest=0.005, surprise=0.0)
    assert flat[0]["bucket"] == flat[2]["bucket"] == 256
    assert {flat[1]["bucket"], flat[3]["bucket"]} != {256}
    assert {p["bucket"] for p in scripted(monkeypatch, 0.1, 0.0)} == {256}


def test_around_a_best_that_the_others_do_not_explain_every_other_proposal_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = scripted(monkeypatch, largest=0.1, surprise=3.0)
    assert [p["bucket"] in (1, 8, 25) for p in seen] == [True, False, True, False]
