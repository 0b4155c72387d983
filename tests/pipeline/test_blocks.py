from collections import Counter

import numpy as np
import pytest

from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.core.verdict import Answer, plan_of_starts
from perfsearch.pipeline.blocks import Blocks


class Arms:
    """Arms of known cost; what is measured is kept."""

    def __init__(self, costs, noise=0.002, ends=None):
        self.costs, self.noise, self.ends = costs, noise, ends or {}
        self.seen = []
        self.failed = []
        self.reads = []
        self.generator = np.random.default_rng(3)

    def measure(self, arm, block):
        self.seen.append((block, arm))
        status = self.ends.get((arm, block), Status.OK)
        cost = float(self.costs[arm] * np.exp(self.noise * self.generator.normal()))
        return Trial(len(self.seen), {}, Purpose.CONFIRM, status, cost=cost)

    def compare(self, plan, is_over=lambda: False):
        blocks = Blocks(list(self.costs), plan, 1, self.measure, is_over)
        blocks.run(lambda arm, trial: self.failed.append(arm), self.reads.append)
        return blocks


def test_each_arm_is_measured_once_a_block_in_an_order_that_is_drawn():
    arms = Arms({-1: 1.0, 7: 1.0, 9: 0.999}, noise=0.05)
    blocks = arms.compare(plan_of_starts(8, comparisons=2))
    assert set(Counter(arms.seen).values()) == {1}
    assert {len(costs) for costs in blocks.costs.values()} == {len(arms.seen) // 3}
    orders = {tuple(a for b, a in arms.seen if b == block) for block in range(4)}
    assert len(orders) > 1


def test_it_ends_when_every_question_is_decided():
    arms = Arms({-1: 1.0, 7: 0.9})
    blocks = arms.compare(plan_of_starts(8))
    assert blocks.readings[7].answer is Answer.FASTER
    assert arms.reads == [3]
    slower = Arms({-1: 1.0, 7: 1.1}).compare(plan_of_starts(8))
    assert slower.readings[7].answer is Answer.SLOWER


def test_an_arm_that_fails_is_out_and_the_others_go_on():
    arms = Arms({-1: 1.0, 7: 0.9, 9: 0.9}, ends={(7, 1): Status.OOM})
    blocks = arms.compare(plan_of_starts(8, comparisons=2))
    assert arms.failed == [7] and set(blocks.failed) == {7}
    assert blocks.arms == [-1, 9] and set(blocks.readings) == {9}
    assert (2, 7) not in arms.seen


def test_without_the_reference_nothing_is_left_to_compare():
    arms = Arms({-1: 1.0, 7: 0.9}, ends={(-1, 3): Status.CRASH}, noise=0.2)
    blocks = arms.compare(plan_of_starts(8))
    assert -1 in blocks.failed and not blocks.readings
    assert max(block for block, _ in arms.seen) == 3


@pytest.mark.parametrize("cut_off", [1, 2, 3])
def test_a_block_that_is_cut_off_is_not_used_and_what_is_there_is_read_as_the_last(cut_off):
    arms = Arms({-1: 1.0, 7: 0.9}, ends={(7, cut_off): Status.INTERRUPTED}, noise=0.1)
    blocks = arms.compare(plan_of_starts(8))
    assert {len(costs) for costs in blocks.costs.values()} == {cut_off}
    assert bool(blocks.readings) == (cut_off > 1)
    assert all(reading.last for reading in blocks.readings.values())


def test_time_that_is_over_ends_it_after_the_block():
    arms = Arms({-1: 1.0, 7: 0.99}, noise=0.1)
    blocks = arms.compare(plan_of_starts(8), is_over=lambda: len(arms.seen) >= 3)
    assert blocks.readings[7].pairs == 2 and blocks.readings[7].last


def test_a_single_block_has_no_interval():
    arms = Arms({-1: 1.0, 7: 0.5})
    blocks = arms.compare(None)
    assert len(arms.seen) == 2 and not blocks.readings
