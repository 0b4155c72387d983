"""How far a search is, and how long the rest of it takes."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from perfsearch.core.trial import Purpose, Status, Trial

if TYPE_CHECKING:
    from perfsearch.config.schema import Settings

SEARCH, CONFIRM = "search", "confirm"
"""The two stages that take long."""


@dataclass
class Progress:
    """One measure over search and confirmation, from the times of the trials so far.

    Attributes:
        trials: the budget's number of search trials; ``None``: no limit.
        pairs: of the confirmation, at most.
        arms: that each of its blocks starts.
        confirm_seconds: its limit; ``None``: there is none.
        begin: monotonic time of the first stage.
        searched: search trials that ended.
        confirmed: confirmation's trials that ended.
        expected: confirmation's trials that are expected, once that is known.

    """

    trials: int | None = None
    pairs: int = 0
    arms: int = 2
    confirm_seconds: float | None = None
    begin: float = field(default_factory=lambda: time.monotonic())
    searched: int = 0
    confirmed: int = 0
    expected: int | None = None
    _stage: str = ""
    _since: float = 0.0
    _start_s: float | None = None
    _budget: tuple[float, float] | None = None
    _confirm_s: list[float] = field(default_factory=list)
    _shown: float = 0.0

    @classmethod
    def of(cls, settings: Settings) -> Progress:
        """That of a search with these settings."""
        confirm = settings.confirm
        pairs = confirm.max_repeats if confirm.finalists else 0
        return cls(settings.budget.trials, pairs, 1 + confirm.finalists, confirm.seconds)

    def stage(self, name: str) -> None:
        """A stage begins."""
        self._stage, self._since = name, time.monotonic()

    def ended(self, trial: Trial, budget_s: float | None) -> None:
        """A trial ended, and so much of ``budget.seconds`` is left."""
        if trial.purpose is Purpose.BASELINE and trial.status is Status.OK:
            self._start_s = trial.seconds
        elif trial.purpose is Purpose.SEARCH:
            self.searched += 1
        elif trial.purpose in (Purpose.CONFIRM, Purpose.REPEAT):
            self.confirmed += 1
            self._confirm_s.append(trial.seconds)
        self._budget = None if budget_s is None else (budget_s, time.monotonic())

    @property
    def left_s(self) -> float | None:
        """Seconds that are left; ``None`` where nothing says how many."""
        confirm_s = self._confirm_left_s()
        if self._stage == CONFIRM:
            return confirm_s
        search_s = self._search_left_s()
        return None if search_s is None or confirm_s is None else search_s + confirm_s

    @property
    def done(self) -> float:
        """Share of the whole that is done; it never falls."""
        left_s = self.left_s
        if left_s is not None:
            spent_s = time.monotonic() - self.begin
            self._shown = max(self._shown, spent_s / max(spent_s + left_s, 1e-9))
        return self._shown

    @property
    def count(self) -> str:
        """How many trials of the stage there were, and are to come."""
        if self._stage == CONFIRM:
            return f"{self.confirmed} of about {self.expected}" if self.expected else ""
        if self._stage != SEARCH:
            return ""
        return f"{self.searched}" if self.trials is None else f"{self.searched} of {self.trials}"

    def _search_left_s(self) -> float | None:
        if self._stage != SEARCH:
            return None
        limits = []
        now = time.monotonic()
        if self._budget is not None:
            limits.append(max(0.0, self._budget[0] - (now - self._budget[1])))
        if self.trials is not None and self.searched:
            each_s = (now - self._since) / self.searched
            limits.append(max(0, self.trials - self.searched) * each_s)
        return min(limits, default=None)

    def _confirm_left_s(self) -> float | None:
        if not self.pairs:
            return 0.0
        each_s = statistics.fmean(self._confirm_s) if self._confirm_s else self._start_s
        if each_s is None:
            return None
        count = self.expected or self.pairs * self.arms
        left_s = max(0, count - self.confirmed) * each_s
        if self.confirm_seconds is None:
            return left_s
        return min(left_s, max(0.0, self.confirm_seconds - sum(self._confirm_s)))
