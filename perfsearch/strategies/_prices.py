"""What a trial costs in seconds, learned by what must restart for it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from perfsearch.core.knob import Configuration, Scope, Value
from perfsearch.core.space import Space
from perfsearch.core.trial import Status, Trial
from perfsearch.strategies._candidates import with_nulls_apart
from perfsearch.strategies._history import History

_DEARER = 1.5
"""Prices that differ by a smaller factor are alike where nothing is known of the gain."""


class Prices:
    """Predicts the seconds of a trial from the widest scope among the knobs that it changes.

    What it changes is seen against the trial before it, which is what still runs; where several run
    at a time, against the one before it on the same share of the devices, which is the last that
    ended when a trial is proposed. After a failure nothing does, and whatever comes next starts
    processes. A scope's price is the median of its trials so far. Before there is one, a change
    between two steps is taken for the steps of the first trial alone, and a new process group for
    the geometric mean of that and a new start, so that each is tried early and known from then on.
    Where trials have no seconds all cost 1.

    Args:
        space: encodes configurations.
        history: trials that ended, and proposals whose trials have not.

    """

    def __init__(self, space: Space, history: History) -> None:
        self._space, self._history = space, history
        order = list(Scope)
        self._ranks = np.array([order.index(knob.scope) for knob in space.knobs], dtype=int)

    def seconds(self, rows: np.ndarray) -> np.ndarray:
        """Predicted seconds of a trial of each encoded configuration."""
        prices = self._by_rank()
        if prices is None:
            return np.ones(len(rows))
        in_force = self._in_force()
        before = None if in_force is None else self._encoded([in_force])[0]
        return np.asarray(prices[self._rank(with_nulls_apart(self._space, rows), before)])

    def cheap(self, rows: np.ndarray) -> np.ndarray:
        """Which of the encoded configurations cost about as little as the cheapest of them."""
        seconds = self.seconds(rows)
        return np.asarray(seconds <= _DEARER * seconds.min(initial=np.inf))

    def dear(self, rows: np.ndarray) -> np.ndarray:
        """Which of them cost clearly more than what a running job can change; none where nothing
        runs, as whatever comes next starts processes then.
        """
        prices = self._by_rank()
        if prices is None or self._in_force() is None:
            return np.zeros(len(rows), dtype=bool)
        return np.asarray(self.seconds(rows) > _DEARER * prices.min())

    def cheapest_first(self, points: Sequence[Configuration]) -> list[dict[str, Value]]:
        """The points by what they cost, in the given order where that is about the same."""
        left = [dict(point) for point in points]
        ordered: list[dict[str, Value]] = []
        while left:
            cheap = self.cheap(self._space.encode(left))
            ordered += [point for point, is_cheap in zip(left, cheap, strict=True) if is_cheap]
            left = [point for point, is_cheap in zip(left, cheap, strict=True) if not is_cheap]
        return ordered

    def starts(self) -> int:
        """How many settings were tried of the knobs that cost more to change than others do."""
        dear = np.flatnonzero(~self.cheap_knobs())
        trials = [t.configuration for t in self._ran()]
        points = [*trials, *self._history.outstanding.values()]
        return len({tuple(row) for row in self._encoded(points)[:, dear]})

    def cheap_knobs(self) -> np.ndarray:
        """Which knobs can be changed, against what is in force, for about the least price."""
        prices = self._by_rank()
        if prices is None or self._in_force() is None:
            return np.ones(len(self._ranks), dtype=bool)
        seconds = prices[self._ranks]
        return np.asarray(seconds <= _DEARER * seconds.min(initial=np.inf))

    def with_cheap_changes(self, point: Configuration) -> dict[str, Value]:
        """The point with what is in force wherever changing it costs more than other knobs do."""
        in_force, cheap = self._in_force() or {}, self.cheap_knobs()
        names = [k.name for k, is_cheap in zip(self._space.knobs, cheap, strict=True) if is_cheap]
        return self._space.canonical({**point, **in_force, **{name: point[name] for name in names}})

    def _by_rank(self) -> np.ndarray | None:
        """Seconds by the rank of the scope; ``None`` where no trial has any."""
        seen = self._seen()
        known = [statistics.median_low(seconds) if seconds else None for seconds in seen]
        step, group, process = known
        process = process or max((price for price in known if price), default=None)
        if process is None:
            return None
        if step is None:
            first = next(t for t in self._ran() if _tells_price(t))
            step = min(process, first.seconds - first.overhead_seconds)
            step = step if step > 0 else process
        group = group or (step * process) ** 0.5
        return np.maximum.accumulate([step, group, process])

    def _seen(self) -> list[list[float]]:
        """Seconds of the trials so far, by the rank of what changed.

        The first new start that no knob asked for is left out: the processes before it may have
        been ended for a reason of their own, such as a profile. Further ones are the rule.
        """
        seen: list[list[float]] = [[] for _ in Scope]
        ran = self._ran()
        in_lane: dict[int, np.ndarray | None] = {}
        unasked = 0
        rows = self._encoded([trial.configuration for trial in ran])
        for trial, row in zip(ran, rows, strict=True):
            rank = int(self._rank(row[None], in_lane.get(trial.lane))[0])
            unasked += trial.fresh_process and rank < len(Scope) - 1
            odd = trial.fresh_process and rank < len(Scope) - 1 and unasked == 1
            if _tells_price(trial) and not odd:
                seen[rank].append(trial.seconds)
            in_lane[trial.lane] = None if _ends_processes(trial) else row
        return seen

    def _rank(self, rows: np.ndarray, before: np.ndarray | None) -> np.ndarray:
        """Rank of the widest scope that changes from one row to each of the others."""
        if before is None:
            return np.full(len(rows), len(Scope) - 1)
        changed = np.abs(rows - before) > 1e-9
        return np.asarray((changed * self._ranks).max(axis=1, initial=0))

    def _in_force(self) -> dict[str, Value] | None:
        """What the next trial meets: the last that was proposed or ended, whichever came later."""
        if self._history.was_asked and self._history.outstanding:
            return list(self._history.outstanding.values())[-1]
        ran = self._ran()
        if not ran or _ends_processes(ran[-1]):
            return None
        return self._space.canonical(ran[-1].configuration)

    def _ran(self) -> list[Trial]:
        """Trials of this search in the order in which they ran, each once."""
        ran: dict[int, Trial] = {}
        for trial in self._history.of_space:
            if trial.number >= 0:
                ran.setdefault(trial.number, trial)
        return list(ran.values())

    def _encoded(self, points: Sequence[Configuration]) -> np.ndarray:
        return with_nulls_apart(self._space, self._space.encode(points))


def _tells_price(trial: Trial) -> bool:
    return trial.status in (Status.OK, Status.PRUNED) and trial.seconds > 0


def _ends_processes(trial: Trial) -> bool:
    return trial.status.has_failed or trial.status is Status.INTERRUPTED
