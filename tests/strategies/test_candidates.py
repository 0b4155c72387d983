from __future__ import annotations

import numpy as np

from perfsearch.core.hints import Hints
from perfsearch.core.knob import Kind, Knob
from perfsearch.core.space import Space
from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.strategies._candidates import Candidates, from_the_baseline, with_nulls_apart
from perfsearch.strategies._history import History
from perfsearch.strategies.bayes import Bayes

MINOR = [Knob(f"minor{n}", Kind.ORDINAL, 1, (1, 2, 4, 8)) for n in range(12)]
SOCKETS = Knob("sockets", Kind.ORDINAL, None, (None, 1, 2, 4, 8))
THREADS = Knob("threads", Kind.ORDINAL, None, (None, 1, 2, 4))
BUCKET = Knob("bucket", Kind.REAL, 25.0, low=1.0, high=512.0, log=True)
WIDE = Space([*MINOR[:6], SOCKETS, THREADS, BUCKET, *MINOR[6:]])
BASELINE = {k.name: k.default for k in WIDE.knobs}
WEIGHT = np.array([{"sockets": 3.0, "threads": 2.0, "bucket": 1.0}.get(k.name, 0.1)
                   for k in WIDE.knobs])  # fmt: skip


def changes(point: dict) -> set[str]:
    return {name for name, value in point.items() if value != BASELINE[name]}


def test_the_first_of_a_wide_space_spread_what_matters_and_leave_the_rest() -> None:
    points = [from_the_baseline(WIDE, BASELINE, WEIGHT, n, 3) for n in range(8)]
    assert all({"sockets", "threads", "bucket"} <= changes(point) for point in points)
    assert {p["sockets"] for p in points} == {1, 2, 4, 8}
    others = [len(changes(p)) - 3 for p in points]
    assert 0 < np.mean(others) < 5
    assert points == [from_the_baseline(WIDE, BASELINE, WEIGHT, n, 3) for n in range(8)]


def test_null_is_no_neighbour_of_the_least_value() -> None:
    points = [{**BASELINE, "sockets": value} for value in (None, 1, 2)]
    column = with_nulls_apart(WIDE, WIDE.encode(points))[:, 6]
    assert column[1] - column[0] > 2 * (column[2] - column[1])


def test_a_large_space_offers_the_centers_with_a_few_knobs_changed() -> None:
    history = History(WIDE, 0)
    generator = np.random.default_rng(0)
    plain = Candidates(WIDE, history, WEIGHT).list(generator)[0]
    around = Candidates(WIDE, history, WEIGHT).list(generator, [], BASELINE)
    few = [p for p in around[0] if len(changes(p)) <= 3]
    assert not [p for p in plain if len(changes(p)) <= 3]
    assert len(few) > 100
    assert np.mean(["sockets" in changes(p) for p in few]) > 0.3
    assert around[1].shape == (len(around[0]), len(WIDE.knobs))


def test_two_knobs_that_only_work_together_are_found_among_fifteen() -> None:
    def cost(point: dict) -> float:
        both = point["sockets"] is not None and point["threads"] == 2
        harm = 1.0 + 0.2 * (point["minor3"] == 8)
        return harm * (1.0 + 0.1 * abs(np.log(point["bucket"] / 64.0))) / (2.0 if both else 1.0)

    order = ("sockets", "threads", "bucket", *(k.name for k in MINOR))
    found = []
    for seed in range(3):
        strategy = Bayes(WIDE, Hints(dict(BASELINE), effect_order=order), seed)
        point = BASELINE
        best = np.inf
        for number in range(21):
            trial = Trial(number, dict(point), Purpose.SEARCH, Status.OK, cost=cost(point))
            best = min(best, trial.cost)
            strategy.tell(trial)
            point = strategy.ask() or BASELINE
        found.append(best)
    assert max(found) < 0.6  # the best is 0.5, the baseline 1.09


def test_around_are_the_listed_within_two_steps() -> None:
    axis = (1, 2, 4, 8, 16, 32, 64)
    small = Space([Knob(name, Kind.ORDINAL, 1, axis) for name in "ab"])
    for space, center in ((small, {"a": 8, "b": 8}), (WIDE, BASELINE)):
        history = History(space, 0)
        tried = space.neighbours(center)[0]
        history.tell(Trial(1, tried, Purpose.SEARCH, Status.OK, cost=0.1))
        candidates = Candidates(space, history)
        points, _ = candidates.list(np.random.default_rng(0), [center])
        near = [points[place] for place in candidates.around(center)]
        assert near
        assert tried not in near
        steps = [sum(point[k] != center[k] for k in center) for point in near]
        assert max(steps) == 2
        assert all(point in near for point in space.neighbours(center) if point != tried)
