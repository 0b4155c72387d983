"""Samples: a configuration put into force on every rank, scored, and rolled back where it fails.

Everything here is plain logic in generators that yield instructions and get reports.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from perfsearch.core.knob import Value
from perfsearch.core.space import key_of
from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.online.log import Entry
from perfsearch.online.messages import APPLY, RUN, Instruction, Report, slowest, slowest_discarded
from perfsearch.online.options import AutotuneOptions

_TOO_SLOW = 3.0
"""A step that takes this many times today's ends a sample early."""

NOT_IN_TIME = "not in force within"
"""How the failure of a configuration that took too long begins."""


class ProposerEndedError(RuntimeError):
    """What proposes configurations ended by itself; tuning cannot go on, training can."""


class NotRestoredError(RuntimeError):
    """Neither a configuration nor the one before it could be put into force: ranks may differ."""


Steps = Generator[Instruction, list[Report], Any]


class Proposer(Protocol):
    """Where proposals come from; ``StrategyProcess`` is one."""

    def open(self, facts: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Say what there is to tune; it is answered."""

    def tell(self, trial: Trial) -> None:
        """Pass on a trial."""

    def ask(self) -> None:
        """Ask what to try next; it is answered."""

    def answer(self, within_s: float) -> dict[str, Any] | None:
        """The next answer, ``None`` where it does not come in time."""


class Recorder(Protocol):
    """Where rows and remarks go."""

    def open(self, knobs: list[str]) -> None:
        """Name the columns, before the first row."""

    def write(self, entry: Entry) -> None:
        """Append a row."""

    def say(self, text: str) -> None:
        """Tell the user."""


@dataclass
class Arm:
    """A configuration with all its samples."""

    trial: int
    configuration: dict[str, Value]
    costs: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)

    @property
    def cost(self) -> float:
        """Mean of the samples' scores, seconds a step; without end where there is none."""
        return statistics.fmean(self.costs) if self.costs else math.inf

    def forget(self) -> None:
        """Drop the samples."""
        self.costs, self.errors = [], []

    @property
    def error(self) -> float:
        """Standard error of the cost, relative, from the steps of each sample."""
        return math.hypot(*self.errors) / len(self.errors)


class Sampler:
    """Takes samples of one model.

    Attributes:
        current: what is in force on every rank.
        train_iter: optimizer steps so far.
        step_s: seconds of a step as last seen.

    """

    def __init__(self, options: AutotuneOptions, recorder: Recorder) -> None:
        self._options = options
        self._recorder = recorder
        self._arms: dict[str, Arm] = {}
        self._trials = 0
        self._settled = True
        self._today_s = math.inf
        self.current: dict[str, Value] = {}
        self.train_iter = 0
        self.step_s = math.inf

    @property
    def arms(self) -> list[Arm]:
        """Every configuration with a score, today's first."""
        return [arm for arm in self._arms.values() if arm.costs]

    @property
    def best(self) -> Arm:
        """The one of least cost."""
        return min(self._arms.values(), key=lambda arm: arm.cost)

    def forget(self) -> None:
        """Drop the scores: they hold no longer."""
        self._arms = {}
        self._today_s = math.inf

    def arm_of(self, configuration: Mapping[str, Value]) -> Arm:
        """A configuration's samples so far, none for a new one."""
        arm = self._arms.get(key_of(configuration))
        return arm or Arm(self._trials, dict(configuration))

    def train(self, steps: int) -> Generator[Instruction, list[Report], list[float]]:
        """Train without a score; seconds of each step on the slowest rank."""
        reports = yield Instruction(RUN, discard=steps)
        return self.note(reports)

    def note(self, reports: list[Report]) -> list[float]:
        """Take over what reports say of steps that were not scored."""
        self.train_iter = reports[0].train_iter
        seconds = slowest_discarded(reports)
        if seconds:
            self.step_s = seconds[-1]
        return seconds

    def score(self, steps: int) -> Generator[Instruction, list[Report], list[float]]:
        """Train and time; seconds of each step on the slowest rank."""
        reports = yield Instruction(RUN, score=steps)
        self.train_iter = reports[0].train_iter
        seconds = slowest(reports)
        self.step_s = statistics.median(seconds)
        return seconds

    def sample(
        self, configuration: Mapping[str, Value], purpose: Purpose
    ) -> Generator[Instruction, list[Report], tuple[Arm, Trial]]:
        """Put a configuration into force and score it; a failing one is rolled back."""
        arm = self.arm_of(configuration)
        if arm.trial == self._trials:
            self._trials += 1
        failure = yield from self.apply(configuration)
        if failure:
            return arm, self._record(arm, purpose, _status_of(failure), reason=failure)
        if not self._settled:
            seconds = yield from self.train(self._options.discard_steps)
            self._settled = True
            limit_s = self._limit_s()
            # the last may hold a round of validation, and the first what a change costs once
            step_s = min(seconds[-1], statistics.median_low(seconds))
            if step_s > limit_s:
                return arm, (yield from self._roll_back(arm, purpose, step_s, limit_s))
        steps = yield from self.score(self._steps_of_a_sample())
        arm.costs.append(statistics.median(steps))
        if purpose is Purpose.BASELINE:
            self._today_s = arm.cost
        arm.errors.append(_error(steps) or 0.0)
        self._arms[key_of(configuration)] = arm
        return arm, self._record(arm, purpose, Status.OK, steps)

    def apply(
        self, configuration: Mapping[str, Value]
    ) -> Generator[Instruction, list[Report], str]:
        """Put a configuration into force on every rank, or what held before on all of them.

        Returns:
            Why it could not be; empty where it is in force.

        Raises:
            NotRestoredError: nor could what held before.

        """
        if key_of(configuration) == key_of(self.current):
            return ""
        reports = yield Instruction(APPLY, dict(configuration))
        self._settled = False
        failures = [r.failure for r in reports if r.failure]
        took_s, limit_s = max(r.applied_s for r in reports), self._options.time_limit_s
        if took_s > limit_s:
            failures.append(f"{NOT_IN_TIME} {limit_s:g} s but {took_s:.3g} s")
        if not failures:
            self.current = dict(configuration)
            return ""
        reports = yield Instruction(APPLY, self.current)
        again = [r.failure for r in reports if r.failure]
        if again:
            raise NotRestoredError(f"what held before could not be put back into force: {again[0]}")
        return failures[0]

    def _roll_back(
        self, arm: Arm, purpose: Purpose, step_s: float, limit_s: float
    ) -> Generator[Instruction, list[Report], Trial]:
        over = step_s > self._options.time_limit_s
        status = Status.TIMEOUT if over else Status.PRUNED
        reason = f"a step took {step_s:.3g} s, the limit is {limit_s:.3g} s"
        trial = self._record(arm, purpose, status, [step_s], reason)
        yield from self.apply(self.best.configuration)
        return trial

    def _limit_s(self) -> float:
        return min(self._options.time_limit_s, _TOO_SLOW * self._today_s)

    def _steps_of_a_sample(self) -> int:
        seconds, least = self._options.sampling_confidence_time, self._options.steps_per_sample
        step_s = self.best.cost if self.arms else self.step_s
        if not seconds or math.isinf(step_s) or step_s <= 0:
            return least
        return max(least, math.ceil(seconds / step_s))

    def _record(
        self,
        arm: Arm,
        purpose: Purpose,
        status: Status,
        steps: list[float] | None = None,
        reason: str = "",
    ) -> Trial:
        steps = steps or []
        cost = statistics.median(steps) if steps else None
        trial = Trial(arm.trial, dict(arm.configuration), purpose, status, cost=cost, reason=reason)
        trial.cost_error = _error(steps)
        self._recorder.write(
            Entry(
                arm.trial, purpose, status, self.train_iter, arm.configuration, steps, cost, reason
            )
        )
        shown = reason if cost is None or status is not Status.OK else f"{1e3 * cost:.3f} ms a step"
        self._recorder.say(f"sample {arm.trial} ({purpose}): {status}, {shown}")
        return trial


def _status_of(failure: str) -> Status:
    if "out of memory" in failure:
        return Status.OOM
    return Status.TIMEOUT if failure.startswith(NOT_IN_TIME) else Status.INVALID


def _error(steps: list[float]) -> float | None:
    """Standard error of the logarithm of the median, 1.25 times that of a mean."""
    if len(steps) < 2:
        return None
    logs = [math.log(max(s, 1e-9)) for s in steps]
    return 1.25 * statistics.stdev(logs) / math.sqrt(len(steps))
