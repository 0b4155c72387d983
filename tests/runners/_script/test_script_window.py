"""The scored window of a script: its steps, its rounds of validation, its trace."""

import re
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.script_starts import Group

from perfsearch.core.trial import Measurement, Purpose, Status, Trial
from perfsearch.instrument.facts import Facts
from perfsearch.runners._script.group import EndedError
from perfsearch.runners._script.start import Runs
from perfsearch.runners._script.window import (
    Start,
    are_faster_again,
    receive_steps,
    score,
    validation_lines,
)
from perfsearch.runners.base import Plan, alone
from perfsearch.workers.group import GroupGone


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([{"event": "ended", "step": 4}] * 2, "made 4 steps and ended"),
        ([{"event": "ended", "step": 0}] * 2, "made no step of a torch optimizer"),
        ([{"event": "step", "step": 9}, {"event": "ended", "step": 8}], "rank 0 made 9, rank 1"),
    ],
)
def test_a_script_that_ends_too_early_says_so(messages, says):
    with pytest.raises(EndedError, match=says):
        receive_steps(Group(messages=messages), Plan(1), 1.0)


def test_a_script_that_ends_too_early_says_how_much_would_do():
    group = Group(messages=[{"event": "ended", "step": 64}] * 2)
    with pytest.raises(EndedError, match=r"after 3 to 8 steps and covers 8 to 60.* 1 s: 68 steps"):
        receive_steps(group, Plan(1), 1.0)
    start = Start(Facts(), seconds=[0.5, 0.005, 0.005])
    with pytest.raises(
        EndedError,
        match=r"made 64 steps.*settled and 60 of 5 ms.* 63 steps and .* s here; 68 steps",
    ):
        alone(score(group, Plan(1), start, time.monotonic() + 1.0, lambda facts: {}))


def of_a_window(step_seconds, aside):
    """What a rank says of its window."""
    return {
        "event": "window", "step": 9, "step_seconds": step_seconds, "aside": aside,
        "phase_seconds": [{"forward": s / 2, "other": s / 2} for s in step_seconds],
        "parts": [{"own_work": s} for s in step_seconds],
        "timing": {}, "sync_points": {}, "bounds": False, "bounds_loading": False, "shapes": 1,
        "waits_ms": [float("nan")] * len(step_seconds), "losses": [1.0] * len(step_seconds),
        "samples": 64, "tokens": 0, "peaks": {}, "why_not_again": "",
        "place": {"host": "a", "device": "cpu"}, "facts": Facts().to_json(),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("first", "later", "none"), [(0, 0, True), (5, 0, False), (0, 1, False), (0, None, False)]
)
def test_a_script_without_batches_is_known_before_trial_0(first, later, none):
    assert Start(Facts(), first_pulls=first, pulls_per_step=later).took_no_batch is none


@pytest.mark.parametrize(
    ("aside", "said"),
    [
        (([1], []), "beside 1 of 4 steps.*900 ms with it, 100 ms without; in the score it is not"),
        (([1], [3]), "beside 2 of 4 steps.*550 ms with it, 100 ms without; in the score it is not"),
        (([0, 1], [1, 2, 3]), "beside every step of the baseline, and is in the score"),
    ],
)
def test_a_round_of_validation_on_any_rank_is_told(aside, said):
    ranks = [[0.1, 0.9, 0.1, 0.1], [0.1, 0.1, 0.1, 0.2]]
    group = Group(messages=[of_a_window(*rank) for rank in zip(ranks, aside, strict=True)])
    start = Start(Facts(), seconds=[0.1, 0.1, 0.1])
    plan = Plan(1, scored_seconds=0.8, scored_steps=(4, 4))
    found = alone(score(group, plan, start, time.monotonic() + 1.0, lambda facts: {}))
    assert found.step_seconds == [0.1, 0.9, 0.1, 0.2]
    assert found.samples_per_step == 32
    assert (found.discarded_steps, found.discarded_seconds) == (3, pytest.approx(0.3))
    without = [place for place in range(4) if all(place not in of_rank for of_rank in aside)]
    parts = [[rank[place] for place in without or range(4)] for rank in ranks]
    mean_s = sum(sum(part) / len(part) for part in parts) / 2
    assert sum(found.phases_ms.values()) == pytest.approx(1e3 * mean_s)
    trial = Trial(0, {}, Purpose.BASELINE, Status.OK, found)
    (line,) = validation_lines([trial])
    assert re.search(said, line)
    seen = [(kind["cause"], kind["scored"]) for kind in found.environment["slow_steps"]]
    assert ("validation", False) in seen if without else seen[0][0] == "validation"
    found.environment.pop("validation")
    assert validation_lines([trial]) == validation_lines([]) == []


class Stretches(Group):
    """A start of which each stretch is answered in its turn, as by the next of ``answers``."""

    def __init__(self, answers):
        super().__init__(messages=[])
        self.answers, self.asked = iter(answers), []

    def send(self, order):
        self.asked.append(order["count"])

    def receive(self, event, limit_s):
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize("end", [[{"event": "ended", "step": 20}], GroupGone(), None])
def test_a_script_that_ends_while_more_is_asked_for_has_been_measured(end):
    stall, even = of_a_window([0.1, 0.9, 0.1, 0.1], []), of_a_window([0.1, 0.9, 0.1, 0.1], [1])
    more = [even] if end is None else end
    group = Stretches([[stall], more, [of_a_window([0.1, 0.9, 0.1], [])]])
    start = Start(Facts(), seconds=[0.1, 0.1, 0.1])
    plan = Plan(1, scored_seconds=0.4, scored_steps=(4, 4))
    found = alone(score(group, plan, start, time.monotonic() + 100.0, lambda facts: {}))
    if end is None:
        assert group.asked == [4, 4, 3] and not start.over
        assert found.step_seconds == [0.1, 0.9, 0.1, 0.1] * 2 + [0.1, 0.9, 0.1]
        assert found.environment["validation"]["steps"] == 1
        assert found.samples_per_step == round(3 * 64 / 11)
    else:
        assert group.asked == [4, 4] and start.over
        assert found.step_seconds == [0.1, 0.9, 0.1, 0.1]
        assert start.gone is isinstance(end, GroupGone)


class InTurns(Group):
    """A start that is measured in turns: steps of 0.1 s, until ``ends_after`` of them are made."""

    def __init__(self, ends_after=1000):
        super().__init__()
        self.did, self.left = [], ends_after

    def send(self, order):
        self.did.append(order)

    def receive(self, event, limit_s):
        order = self.did[-1]
        if order["op"] == "pause":
            return [{"event": "paused", "step": 1}] * 2
        if order["count"] > self.left:
            return [{"event": "ended", "step": 9}] * 2
        self.left -= order["count"]
        return [of_a_window([0.1] * order["count"], [])] * 2


def in_turns(group, **changes):
    """Its measurement, and what is known of the start."""
    start = Start(Facts(), seconds=[0.1, 0.1, 0.1])
    plan = Plan(1, scored_steps=(8, 60), turn_seconds=0.25, **changes)
    return score(group, plan, start, time.monotonic() + 100.0, lambda facts: {}), start


def test_windows_in_turns_have_all_steps_and_are_held_between():
    group = InTurns()
    turns, start = in_turns(group, scored_seconds=1.1, look_steps=15)
    found = alone(turns)
    assert found.step_seconds == [0.1] * 15 and not start.over
    ops = [order["op"] for order in group.did]
    assert ops[::2] == ["pause"] * len(ops[::2]) and set(ops[1::2]) == {"score"}
    assert ops[-1] == "pause", "it waits to be ended"
    scored = [(order["first"], order["count"]) for order in group.did[1::2]]
    assert scored == [(0, 2), (2, 2), (4, 2), (6, 2), (8, 3), (0, 2), (2, 2)]
    assert [count for _, count in found.environment["turns"]] == [count for _, count in scored]
    assert found.phases_ms["forward"] == pytest.approx(50)


def test_it_goes_on_in_turns_for_as_long_as_others_need_it():
    group = InTurns()
    turns, _ = in_turns(group, scored_seconds=0.8)
    enough = [next(turns)] + [turns.send(True) for _ in range(7)]
    assert enough == [False] * 4 + [True] * 4
    with pytest.raises(StopIteration) as end:
        turns.send(False)
    assert len(end.value.value.step_seconds) == 14


def test_a_script_that_ends_in_turns_has_been_measured_after_its_first_stretch():
    turns, _ = in_turns(InTurns(ends_after=7), scored_seconds=0.8)
    with pytest.raises(EndedError, match="made 9 steps and ended"):
        alone(turns)
    turns, start = in_turns(InTurns(ends_after=12), scored_seconds=0.8, look_steps=16)
    assert alone(turns).step_seconds == [0.1] * 12 and start.over


def test_a_round_of_validation_in_the_last_step_does_not_shorten_the_window():
    group = Group(messages=[{"event": "ended", "step": 5}] * 2)
    start = Start(Facts(), seconds=[0.2, 0.01, 0.01, 0.9])
    with pytest.raises(EndedError):
        alone(
            score(
                group, Plan(1, scored_seconds=0.3), start, time.monotonic() + 1.0, lambda facts: {}
            )
        )
    assert group.told == {"op": "score", "count": 30, "each": 3, "first": 0}


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([{"event": "traced", "reason": ""}] * 2, "^$"),
        ([{"event": "traced", "reason": ""}, {"event": "traced", "reason": "no CUPTI"}], "CUPTI"),
        ([{"event": "traced", "reason": ""}, {"event": "ended"}], "ended before 3 more steps"),
        (GroupGone(2.0), "the time for them was over"),
        (GroupGone(), "and it failed"),
    ],
)
def test_what_kept_a_trace_from_being_made_is_told(messages, says):
    group = Group(messages=[] if isinstance(messages, GroupGone) else messages)
    if isinstance(messages, GroupGone):
        group.receive = Mock(side_effect=messages)
    assert re.search(says, Runs._trace(group, Plan(number=4), deadline=0.0))
    assert group.told["count"] == 3 and Path(group.told["directory"]).is_absolute()


@pytest.mark.parametrize(
    ("first", "again", "faster"),
    [
        ([5, 1, 5, 1, 5, 1, 5, 1, 5, 1, 5, 1, 5, 1, 5, 1], [1] * 16, True),  # planned once
        ([5, 1, 5, 1, 5, 1, 5, 1, 5, 1, 5, 1, 5, 1, 5, 1], [1, 5] * 8, False),  # other work
        ([5, 1, 1, 5, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1] * 16, False),  # too few
        ([1.2] * 16, [1] * 16, False),
        # planned in every other step, and short steps that are longer or shorter by chance
        ([5, 0.1, 5, 0.1] * 4, [0.1, 0.3] * 8, True),
        ([5, 0.3, 0.3, 0.3] * 4, [5, 0.1, 0.1, 0.1] * 4, False),
    ],
)
def test_steps_are_faster_again_where_that_is_no_chance(first, again, faster):
    """The first window has one step more before it: the one that is not made again."""
    made = Measurement([float(s) for s in first], 1, discarded_steps=4)
    repeated = Measurement([float(s) for s in again], 1, discarded_steps=3)
    assert are_faster_again(made, repeated) is faster
