"""What rank 0 decides between two steps. No torch, no processes: it is plain logic.

The director is a generator: it yields an instruction for all ranks and gets every rank's report
on it. Today's configuration is sample 0, and it is measured again beside the best, in turn, before
another is kept.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from perfsearch.core.knob import Value
from perfsearch.core.space import key_of
from perfsearch.core.trial import Purpose, Status
from perfsearch.online.log import FINAL, Entry, Log
from perfsearch.online.messages import END, RUN, Instruction, Report
from perfsearch.online.options import PREFIX, AutotuneOptions
from perfsearch.online.sampling import Arm, Proposer, ProposerEndedError, Recorder, Sampler, Steps

_CLOSE = 0.03
"""Configurations this close to the best, errors apart, are measured again before one is kept."""

_ROUNDS = 2
"""How often the finalists are measured again."""

_FINALISTS = 2
"""How many beside today's configuration."""

_PATIENCE_S = 0.5
"""Shortest wait for the strategy before training goes on without its answer."""

_OPENING_S = 60.0
"""Longest start of the process that holds the strategy; training goes on meanwhile."""

_DRIFTED = 2
"""Windows in a row that must be off before tuning begins anew."""


class Director:
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
        new_proposer: Callable[[], Proposer],
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
        described = yield from self._await(_OPENING_S)
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
        best = yield from self._settle(baseline)
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

    def _settle(self, baseline: Arm) -> Generator[Instruction, list[Report], Arm]:
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
