from __future__ import annotations

import numpy as np
import pytest

from perfsearch.strategies._gp import MixedKernel, Prior, fit, telling

ORDERED = np.array([True, True, False])
SHARE = np.array([1.0, 0.5, 0.8])


def rows(count: int, seed: int = 0) -> np.ndarray:
    drawn = np.random.default_rng(seed).random((count, 3))
    drawn[:, 2] = np.round(drawn[:, 2] * 2) / 3
    return drawn


def values(x: np.ndarray) -> np.ndarray:
    return np.sin(3 * x[:, 0]) + 0.5 * (x[:, 2] > 0.1)


def test_gradient_agrees_with_differences() -> None:
    variance = np.array([0.3, 0.2, 0.4, 0.5, 0.6])
    kernel = MixedKernel(np.array([0.5, 1.0, 2.0]), variance, ORDERED, SHARE)
    points = rows(9)
    _, gradient = kernel(points, eval_gradient=True)
    for place in range(8):
        step = np.zeros(8)
        step[place] = 1e-5
        up = kernel.clone_with_theta(kernel.theta + step)(points)
        down = kernel.clone_with_theta(kernel.theta - step)(points)
        assert np.allclose(gradient[..., place], (up - down) / 2e-5, atol=1e-7)


def test_one_column_is_enough() -> None:
    points = rows(8)[:, :1]
    model = fit(points, values(rows(8)) - 1.0, ORDERED[:1])
    assert model.predict(points)[0].shape == (8,)


def test_covariance_is_positive_and_diag_agrees() -> None:
    kernel = MixedKernel(np.full(3, 0.7), np.full(5, 0.5), ORDERED, SHARE)
    points = rows(20)
    covariance = kernel(points)
    assert np.allclose(np.diag(covariance), kernel.diag(points))
    assert np.linalg.eigvalsh(covariance).min() > -1e-9


def test_covariance_across_is_that_within() -> None:
    kernel = MixedKernel(
        np.array([0.3, 1.0, 2.0]), np.array([0.3, 0.2, 0.4, 0.5, 0.6]), ORDERED, SHARE
    )
    points = rows(15)
    points[5] = points[2]
    assert np.allclose(kernel(points, points[:4]), kernel(points)[:, :4], atol=1e-12)


def test_pairs_are_those_of_a_plain_double_loop() -> None:
    nothing = np.array([1e-6, 1e-6, 1e-6, 1.0, 1e-6])
    alone = MixedKernel(np.full(3, 0.7), nothing, ORDERED, SHARE)
    points = rows(6)
    each = [
        MixedKernel(np.full(1, 0.7), np.array([1.0, 1e-6, 1e-6]), ORDERED[d : d + 1], np.ones(1))(
            points[:, d : d + 1]
        )
        for d in range(3)
    ]
    pairs = [(0, 1), (0, 2), (1, 2)]
    whole = sum(SHARE[d] * SHARE[e] for d, e in pairs)
    wanted = sum(SHARE[d] * SHARE[e] * each[d] * each[e] for d, e in pairs) / whole
    assert np.allclose(alone(points), wanted, atol=1e-4)


def test_predicts_between_and_doubts_outside() -> None:
    seen = rows(25)
    model = fit(seen, values(seen) - values(seen).mean(), ORDERED)
    new = rows(50, seed=1)
    mean, deviation = model.predict(new)
    assert np.abs(mean + values(seen).mean() - values(new)).mean() < 0.1
    far = new.copy()
    far[:, 0] = 4.0
    assert model.predict(far)[1].mean() > deviation.mean()


def test_believed_rows_lower_the_doubt_and_keep_the_mean() -> None:
    seen = rows(10)
    waiting = rows(1, seed=5)
    target = values(seen) - values(seen).mean()
    plain, lied = fit(seen, target, ORDERED), fit(seen, target, ORDERED, believe=(waiting, 0.0))
    assert lied.predict(waiting)[0] == pytest.approx(plain.predict(waiting)[0], abs=1e-3)
    assert lied.predict(waiting)[1] < 0.7 * plain.predict(waiting)[1]


def test_noisy_values_are_trusted_less() -> None:
    seen = rows(12)
    target = values(seen) - values(seen).mean()
    target[0] += 2.0
    error = np.full(12, 0.01)
    trusting = fit(seen, target, ORDERED, error=error)
    error[0] = 3.0
    doubting = fit(seen, target, ORDERED, error=error)
    at = seen[:1]
    assert abs(doubting.predict(at)[0][0] - (target[0] - 2.0)) < abs(
        trusting.predict(at)[0][0] - (target[0] - 2.0)
    )


def test_a_narrow_diagonal_valley_is_not_taken_for_noise() -> None:
    """These points are such that a fit from smooth length scales alone ends at a noise of 0.2."""
    seen = np.round(np.random.default_rng(2).random((16, 2)) * 20) / 20
    depth = -np.exp(-(((seen[:, 0] + seen[:, 1] - 1) / 0.1) ** 2))
    target = (depth - depth.mean()) / depth.std()
    model = fit(seen, target, np.array([True, True]), prior=Prior(noise=(0.01, 0.7)))
    assert model.noise_variance < 0.05


def test_surprises_are_those_of_fits_without_the_row() -> None:
    seen = rows(14)
    target = values(seen) - values(seen).mean()
    target[3] -= 3.0
    model = fit(seen, target, ORDERED, noise=0.2)
    others = np.arange(14) != 3
    kernel = model.regressor.kernel_.k1
    covariance = kernel(seen[others]) + (0.2**2 + 1e-8) * np.eye(13)
    across = kernel(seen[[3]], seen[others])
    mean = across @ np.linalg.solve(covariance, target[others])
    variance = kernel(seen[[3]]) - across @ np.linalg.solve(covariance, across.T) + 0.2**2
    expected = float((target[3] - mean)[0] / np.sqrt(variance[0, 0]))
    assert model.surprises()[3] == pytest.approx(expected, rel=1e-4)
    assert model.surprises()[3] < -2.0


def test_of_many_values_the_smallest_are_kept_and_the_others_evenly() -> None:
    values = np.random.default_rng(0).permutation(1000).astype(float)
    kept = telling(values, 100)
    assert list(kept) == sorted(set(kept))
    assert len(kept) == 100
    chosen = sorted(values[kept])
    assert chosen[:50] == list(range(50))
    assert set(np.diff(chosen[50:])) == {19.0}
    assert list(telling(values[:100], 100)) == list(range(100))


def test_what_is_learned_of_a_part_is_conditioned_on_all_rows() -> None:
    """Between rows that the hyperparameters were not learned from, it is as sure as at them."""
    generator = np.random.default_rng(1)
    rows = generator.random((400, 2))
    target = np.sin(3 * rows[:, 0]) + 0.01 * generator.standard_normal(400)
    model = fit(rows, target, np.array([True, True]))
    mean, deviation = model.predict(rows)
    assert len(model.regressor.X_train_) == 400
    assert float(np.abs(mean - np.sin(3 * rows[:, 0])).max()) < 0.1
    assert float(deviation.max()) < 0.1
