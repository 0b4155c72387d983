"""What rank 0 decides between two steps. No torch, no processes: it is plain logic.

The controller is a generator: it yields an instruction for all ranks and gets every rank's report
on it. Today's configuration is sample 0, and it is measured again beside the best, in turn, before
another is kept.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from perfsearch.core.knob import Value
from perfsearch.core.space import key_of
from perfsearch.core.steps import read_window
from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.online.log import FINAL, Entry, Log
from perfsearch.online.options import PREFIX, AutotuneOptions
from perfsearch.online.store import (
    APPLY,
    END,
    RUN,
    Instruction,
    Report,
    slowest_discarded,
    slowest_rank_seconds,
)
from perfsearch.training.clock import State, StepWindow, WindowRule

_CLOSE = 0.03
"""Configurations this close to the best, errors apart, are measured again before one is kept."""

_ROUNDS = 2
"""How often the finalists are measured again."""

_FINALISTS = 2
"""How many beside today's configuration."""

_PATIENCE_S = 0.5
"""Shortest wait for the strategy before training goes on without its answer."""

_START_S = 60.0
"""Longest start of the process that holds the strategy; training goes on meanwhile."""

_DRIFTED = 2
"""Windows in a row that must be off before tuning begins anew."""

_TOO_SLOW = 3.0
"""A step that takes this many times today's ends a sample early."""

NOT_IN_TIME = "not in force within"
"""How the failure of a configuration that took too long begins."""


class Controller:
    """Decides for all ranks of one model.

    Args:
        options: what the user asked for.
        new_proposer: starts what proposes configurations.
        recorder: rows and remarks.
        seconds: a clock, for ``warmup_time`` and for what takes too long to answer.
        earlier: log of an earlier run of the same job.

    Attributes:
        kept: what is in force for the rest of training; ``None`` before tuning has ended.

    """

    def __init__(
        self,
        options: AutotuneOptions,
        new_proposer: Callable[[], ProposerClient],
        recorder: Recorder,
        seconds: Callable[[], float],
        earlier: Log | None = None,
    ) -> None:
        self._options = options
        self._new_proposer = new_proposer
        self._proposer = new_proposer()
        self._recorder = recorder
        self._seconds = seconds
        self._begin = seconds()
        self._earlier = earlier
        self._sampler = Sampler(options, recorder)
        self.kept: dict[str, Value] | None = None

    def run(self) -> Steps:
        """Instructions from the end of the first steps to the end of tuning."""
        try:
            yield from self._phases()
        except ProposerEndedError as error:
            sampler = self._sampler
            if sampler.arms:
                yield from sampler.apply(sampler.best.configuration)
            self._keep(sampler.arm_of(sampler.current), str(error))
        yield Instruction(END)

    def _phases(self) -> Steps:
        reports = yield Instruction(RUN)
        self._sampler.note(reports)
        while self._seconds() - self._begin < self._options.warmup_time:
            yield from self._sampler.train(self._options.steps_per_sample)
        facts = merge([r.facts for r in reports])
        self._sampler.current = dict(facts["configuration"])
        self._recorder.open(list(self._sampler.current))
        if self._options.freeze is not None and self._earlier is not None:
            yield from self._freeze(self._earlier)
            return
        while True:
            yield from self._tune(facts)
            if not self._options.retune_on_drift:
                break
            yield from self._watch()
            self._earlier, self.kept = None, None
            self._sampler.forget()
            self._proposer = self._new_proposer()
            facts = {**facts, "configuration": dict(self._sampler.current)}

    def _freeze(self, earlier: Log) -> Steps:
        current = self._sampler.current
        unknown = sorted(set(earlier.kept) - set(current))
        if unknown:
            self._recorder.say(f"this job has no {', '.join(unknown)}: left out of the log's best")
        wanted = {name: earlier.kept.get(name, value) for name, value in current.items()}
        failure = yield from self._sampler.apply(wanted)
        self._keep(self._sampler.arm_of(self._sampler.current), failure or "frozen as in the log")

    def _tune(self, facts: Mapping[str, Any]) -> Steps:
        """Measure what is there, then proposals, then the finalists; keep the best."""
        sampler = self._sampler
        earlier = self._earlier
        configurations = [] if earlier is None else earlier.configurations
        self._proposer.open({**facts, "earlier": configurations}, self._options.to_plain())
        described = yield from self._await(_START_S)
        if described is None or "refused" in described or not described["searched"]:
            self._keep(sampler.arm_of(sampler.current), _why_nothing(described))
            return
        self._announce(described)
        today = {**sampler.current, **described["pinned"]}
        today = {name: today[name] for name in sampler.current}
        baseline = yield from self._sample(today, Purpose.BASELINE)
        if not baseline.costs:
            self._keep(sampler.arm_of(sampler.current), "the fixed values could not be applied")
            return
        tried = 0
        if earlier is not None:
            tried = yield from self._tell_earlier(earlier, described["earlier"], baseline)
        reason = yield from self._search(self._options.max_samples - tried)
        best = yield from self._confirm_best(baseline)
        failure = yield from sampler.apply(best.configuration)
        if failure:
            reason = f"{reason}; the best could not be put back: {failure}"
            best = sampler.arm_of(sampler.current)
        self._keep(best, reason)

    def _announce(self, described: Mapping[str, Any]) -> None:
        options = self._options
        size = "many" if described["size"] is None else described["size"]
        self._recorder.say(
            f"tunes {', '.join(described['searched'])} ({size} configurations), at most "
            f"{options.max_samples} samples or about {options.most_steps} steps"
        )
        for name, why in described["left_out"].items():
            self._recorder.say(f"does not tune {name}: {why}")

    def _search(self, left: int) -> Generator[Instruction, list[Report], str]:
        for _ in range(left):
            self._proposer.ask()
            answer = yield from self._await(self._options.time_limit_s)
            if answer is None:
                return "the strategy did not answer in time"
            if answer["configuration"] is None:
                return str(answer["reason"]).replace("strategy.", f"{PREFIX}.")
            configuration = {**self._sampler.current, **answer["configuration"]}
            yield from self._sample(configuration, Purpose.SEARCH)
        return f"autotune.max_samples={self._options.max_samples} spent"

    def _confirm_best(self, baseline: Arm) -> Generator[Instruction, list[Report], Arm]:
        """The best, measured again beside those close to it and today's, in turn, there and back.

        Only what was measured again counts then: the search's best reading is the luckiest too, and
        sample 0 may have been read while the job was still warming up.
        """
        ranked = sorted(self._sampler.arms, key=lambda arm: arm.cost)
        best = ranked[0]
        close = [
            arm
            for arm in ranked
            if arm.cost <= best.cost * (1 + _CLOSE + 2 * math.hypot(arm.error, best.error))
        ]
        finalists = close[:_FINALISTS]
        if baseline not in finalists:
            finalists.append(baseline)
        if len(finalists) < 2:
            return best
        for arm in finalists:
            arm.forget()
        for number in range(_ROUNDS):
            for arm in finalists if number % 2 == 0 else finalists[::-1]:
                yield from self._sample(arm.configuration, Purpose.CONFIRM)
        return min(finalists, key=lambda arm: arm.cost)

    def _sample(
        self, configuration: Mapping[str, Value], purpose: Purpose
    ) -> Generator[Instruction, list[Report], Arm]:
        arm, trial = yield from self._sampler.sample(configuration, purpose)
        self._proposer.tell(trial)
        return arm

    def _await(
        self, within_s: float
    ) -> Generator[Instruction, list[Report], dict[str, Any] | None]:
        """The proposer's answer; training goes on while it is not there."""
        deadline = self._seconds() + within_s
        while True:
            step_s = self._sampler.step_s
            answer = self._proposer.answer(
                _PATIENCE_S if math.isinf(step_s) else max(_PATIENCE_S, step_s)
            )
            if answer is not None or self._seconds() > deadline:
                return answer
            yield from self._sampler.train(1)

    def _tell_earlier(self, earlier: Log, fits: Sequence[bool], baseline: Arm) -> Steps:
        """Pass on an earlier run's trials, at the speed of today; samples taken of its best here.

        Those that ``fits``, the best one's being the last, does not allow today are left out.
        """
        then_s = earlier.cost_of(baseline.configuration)
        scale = baseline.cost / then_s if then_s else 1.0  # how much slower it is today
        told = 0
        for trial, allowed in zip(earlier.trials, fits[:-1], strict=True):
            if not allowed or trial.purpose is Purpose.CONFIRM:
                continue
            trial.cost = None if trial.cost is None else trial.cost * scale
            self._proposer.tell(trial)
            told += 1
        self._recorder.say(f"{told} samples of the earlier log are known")
        again = fits[-1] and key_of(earlier.kept) != key_of(baseline.configuration)
        if again:
            yield from self._sample(earlier.kept, Purpose.SEARCH)
        return int(again)

    def _watch(self) -> Steps:
        """Return once the time of a step has changed for good."""
        options = self._options
        yield from self._sampler.train(options.discard_steps)
        reference_s: float | None = None
        off = 0
        while True:
            steps = yield from self._sampler.score(options.drift_steps)
            now_s = statistics.median(steps)
            if reference_s is None:
                reference_s = now_s
            change = now_s / reference_s - 1
            off = off + 1 if abs(change) > options.drift_tolerance else 0
            if off >= _DRIFTED:
                self._recorder.say(
                    f"a step takes {1e3 * now_s:.3g} ms instead of {1e3 * reference_s:.3g} ms "
                    f"({change:+.0%}): tuning again"
                )
                return

    def _keep(self, arm: Arm, reason: str) -> None:
        self.kept = dict(arm.configuration)
        cost = arm.cost if arm.costs else None
        at = self._sampler.train_iter
        self._recorder.write(
            Entry(arm.trial, FINAL, Status.OK, at, arm.configuration, (), cost, reason)
        )
        values = ", ".join(f"{name}={value}" for name, value in arm.configuration.items())
        time_ms = "" if cost is None else f", {1e3 * cost:.3f} ms a step"
        self._recorder.say(f"ended at step {at}: {reason}; keeps {values}{time_ms}")

    def unfinished(self, why: str) -> Entry | None:
        """The last row where training or tuning ends too early; ``None`` once one is kept."""
        sampler = self._sampler
        if self.kept is not None or not sampler.current:
            return None
        best = sampler.best if sampler.arms else sampler.arm_of(sampler.current)
        cost = best.cost if best.costs else None
        at = sampler.train_iter
        return Entry(best.trial, FINAL, "unfinished", at, best.configuration, (), cost, why)


def merge(facts: list[dict[str, Any]]) -> dict[str, Any]:
    """One description of the job from every rank's: what one rank cannot change, none does.

    Raises:
        RuntimeError: ranks differ where they may not.

    """
    merged = dict(facts[0])
    fixed: dict[str, str] = {}
    for rank, found in enumerate(facts):
        fixed.update(found["fixed"])
        for name in ("configuration", "gradient_mib", "options"):
            if found[name] != merged[name]:
                raise RuntimeError(
                    f"ranks 0 and {rank} differ in {name}: {merged[name]} and {found[name]}"
                )
    merged["fixed"] = fixed
    return merged


def _why_nothing(described: Mapping[str, Any] | None) -> str:
    if described is None:
        return "the strategy did not start in time; nothing was tuned"
    if "refused" in described:
        return str(described["refused"])
    reasons = "; ".join(f"{name}: {why}" for name, why in described["left_out"].items())
    return f"there is nothing to tune ({reasons})" if reasons else "there is nothing to tune"


# -----------------------------------------------------------------------------
# Samples: a configuration put into force on every rank, scored, and rolled back where it fails.


class ProposerEndedError(RuntimeError):
    """What proposes configurations ended by itself; tuning cannot go on, training can."""


class NotRestoredError(RuntimeError):
    """Neither a configuration nor the one before it could be put into force: ranks may differ."""


Steps = Generator[Instruction, list[Report], Any]


class ProposerClient(Protocol):
    """Where proposals come from; ``ProposerProcess`` is one."""

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
        self._is_warm = True
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
        """Note what reports say of steps that were not scored."""
        self.train_iter = reports[0].train_iter
        seconds = slowest_discarded(reports)
        if seconds:
            self.step_s = seconds[-1]
        return seconds

    def score(self, steps: int) -> Generator[Instruction, list[Report], list[float]]:
        """Train and time; seconds of each step on the slowest rank."""
        reports = yield Instruction(RUN, score=steps)
        self.train_iter = reports[0].train_iter
        seconds = slowest_rank_seconds(reports)
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
        warmup = 0 if self._is_warm else self._options.discard_steps
        warmup_s = (yield from self.train(warmup)) if warmup else []
        self._is_warm = True
        window = StepWindow(self._rule(warmup), warmup_s)
        if window.state is State.STOPPED:
            return arm, (yield from self._roll_back(arm, purpose, window))
        while window.state is State.SCORED:
            window.score((yield from self.score(window.count)))
        steps = window.scored_s
        arm.costs.append(read_window(steps).step_s)
        if purpose is Purpose.BASELINE:
            self._today_s = arm.cost
        arm.errors.append(read_window(steps).log_error or 0.0)
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
        self._is_warm = False
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
        self, arm: Arm, purpose: Purpose, window: StepWindow
    ) -> Generator[Instruction, list[Report], Trial]:
        step_s, limit_s = window.typical_s, self._limit_s()
        over = step_s > self._options.time_limit_s
        status = Status.TIMEOUT if over else Status.PRUNED
        reason = f"a step took {step_s:.3g} s, the limit is {limit_s:.3g} s"
        trial = self._record(arm, purpose, status, [step_s], reason)
        yield from self.apply(self.best.configuration)
        return trial

    def _rule(self, warmup: int) -> WindowRule:
        """A sample: of the training loop, which goes on."""
        count = self._steps_of_a_sample()
        return WindowRule(
            scored_steps=(count, count),
            warmup_steps=(warmup, warmup),
            stop_above_s=self._limit_s(),
            uneven=True,
        )

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
        found = read_window(steps) if steps else None
        cost = None if found is None else found.step_s
        trial = Trial(arm.trial, dict(arm.configuration), purpose, status, cost=cost, reason=reason)
        trial.cost_error = None if found is None else found.log_error
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
