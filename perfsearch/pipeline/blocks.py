"""Arms measured in blocks, each arm once a block, until what is asked of them is decided."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from perfsearch.core.trial import Status, Trial
from perfsearch.core.verdict import Answer, Plan, Reading, block_orders, read


@dataclass
class Blocks:
    """A comparison under way: its arms, and what was seen of them so far.

    An arm that fails once is out. Where the reference fails, nothing is left to compare with, and
    where a block is cut off, what there is of it is not used.

    Attributes:
        arms: those that have not failed; the reference is the first.
        plan: when the pairs are read; ``None``: there is only one block, which has no spread.
        seed: by which the orders are drawn.
        measure: gives the trial of an arm in a block; ``interrupted`` where the time for it ended.
        is_over: whether the time for all of it is.
        costs: of each arm, a number for each block.
        trials: in order.
        readings: what the pairs of each arm with the reference say.
        failed: the failed trial of each arm that is out.
        measure_together: gives the trials of all arms of a block, in the order in which they are
            named; none where they are to be measured one by one.

    """

    arms: list[int]
    plan: Plan | None
    seed: int
    measure: Callable[[int, int], Trial]
    is_over: Callable[[], bool]
    costs: dict[int, list[float]] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)
    readings: dict[int, Reading] = field(default_factory=dict)
    failed: dict[int, Trial] = field(default_factory=dict)
    measure_together: Callable[[list[int], int], list[Trial]] = lambda arms, block: []

    def run(
        self,
        when_failed: Callable[[int, Trial], None],
        when_read: Callable[[int], None] = lambda blocks: None,
    ) -> None:
        """Measure until no answer is open, the time is over, or nothing is left to compare.

        Args:
            when_failed: told of an arm that is out, and how it failed.
            when_read: told after how many blocks ``readings`` were taken anew.

        """
        names = list(self.arms)
        self.costs.update({arm: [] for arm in names})
        if len(names) < 2:
            return  # the others were left out before
        most = 1 if self.plan is None else self.plan.most
        for block, order in enumerate(block_orders(self.seed, most, len(names))):
            whole = self._measure_block(block, [names[i] for i in order], when_failed)
            if names[0] in self.failed or len(self.arms) < 2:
                self.readings.clear()
                return
            over = not whole or self.is_over()
            blocks = min(len(self.costs[arm]) for arm in self.arms)
            for arm in self.arms:
                del self.costs[arm][blocks:]
            if self._read(blocks, over):
                when_read(blocks)
                if Answer.OPEN not in {reading.answer for reading in self.readings.values()}:
                    return
            if over:
                return

    def _measure_block(
        self, block: int, order: list[int], when_failed: Callable[[int, Trial], None]
    ) -> bool:
        """Measure each arm that is not out; whether there was time for all of it."""
        for arm, trial in self._measured([arm for arm in order if arm in self.arms], block):
            self.trials.append(trial)
            if trial.status is Status.INTERRUPTED:
                return False
            if trial.status is Status.OK and trial.cost is not None:
                self.costs[arm].append(trial.cost)
                continue
            is_reference = arm == self.arms[0]
            self.leave_out(arm, trial, when_failed)
            if is_reference or len(self.arms) < 2:
                break  # whatever is left reads, there is nothing to compare it with
        return True

    def _measured(self, arms: list[int], block: int) -> Iterable[tuple[int, Trial]]:
        """Each arm with its trial in this block, which is measured now unless all were together."""
        together = self.measure_together(arms, block)
        if together:
            return zip(arms, together, strict=False)  # fewer where the time for it was over
        return ((arm, self.measure(arm, block)) for arm in arms)

    def leave_out(self, arm: int, trial: Trial, when_failed: Callable[[int, Trial], None]) -> None:
        """Go on without an arm that has failed."""
        self.failed[arm] = trial
        self.arms.remove(arm)
        self.readings.pop(arm, None)
        when_failed(arm, trial)

    def _read(self, blocks: int, last: bool) -> bool:
        """Read the pairs where that is planned, or nothing comes after it."""
        plan = self.plan
        if plan is None or blocks < 2 or not (last or blocks in plan.looks):
            return False
        reference, *others = self.arms
        for arm in others:
            pairs = zip(self.costs[reference], self.costs[arm], strict=True)
            self.readings[arm] = read([math.log(a / b) for a, b in pairs], plan, last)
        return True
