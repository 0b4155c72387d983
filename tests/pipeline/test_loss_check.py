"""When losses of two configurations agree."""

import math

import pytest

from perfsearch.pipeline.session import loss_disagreement

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
