from __future__ import annotations

import numpy as np

from perfsearch.strategies._gp import Classifier

ORDERED = np.array([True, True, False])
GRID = np.array([[x / 7, y / 7, m / 2] for x in range(8) for y in range(8) for m in range(3)])
RUNS = GRID[:, 0] + 0.8 * GRID[:, 1] < 0.95


def learned(count: int, seed: int = 0) -> np.ndarray:
    places = np.random.default_rng(seed).choice(len(GRID), count, replace=False)
    return Classifier(GRID[places], RUNS[places], ORDERED).probability(GRID)


def test_a_half_space_is_learned_from_few_trials() -> None:
    right = [np.mean((learned(16, seed) > 0.5) == RUNS) for seed in range(5)]
    assert np.mean(right) > 0.85


def test_more_trials_make_it_surer() -> None:
    def loss(count: int) -> float:
        likely = learned(count)
        return float(-np.mean(np.log(np.where(RUNS, likely, 1 - likely))))

    assert loss(40) < 0.6 * loss(8)


def test_beyond_failures_failure_is_expected() -> None:
    rows = np.array([[0.0, 0.0, 0.0], [0.3, 0.0, 0.0], [0.6, 0.0, 0.0]])
    model = Classifier(rows, np.array([True, True, False]), ORDERED)
    inside, between, beyond = model.probability(
        np.array([[0.15, 0.0, 0.0], [0.45, 0.0, 0.0], [1.0, 0.0, 0.0]])
    )
    assert inside > between > beyond
    assert beyond < 0.3


def test_a_failing_value_of_an_unordered_knob_is_found() -> None:
    rows = np.array([[x, y, m] for x, y in ((0.2, 0.8), (0.7, 0.3), (0.5, 0.5)) for m in (0, 0.5)])
    model = Classifier(rows, rows[:, 2] == 0, ORDERED)
    good, bad = model.probability(np.array([[0.4, 0.6, 0.0], [0.4, 0.6, 0.5]]))
    assert good > 0.7
    assert bad < 0.3
