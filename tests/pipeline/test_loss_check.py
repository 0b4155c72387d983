"""When losses of two configurations agree."""

import math

import pytest
from support.synthetic import SyntheticRunner

from perfsearch.core.knob import Kind, Knob
from perfsearch.core.losses import loss_disagreement
from perfsearch.core.space import Space
from perfsearch.core.trial import (
    DRAWS_IN_FORWARD,
    Measurement,
    Outcome,
    Purpose,
    Status,
    Trial,
)
from perfsearch.pipeline.loss_check import adds_up, between_starts, other_draws

TOLERANCE = 1e-3


@pytest.mark.parametrize(
    ("expected", "seen", "agree"),
    [
        ([10.8, 10.7], [10.809, 10.7], True),
        ([10.8, 10.7], [10.8, 10.712], False),
        ([0.4, 0.3], [0.4009, 0.3], True),
        ([0.4, 0.3], [0.4011, 0.3], False),
        # a tenth more, at a thousandth: not the same, though 0.001 is not reached
        ([8e-4, 6e-4], [8e-4, 6.6e-4], False),
        ([8e-4, 6e-4], [8e-4, 6.1e-4], True),
        # one that falls to nothing is measured against what it was
        ([0.4, 1e-7], [0.4, 9e-7], True),
        ([0.0, 0.0], [1e-9, 0.0], True),
        ([0.5], [math.nan], False),
    ],
)
def test_losses_agree_within_the_tolerance_whatever_their_size(expected, seen, agree):
    assert (loss_disagreement(expected, seen, TOLERANCE) == "") == agree


def test_what_is_compared_is_told():
    told = loss_disagreement([8e-4], [9e-4], TOLERANCE)
    assert told.endswith("(difference 0.0001, tolerance 4e-05)")
    assert loss_disagreement([20.0], [20.1], TOLERANCE).endswith(
        "(difference 0.005, tolerance 0.001)"
    )


def trial(losses, purpose=Purpose.BASELINE, draws=False, **configuration):
    measured = Measurement([0.1], 8, first_losses=losses)
    if draws:
        measured.environment[DRAWS_IN_FORWARD] = True
    return Trial(0, configuration, purpose, Status.OK, measured)


@pytest.mark.parametrize(
    ("again", "held_to"),
    [
        ([2.0, 1.9], 0.0),
        ([2.06, 1.9], 0.09),
        ([2.06, 1.71], 0.3),  # 10% in the second step
        ([2.4, 1.9], 0.45),  # never as much as half the loss or twice,
        ([4.0, 1.9], 1.5),  # unless the baseline's own starts are so far apart
    ],
)
def test_what_the_baselines_starts_differ_by_is_allowed_thrice(again, held_to):
    today = [trial([2.0, 1.9]), trial(again, Purpose.SENTINEL), trial([2.0, 1.9], Purpose.CONFIRM)]
    assert between_starts(today).share == pytest.approx(held_to)
    failed = Trial(9, {}, Purpose.SENTINEL, Status.CRASH)
    assert between_starts([*today, failed]).share == pytest.approx(held_to)


def test_an_allowance_is_told_with_its_numbers():
    told = between_starts([trial([2.0]), trial([2.062], Purpose.SENTINEL)]).why
    assert "differ by up to 3.1% between two starts" in told and "are held to 9.3%" in told


KNOBS = (
    Knob("micro", Kind.ORDINAL, 4, values=(2, 4), redraws=True),
    Knob("bucket", Kind.ORDINAL, 1, values=(1, 2)),
)


@pytest.mark.parametrize(
    ("losses", "draws", "other", "held_to"),
    [
        ([2.0, 2.0], True, {"micro": 2, "bucket": 1}, 0.05),
        ([2.0, 1.8], True, {"micro": 2, "bucket": 2}, 0.1),
        ([2.0, 0.2], True, {"micro": 2, "bucket": 2}, 0.45),
        ([2.0, 1.8], True, {"micro": 4, "bucket": 2}, 0.0),
        ([2.0, 1.8], False, {"micro": 2, "bucket": 1}, 0.0),
    ],
)
def test_where_other_masks_are_drawn_the_steps_say_what_they_may_change(
    losses, draws, other, held_to
):
    reference = trial(losses, draws=draws, micro=4, bucket=1)
    found = other_draws(reference, other, KNOBS)
    assert found.share == pytest.approx(held_to)
    assert ("another micro:" in found.why) == bool(held_to)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.45])
def test_a_loss_of_another_scale_is_caught_all_the_same(share):
    expected = [2.0, 1.5, 1.2]
    for scale in (0.5, 2.0):
        seen = [scale * loss for loss in expected]
        assert loss_disagreement(expected, seen, TOLERANCE, allowance=share)
    assert not loss_disagreement(expected, [1.001 * v for v in expected], TOLERANCE, allowance=0.1)


@pytest.mark.parametrize(
    ("before", "now", "seen", "times"),
    [
        ({"micro_batch": 8}, {"micro_batch": 2}, [8.0, 7.0], "4"),
        ({"micro_batch": 2}, {"micro_batch": 8}, [0.5, 0.4], "0.25"),
        ({"gradient_accumulation": 1}, {"gradient_accumulation": 2}, [4.04, 3.0], "2"),
        ({"micro_batch": 8}, {"micro_batch": 4}, [2.4, 2.0], ""),  # another loss, not twice
        ({"micro_batch": 8}, {"micro_batch": 8}, [4.0, 3.0], ""),  # twice, for another reason
        ({"bucket": 1}, {"bucket": 2}, [4.0, 3.0], ""),
        ({"micro_batch": 8}, {"micro_batch": 4}, [], ""),
    ],
)
def test_losses_that_grow_with_the_micro_batches_are_told_with_the_way_out(
    before, now, seen, times
):
    told = adds_up(trial([2.0, 1.9], **before), now, [2.0, 1.9], seen)
    if not times:
        assert told == ""
        return
    assert f"times the loss with {times} times the micro-batches: the script adds" in told


def test_a_search_says_so_of_the_trial_that_diverged(search):
    class Adding(SyntheticRunner):
        """Twice the micro-batches are twice the loss."""

        def __init__(self):
            super().__init__()
            self.space = Space([Knob("gradient_accumulation", Kind.ORDINAL, 1, values=(1, 2))])
            self.baseline = {"gradient_accumulation": 1}

        def measure(self, configuration, plan):
            losses = [2.0 * configuration["gradient_accumulation"], 1.9]
            return Outcome(Status.OK, Measurement([0.1] * 8, 32, first_losses=losses))

        def export(self, configuration, directory):
            return []

    result = search(Adding(), strategy={"name": "grid"})
    (diverged,) = [t for t in result.trials if t.status is Status.DIVERGED]
    assert "the script adds gradients up without averaging them" in diverged.reason
    (warned,) = [line for line in search.view.lines if line.startswith("warning")]
    assert "Have it divide each loss by their number before backward()" in warned
