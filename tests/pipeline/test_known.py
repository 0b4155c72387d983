"""What is asked of trials after each, against going through all of them."""

from __future__ import annotations

import random
import statistics

import pytest

from perfsearch.core.space import key_of
from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.pipeline.known import Known


def ended(draw: random.Random) -> list[Trial]:
    trials = []
    for number in range(draw.randrange(20)):
        status = draw.choice([Status.OK, *Status])
        cost = draw.choice([0.1, 0.2, 0.3]) if status is Status.OK else None
        point = {"x": draw.randrange(4)}
        trials.append(Trial(number, point, draw.choice(list(Purpose)), status, cost=cost))
    return trials


@pytest.mark.parametrize("seed", range(50))
@pytest.mark.parametrize("at_once", [False, True])
def test_it_says_what_going_through_all_says(seed: int, at_once: bool) -> None:
    trials = ended(random.Random(seed))
    listed: list[Trial] = []
    known = Known(listed)
    for trial in trials:
        listed.append(trial)
        if not at_once:
            known.catch_up()
            known.like({"x": 1})
    known.catch_up()
    searched = [t for t in trials if t.purpose is Purpose.SEARCH]
    searched = [t for t in searched if t.status is not Status.INTERRUPTED]
    valid = [t for t in searched if t.cost is not None]
    costs = [
        t.cost
        for t in trials
        if t.purpose in (Purpose.BASELINE, Purpose.SENTINEL) and t.cost is not None
    ]
    assert known.searched == searched
    assert known.sentinels == [t for t in trials if t.purpose is Purpose.SENTINEL]
    assert known.best is min(valid, key=lambda t: t.cost or 0.0, default=None)
    assert known.baseline is next((t for t in trials if t.purpose is Purpose.BASELINE), None)
    assert known.baseline_cost == (statistics.median(costs) if costs else None)
    assert known.last_number == len(trials) - 1
    for x in range(4):
        answers = [
            t
            for t in trials
            if key_of(t.configuration) == key_of({"x": x})
            and t.purpose.is_of_search
            and t.status is not Status.INTERRUPTED
            and not t.status.is_from_outside
        ]
        assert known.answer({"x": x}) is next(iter(answers), None)
        assert known.like({"x": x}) == [t for t in trials if t.configuration == {"x": x}]


def test_a_list_that_was_changed_is_read_anew() -> None:
    listed = [Trial(1, {"x": 1}, Purpose.SEARCH, Status.INTERRUPTED)]
    known = Known(listed).catch_up()
    assert known.searched == []
    assert known.like({"x": 1}) == listed
    listed[:] = [Trial(1, {"x": 1}, Purpose.SEARCH, Status.OK, cost=0.1)]
    known.read_anew()
    assert known.catch_up().searched == listed
    assert known.best is listed[0]
    assert known.like({"x": 1}) == listed
