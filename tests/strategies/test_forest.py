from __future__ import annotations

import numpy as np
import pytest

from perfsearch.strategies._gp import Forest


def step(rows: np.ndarray) -> np.ndarray:
    return np.where(rows[:, 0] > 0.5, 1.0, -1.0)


def drawn(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random((count, 3))


def test_a_step_is_learned_and_doubted_near_the_edge_only() -> None:
    seen = drawn(40, 0)
    forest = Forest(seen, step(seen), 0)
    new = drawn(200, 1)
    mean, deviation = forest.predict(new)
    assert np.mean(np.abs(mean - step(new))) < 0.25
    edge = np.abs(new[:, 0] - 0.5) < 0.1
    assert deviation[edge].mean() > 2 * deviation[~edge].mean()


def test_the_seed_decides() -> None:
    seen = drawn(20, 0)
    first, same, other = (Forest(seen, step(seen), seed).predict(seen)[0] for seed in (3, 3, 4))
    assert first == pytest.approx(same, abs=0)
    assert np.abs(first - other).max() > 0


def test_any_seed_is_taken() -> None:
    seen = drawn(5, 0)
    assert Forest(seen, step(seen), 2**64 + 1).predict(seen)[1].min() > 0
