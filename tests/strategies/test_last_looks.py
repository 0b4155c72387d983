from __future__ import annotations

import numpy as np

from perfsearch.strategies._acquisition import Scores
from perfsearch.strategies.bayes import LastLooks


def scores(hope: float, second: float) -> Scores:
    trees = np.array([0.0, 0.0, second])
    return Scores(np.zeros(3), np.array([0.0, hope, 0.0]), second=lambda: trees)


def taken(looks: LastLooks, seen: Scores, at_most: int = 20) -> list[int | None]:
    places = []
    for _ in range(at_most):
        places.append(looks.next(seen))
        if places[-1] is None:
            break
    return places


def test_own_doubt_comes_first_then_the_second_model_then_the_end() -> None:
    assert taken(LastLooks(0.01), scores(0.5, 0.5)) == [1, 1, 2, 2, 2, 2, None]
    assert taken(LastLooks(0.01), scores(0.5, 0.001)) == [1, 1, None]
    assert taken(LastLooks(0.01), scores(0.001, 0.001)) == [None]


def test_without_a_second_model_own_doubt_is_all() -> None:
    seen = Scores(np.zeros(2), np.array([0.5, 0.0]))
    assert taken(LastLooks(0.01), seen) == [0, 0, None]


def test_a_better_trial_or_a_promise_starts_them_anew() -> None:
    for best, promised in ((0.9, 0.0), (1.0, 0.5)):
        looks = LastLooks(0.01)
        looks.note(1.0, 0.0)
        assert taken(looks, scores(0.5, 0.0))[-1] is None
        looks.note(1.0, 0.0)
        assert looks.next(scores(0.5, 0.0)) is None
        looks.note(best, promised)
        assert looks.next(scores(0.5, 0.0)) == 1
