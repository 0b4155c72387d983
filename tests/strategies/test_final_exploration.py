from __future__ import annotations

import numpy as np

from perfsearch.strategies._acquisition import Scores
from perfsearch.strategies.bayes import FinalExploration


def scores(optimistic: float, forest: float) -> Scores:
    trees = np.array([0.0, 0.0, forest])
    return Scores(np.zeros(3), np.array([0.0, optimistic, 0.0]), by_forest=lambda: trees)


def taken(final: FinalExploration, seen: Scores, at_most: int = 20) -> list[int | None]:
    places = []
    for _ in range(at_most):
        places.append(final.next(seen, np.ones(len(seen.gain))))
        if places[-1] is None:
            break
    return places


def test_own_doubt_comes_first_then_the_second_model_then_the_end() -> None:
    assert taken(FinalExploration(0.01), scores(0.5, 0.5)) == [1, 1, 2, 2, 2, 2, None]
    assert taken(FinalExploration(0.01), scores(0.5, 0.001)) == [1, 1, None]
    assert taken(FinalExploration(0.01), scores(0.001, 0.001)) == [None]


def test_without_a_second_model_own_doubt_is_all() -> None:
    seen = Scores(np.zeros(2), np.array([0.5, 0.0]))
    assert taken(FinalExploration(0.01), seen) == [0, 0, None]


def test_a_better_trial_or_an_expected_gain_starts_them_anew() -> None:
    for best, expected in ((0.9, 0.0), (1.0, 0.5)):
        final = FinalExploration(0.01)
        final.note(1.0, 0.0)
        assert taken(final, scores(0.5, 0.0))[-1] is None
        final.note(1.0, 0.0)
        assert final.next(scores(0.5, 0.0), np.ones(3)) is None
        final.note(best, expected)
        assert final.next(scores(0.5, 0.0), np.ones(3)) == 1
