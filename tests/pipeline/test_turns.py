"""Starts that are alive at the same time, whose windows alternate."""

import time

import pytest
from support.compared import FakeArms
from support.small_search import make_settings
from support.synthetic import KeptView

from perfsearch.core.signals import ExitCode
from perfsearch.core.trial import Outcome, Status
from perfsearch.pipeline.compare import Question, compare

CRASH = Outcome(Status.CRASH, reason="the port is taken")


@pytest.fixture
def comparing(tmp_path):
    """Compares arms; what came of it and what was shown."""

    def run(arms, **question):
        view = KeptView()
        settings = make_settings(run_dir=str(tmp_path / "run"), resume="never")
        return compare(settings, arms, Question(**question), view), view

    return run


def blocks_of(arms):
    """What was done in each block: from the first start to the last end."""
    found, alive = [], 0
    for what, name in arms.did:
        if what == "starts" and not alive:
            found.append([])
        found[-1].append((what, name))
        alive += {"starts": 1, "ends": -1}.get(what, 0)
    assert not alive
    return found


def test_all_are_alive_and_each_round_goes_back_as_it_came(comparing):
    arms = FakeArms({"a": 0.1, "b": 0.13, "c": 0.1}, windows={"a": 2, "b": 5, "c": 4})
    result, _ = comparing(arms)
    assert arms.starts[:3] == ["a", "b", "c"], "each is looked at alone first"
    blocks = blocks_of(arms)
    orders = set()
    for block in blocks:
        assert [what for what, _ in block] == ["starts"] * 3 + ["window"] * 18 + ["ends"] * 3
        names = [name for _, name in block]
        rounds = [names[at : at + 3] for at in range(3, 21, 3)]
        assert all(sorted(made) == ["a", "b", "c"] for made in rounds)
        assert [made[::-1] for made in rounds[::2]] == rounds[1::2]
        assert names[-3:] == names[2::-1], "the last to start is the first to end"
        orders |= {tuple(made) for made in rounds}
    assert len(orders) > 2
    measured = {name: arms.starts.count(name) for name in "abc"}
    assert set(measured.values()) == {len(blocks) + 1}
    assert result.exit_code in (ExitCode.NO_DIFFERENCE, ExitCode.DONE)


@pytest.mark.parametrize(("step_s", "code"), [(0.09, ExitCode.DONE), (0.12, ExitCode.SLOWER)])
def test_the_answer_is_that_of_starts_one_at_a_time(comparing, step_s, code):
    arms = FakeArms({"a": 0.1, "b": step_s}, windows={"a": 3, "b": 3})
    assert comparing(arms)[0].exit_code is code


def test_a_start_that_fails_beside_the_others_is_measured_alone(comparing):
    arms = FakeArms({"a": 0.1, "b": 0.12}, windows={"a": 3, "b": 3})
    arms.in_window = lambda name, made: CRASH if (name, made) == ("b", 2) else None
    result, view = comparing(arms)
    assert result.exit_code is ExitCode.SLOWER
    assert "one at a time from now on, as trial " in view.text
    assert view.text.count("failed beside the others: the port is taken") == 1
    assert len(blocks_of(arms)) == 1
    statuses = [trial.status for trial in result.trials]
    assert statuses.count(Status.CRASH) == statuses.count(Status.INTERRUPTED) == 1


def test_a_start_that_fails_alone_too_is_out(comparing):
    def fail(name, start):
        return CRASH if name == "b" and start > 1 else None

    result, view = comparing(FakeArms({"a": 1, "b": 1}, fail=fail, windows={"a": 1, "b": 1}))
    assert result.exit_code is ExitCode.NO_TRIAL_SUCCEEDED
    assert "b is out: crash, the port is taken" in view.text


def test_an_arm_that_does_not_run_alone_is_out_before_any_block(comparing):
    arms = FakeArms(
        {"a": 0.1, "b": 0.1, "c": 0.12},
        fail=lambda name, start: CRASH if name == "b" else None,
        windows={"a": 1, "c": 1},
    )
    result, view = comparing(arms)
    assert result.exit_code is ExitCode.SLOWER
    assert "b is out: crash" in view.text and arms.starts.count("b") == 1
    assert {name for _, name in arms.did} == {"a", "c"}


def test_without_any_other_arm_nothing_is_left_to_measure(comparing):
    arms = FakeArms({"a": 0.1, "b": 0.1}, losses={"b": [3.0, 9.0]}, windows={"a": 1, "b": 1})
    result, _ = comparing(arms)
    assert result.exit_code is ExitCode.OTHER_COMPUTATION
    assert "b: not the same computation: loss of step 1 is 9" in result.verdict.reason
    assert arms.starts.count("b") == 1 and not arms.did


def test_what_speaks_against_it_is_said_once(comparing):
    arms = FakeArms({"a": 0.1, "b": 0.12}, windows={"a": 1, "b": 1})
    arms.against = "they take too much together"
    result, view = comparing(arms)
    assert result.exit_code is ExitCode.SLOWER and not arms.did
    assert view.text.count("from now on, as they take too much together") == 1


def test_an_interrupt_leaves_none_alive(comparing):
    def interrupt(name, made):
        if made == 2:
            raise KeyboardInterrupt

    arms = FakeArms({"a": 0.1, "b": 0.12}, windows={"a": 3, "b": 3})
    arms.in_window = interrupt
    with pytest.raises(KeyboardInterrupt):
        comparing(arms)
    (block,) = blocks_of(arms)
    assert [name for what, name in block if what == "ends"] in (["a", "b"], ["b", "a"])


def test_time_that_is_over_breaks_off_all_of_a_block(comparing):
    arms = FakeArms({"a": 0.1, "b": 0.12}, windows={"a": 9, "b": 9})
    arms.in_window = lambda name, made: time.sleep(0.2)
    result, _ = comparing(arms, seconds=0.5)
    assert result.exit_code is ExitCode.NO_DIFFERENCE
    assert "too few starts" in result.verdict.reason
