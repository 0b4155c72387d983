"""What is asked of a search's trials after each of them, without going through all of them."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Mapping

from perfsearch.core.knob import Value
from perfsearch.core.space import key_of
from perfsearch.core.trial import Purpose, Status, Trial


class Known:
    """Follows a list of trials as it grows.

    Args:
        trials: in order of their ends, each number once; whoever shortens or reorders it calls
            ``read_anew``.

    Attributes:
        by_number: each trial by its number.
        searched: trials of the search stage that came to an end of their own.
        sentinels: those of the baseline, measured again.
        best: the fastest valid search trial, by its single reading; the earliest of equals.
        baseline: trial 0, once it has ended.
        last_number: the largest so far, -1 before the first.

    """

    def __init__(self, trials: list[Trial]) -> None:
        self._trials = trials
        self.read_anew()

    def read_anew(self) -> None:
        """Begin at the front."""
        self.by_number: dict[int, Trial] = {}
        self.searched: list[Trial] = []
        self.sentinels: list[Trial] = []
        self.best: Trial | None = None
        self.baseline: Trial | None = None
        self.last_number = -1
        self._answers: dict[str, Trial] = {}
        self._costs: list[float] = []
        self._read = 0
        self._like: dict[str, tuple[int, list[Trial]]] = {}

    def catch_up(self) -> Known:
        """Take in what was added to the list; returns itself."""
        for trial in self._trials[self._read :]:
            self._take(trial)
        self._read = len(self._trials)
        return self

    @property
    def baseline_cost(self) -> float | None:
        """Median cost of the baseline and its sentinels."""
        return statistics.median(self._costs[_middle(self._costs)]) if self._costs else None

    def answer(self, configuration: Mapping[str, Value]) -> Trial | None:
        """The trial that already answers ``configuration``, if there is one."""
        return self._answers.get(key_of(configuration))

    def like(self, configuration: Mapping[str, Value]) -> list[Trial]:
        """Every trial of ``configuration``, whatever for and however it ended."""
        key = key_of(configuration)
        read, found = self._like.get(key, (0, []))
        found += [t for t in self._trials[read:] if key_of(t.configuration) == key]
        self._like[key] = len(self._trials), found
        return found

    def _take(self, trial: Trial) -> None:
        self.by_number[trial.number] = trial
        self.last_number = max(self.last_number, trial.number)
        purpose, cost = trial.purpose, trial.cost
        ended = trial.status is not Status.INTERRUPTED
        if purpose is Purpose.BASELINE and self.baseline is None:
            self.baseline = trial
        if purpose is Purpose.SENTINEL:
            self.sentinels.append(trial)
        if purpose in (Purpose.BASELINE, Purpose.SENTINEL) and cost is not None:
            bisect.insort(self._costs, cost)
        if purpose is Purpose.SEARCH and ended:
            self.searched.append(trial)
            valid = trial.status is Status.OK and cost is not None
            if valid and (self.best is None or (cost or 0.0) < (self.best.cost or 0.0)):
                self.best = trial
        if purpose.is_of_search and ended and not trial.status.is_from_outside:
            self._answers.setdefault(key_of(trial.configuration), trial)


def _middle(ordered: list[float]) -> slice:
    """The one or two values whose mean is the median."""
    return slice((len(ordered) - 1) // 2, len(ordered) // 2 + 1)
