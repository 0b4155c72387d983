"""A prior search of a similar job: fewer trials where it is right, little lost where not."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support.strategy_spaces import baseline_of, cost_of, drive, ended, mixed_space

from perfsearch.core.hardware import Environment
from perfsearch.core.hints import Hints, Prediction, PriorSearch
from perfsearch.core.knob import Value
from perfsearch.core.objective import Objective, log_cost_error
from perfsearch.core.space import key_of
from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.runners.base import Plan
from perfsearch.runners.replay import Replay
from perfsearch.strategies._candidates import with_nulls_apart
from perfsearch.strategies.auto import Auto
from perfsearch.strategies.bayes import Bayes

ZERO = Path(__file__).parents[1] / "data" / "zero_gpt2large_4xh100.csv"
SEEDS = range(5)
LIMIT = 25
"""Trials after which a run that has not arrived counts as this many."""

Costs = list[tuple[dict[str, Value], float]]


def measured(runner: Replay, number: int, point: dict[str, Value]) -> Trial:
    outcome = runner.measure(point, Plan(number=number))
    trial = Trial(number, dict(point), Purpose.SEARCH, outcome.status, outcome.measurement)
    if outcome.status is Status.OK and outcome.measurement is not None:
        trial.cost = Objective().cost(outcome.measurement)
        trial.cost_error = log_cost_error(outcome.measurement)
    return trial


def searched(
    seed: int, prior: PriorSearch | None, enough: float | None, limit: int = LIMIT
) -> tuple[list[Trial], Bayes, int]:
    """A search of the recorded surface; with ``enough`` until a cost that is truly so close to
    the best was tried. Returns how many trials that took, too.
    """
    runner = Replay(Replay.Options(table=str(ZERO)), Environment(Path(), seed=seed))
    truth: dict[str, float] = {}
    for point in runner.space.listed() or []:
        seconds = runner.true_step_seconds(point)
        found = runner.measure(point, Plan(number=0)).measurement
        if seconds is not None and found is not None:
            truth[key_of(point)] = seconds / found.samples_per_step
    strategy = Bayes(runner.space, replace(runner.hints([]), prior_search=prior), seed)
    trials = []
    for number in range(limit):
        point = runner.baseline if number == 0 else strategy.ask()
        if point is None:
            break
        trials.append(measured(runner, number, point))
        strategy.tell(trials[-1])
        close = truth.get(key_of(point), math.inf) / min(truth.values()) - 1
        if enough is not None and close <= enough:
            return trials, strategy, number
    return trials, strategy, limit


@cache
def found_before(seed: int) -> tuple[tuple[str, float], ...]:
    """What a search of 25 trials by another seed found, best first; configurations as JSON."""
    trials = searched(1000 + seed, None, None)[0]
    base = trials[0].cost
    assert base is not None
    costs = [(json.dumps(t.configuration), math.log(t.cost / base)) for t in trials if t.cost]
    return tuple(sorted(costs, key=lambda pair: pair[1]))


def prior_search_of(costs: Costs) -> PriorSearch:
    return PriorSearch("a prior search", tuple(sorted(costs, key=lambda pair: pair[1])))


def same(seed: int) -> Costs:
    return [(json.loads(text), log) for text, log in found_before(seed)]


def similar(seed: int) -> Costs:
    """Of another job: smaller effects, other noise, and its three best were never tried."""
    generator = np.random.default_rng(seed)
    return [(c, 0.7 * log + float(generator.normal(0, 0.05))) for c, log in same(seed)[3:]]


def shuffled(seed: int) -> Costs:
    logs = np.random.default_rng(seed).permutation([log for _, log in same(seed)])
    return [(c, float(log)) for (c, _), log in zip(same(seed), logs, strict=True)]


def reversed_(seed: int) -> Costs:
    return [(c, -log) for c, log in same(seed)]


@cache
def trials_needed(costs: Callable[[int], Costs] | None) -> float:
    """Median over the seeds of the trials until within 2% of the best."""
    needed = []
    for seed in SEEDS:
        prior = None if costs is None else prior_search_of(costs(seed))
        needed.append(searched(seed, prior, 0.02)[2])
    return statistics.median(needed)


def test_the_same_job_again_needs_few_trials() -> None:
    assert trials_needed(same) <= 2 < trials_needed(None)


def test_a_similar_job_helps() -> None:
    assert trials_needed(similar) <= 0.8 * trials_needed(None)


def test_a_misleading_search_costs_little() -> None:
    assert trials_needed(shuffled) <= trials_needed(None) + 4
    assert trials_needed(reversed_) <= trials_needed(None) + 6


def test_its_weight_falls_as_trials_disagree() -> None:
    def weight(costs: Costs) -> float:
        _, strategy, _ = searched(0, prior_search_of(costs), None, 8)
        return strategy._share()

    assert weight(reversed_(0)) < 0.1
    assert weight(same(0)) > 0.6


def test_the_prior_best_comes_first_and_then_the_next_until_one_runs() -> None:
    space = mixed_space()
    points = sorted(space.listed() or [], key=lambda p: cost_of(space, p))
    costs = [(dict(p), math.log(cost_of(space, p))) for p in points[::2]]
    hints = Hints(baseline_of(space), starts=(points[-1],), prior_search=prior_search_of(costs))
    strategy = Bayes(space, hints, 0)
    strategy.tell(ended(0, baseline_of(space), 0.02))
    for place in (0, 1):
        assert strategy.ask() == costs[place][0]
        strategy.tell(ended(1 + place, costs[place][0], None, Status.OOM))
    assert strategy.ask() == costs[2][0]


def test_what_the_runner_would_try_first_is_tried_however_much_is_believed() -> None:
    space = mixed_space()
    points = sorted(space.listed() or [], key=lambda p: cost_of(space, p))
    costs = [(dict(p), math.log(cost_of(space, p))) for p in points[::2]]
    starts = (points[-1], points[-3])
    hints = Hints(baseline_of(space), starts=starts, prior_search=prior_search_of(costs))
    strategy = Bayes(space, hints, 0)
    strategy.tell(ended(0, baseline_of(space), cost_of(space, baseline_of(space))))
    asked = []
    for number in range(1, 5):
        point = strategy.ask()
        assert point is not None
        asked.append(point)
        strategy.tell(ended(number, point, cost_of(space, point)))
    assert asked[:2] == [costs[0][0], points[-1]]
    assert strategy._share() >= 0.5
    assert points[-3] not in asked


def test_it_is_never_a_trial() -> None:
    """What the prior search found is proposed like anything else, and counts for nothing."""
    space = mixed_space()
    costs = [(dict(p), math.log(cost_of(space, p))) for p in space.listed() or []]
    strategy = Bayes(space, Hints(baseline_of(space), prior_search=prior_search_of(costs)), 0)
    assert strategy._history.trials == []
    assert "0 trials measured" in strategy.describe()
    seen = drive(strategy, 60)
    assert len(seen) >= 5
    assert len(strategy._history.trials) == len(seen)


def test_it_does_not_end_the_search() -> None:
    """Of a search that saw no difference anywhere one learns nothing; the own trials decide."""
    space = mixed_space()
    costs = [(dict(p), 0.0) for p in space.listed() or []]
    hints = Hints(baseline_of(space), prior_search=prior_search_of(costs))
    warm, cold = Bayes(space, hints, 0), Bayes(space, Hints(baseline_of(space)), 0)
    tried = {"warm": drive(warm, 60), "cold": drive(cold, 60)}
    best = {k: min(cost_of(space, p) for p in points) for k, points in tried.items()}
    assert best["warm"] == best["cold"] == min(cost_of(space, p) for p in space.listed() or [])


@pytest.mark.parametrize(
    "costs",
    [
        [],
        [({"bucket": 7, "workers": 0, "pinned": False, "mode": "a"}, -1.0)] * 4,
        [({"bucket": 8}, -1.0)] * 4,
        [({"bucket": 8, "workers": 0, "pinned": False, "mode": "a"}, math.inf)] * 4,
    ],
)
def test_what_does_not_fit_changes_nothing(costs: Costs) -> None:
    space = mixed_space()

    def proposals(prior: PriorSearch | None) -> list[str]:
        strategy = Bayes(space, Hints(baseline_of(space), prior_search=prior), 3)
        return [key_of(p) for p in drive(strategy, 8)]

    assert proposals(PriorSearch("nowhere", tuple(costs))) == proposals(None)


def test_repeating_asks_and_tells_restores_the_next_proposal() -> None:
    space = mixed_space()
    costs = [(dict(p), math.log(cost_of(space, p))) for p in (space.listed() or [])[::3]]
    kept = json.loads(json.dumps([[c, log] for c, log in prior_search_of(costs).costs]))
    again = PriorSearch("the journal", tuple((c, log) for c, log in kept))
    first = Bayes(space, Hints(baseline_of(space), prior_search=prior_search_of(costs)), 1)
    second = Bayes(space, Hints(baseline_of(space), prior_search=again), 1)
    assert [key_of(p) for p in drive(first, 9)] == [key_of(p) for p in drive(second, 9)]


def test_with_predictions_it_is_what_differs_from_them() -> None:
    """Where the prior costs are just the predicted ones, they say nothing new."""
    space = mixed_space()

    def hints(prior: PriorSearch | None) -> Hints:
        return Hints(
            baseline_of(space),
            predict=lambda p: Prediction(cost=cost_of(space, p)),
            prior_search=prior,
        )

    costs = [(dict(p), math.log(cost_of(space, p))) for p in space.listed() or []]
    strategy = Bayes(space, hints(prior_search_of(costs)), 0)
    assert strategy._belief is not None
    rows = with_nulls_apart(space, space.encode(space.listed() or []))
    assert float(np.abs(strategy._belief.mean(rows)).max()) < 0.01


def test_auto_hands_it_on_or_says_that_it_has_no_part() -> None:
    space = mixed_space()
    costs = [(dict(p), math.log(cost_of(space, p))) for p in (space.listed() or [])[::3]]
    hints = Hints(baseline_of(space), prior_search=prior_search_of(costs))
    strategy = Auto(space, hints, 0)
    strategy.tell(ended(0, baseline_of(space), cost_of(space, baseline_of(space))))
    assert strategy.ask() == hints.prior_search.costs[0][0] if hints.prior_search else False
    assert "a prior search has weight" in strategy.describe()
    whole = Auto(space, hints, 0, Auto.Options(try_all=1000))
    assert "strategy.warm_start has no part in it" in whole.describe()
