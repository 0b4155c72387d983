"""From what the ranks of a script say to a measurement."""

from __future__ import annotations

import math
import os
import re
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perfsearch.core import command
from perfsearch.core.knob import Value
from perfsearch.core.steps import read_window
from perfsearch.core.trial import (
    DRAWS_IN_FORWARD,
    PARAMETERS,
    WITHOUT_LOADER,
    Measurement,
    Outcome,
    Status,
    Trial,
)
from perfsearch.instrument.facts import Facts
from perfsearch.knobs.ddp import FIND_UNUSED
from perfsearch.knobs.model import is_compiled
from perfsearch.knobs.transport import Mapped
from perfsearch.metrics.bounds import LOADING_ALONE
from perfsearch.metrics.diagnosis import MADE_AGAIN
from perfsearch.metrics.slow_steps import SLOW_STEPS, merge_ranks, slow_steps
from perfsearch.runners._script.group import EndedError, ScriptGroup
from perfsearch.runners.base import Plan, Turns
from perfsearch.training.clock import (
    FIRST_LOSSES,
    LOADING,
    USABLE,
    WARMUP_STEPS,
    State,
    StepWindow,
    WindowRule,
    is_detailed,
    least_wait_ms,
    phases_of,
)
from perfsearch.workers.failures import UNUSED_REASON, Failure, last_words, refusal
from perfsearch.workers.group import GroupGone
from perfsearch.workers.messages import Message, rank_log
from perfsearch.workers.results import combine


class TrainApartError(EndedError):
    """Each of its ranks trains alone."""


class OwnEndError(EndedError):
    """The script came to its own end too early, on all ranks alike.

    Attributes:
        what: it did.
        advice: the next step.

    """

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(f"{what}. {advice}")
        self.what, self.advice = what, advice


@dataclass
class Start:
    """What is known of one start of a script after its second step.

    Attributes:
        facts: of rank 0.
        first_pulls: batches that each rank had taken when it had made its first step.
        pulls_per_step: batches that each rank takes for a step; ``None`` where ranks differ.
        losses: mean over ranks of the losses since the first step; ``None``: none were seen.
        kept: why the point after the first step could not be kept; empty where it was.
        why_not_again: why step-scope knobs cannot be changed in this process.
        over: whether the script has come to its end, after what was measured.
        gone: whether it has failed then, so that nobody can be asked to end it.
        counts_samples: whether the samples of each batch that is trained on are known.
        samples: of its second step over all ranks; 0 where they are not known.
        shapes: how many shapes its first batches have.
        seconds: of the slowest rank, a number for each step since the configuration was put into
            force; empty once it has been scored.

    """

    facts: Facts
    first_pulls: int = 0
    pulls_per_step: int | None = None
    losses: list[float] | None = field(default_factory=list)
    kept: str = "it was not asked for"
    why_not_again: str = ""
    over: bool = False
    gone: bool = False
    counts_samples: bool = True
    samples: int = 0
    shapes: int = 0
    seconds: list[float] = field(default_factory=list)

    @property
    def took_no_batch(self) -> bool:
        """Whether the ranks took no batch of a loader."""
        return self.first_pulls == self.pulls_per_step == 0


def settle(group: ScriptGroup, plan: Plan, start: Start, deadline: float) -> None:
    """Let steps be made until the warm-up is over; the last one made is not yet answered."""
    window = _window(plan, start)
    while window.state is State.WARM_UP:
        group.send({"op": "go"})
        messages = receive_steps(group, plan, max(0.0, deadline - time.monotonic()))
        window.warm(max(m["seconds"] for m in messages))
        start.seconds = window.warmup_s
        add_loss(start, mean_loss(messages))


def score(
    group: ScriptGroup,
    plan: Plan,
    start: Start,
    deadline: float,
    in_force: Callable[[Facts], dict[str, Value]],
) -> Turns[Measurement]:
    """Have the scored window run, and put together what the ranks say of it.

    Once the first stretch is over the script has been measured: however it ends when more steps are
    asked for, what there is counts. Where it is measured in turns, each stretch comes in parts,
    between which its ranks wait and what they have started is held still; the time of that is none
    of its own, and it makes more steps than it needs for as long as others need them.

    Raises:
        EndedError: the script ended inside the first stretch.
        GroupGone: a rank failed in it, or the time is over.

    """
    window = _window(plan, start, deadline)
    in_turns = math.isfinite(plan.turn_seconds)
    messages: list[Message] = []
    timed: list[int] = []
    turns: list[tuple[float, int]] = []
    parts: list[int] = []
    seconds: list[float] = []
    each = first = 0

    def left_s() -> float:
        return max(0.0, deadline - time.monotonic())

    while True:
        try:
            if in_turns:
                group.send({"op": "pause"})
                group.receive("paused", left_s())
            paused_from = time.monotonic()
            if not (yield window.state is State.OVER):
                break
            deadline += time.monotonic() - paused_from
            if not parts:
                parts, first = _parts(window, plan), 0
                wanted = window.detailed_each if window.count else each
                each = min(wanted, (min(parts) + 1) // 2)  # so that each part has such a step
            count = parts.pop(0)
            turns.append((time.time(), count))
            group.send({"op": "score", "count": count, "each": each, "first": first})
            found = group.receive("window", left_s())
            if window.made and any(m["event"] == "ended" for m in found):
                start.over = True
                break
            found = _all_the_same(found, _needed(window, plan, first + count + sum(parts)))
        except (GroupGone, EndedError):
            if not window.made:
                raise
            start.over, start.gone = True, True
            break
        made = window.made + len(seconds)
        timed += [made + at for at in range(count) if is_detailed(first + at, each)]
        seconds += [max(times) for times in zip(*(m["step_seconds"] for m in found), strict=True)]
        messages = _joined(messages, found)
        first += count
        if not parts:
            window.score(seconds)
            seconds = []
    if seconds:
        window.score(seconds)
    measurement = _measurement(window, start, messages, timed, in_force)
    if in_turns:
        measurement.environment[TURNS] = turns
    return measurement


def _parts(window: StepWindow, plan: Plan) -> list[int]:
    """Steps of each part of the next stretch, or of one more part where no step is missing."""
    if math.isinf(plan.turn_seconds):
        return [window.count]
    step_s = window.spent_s / window.made if window.made else window.expected_s
    most = max(_LEAST_TURN_STEPS, round(plan.turn_seconds / step_s))
    count = window.count or most
    pieces = max(1, count // most)
    return [count * (at + 1) // pieces - count * at // pieces for at in range(pieces)]


def _needed(window: StepWindow, plan: Plan, count: int) -> str:
    """How many steps the first stretch would have needed."""
    settled, step_s = window.discarded_steps, window.expected_s
    return (
        f"{settled} steps until step times have settled and {count} of {1e3 * step_s:.3g} ms to "
        f"measure were {settled + count} steps and "
        f"{window.discarded_seconds + count * step_s:.2g} s here; "
        f"{WARMUP_STEPS[1] + plan.scored_steps[1]} steps are always enough"
    )


TURNS = "turns"
"""Where it was measured in turns with others: when each of its windows began, in Unix time, and how
many steps that had."""

_LEAST_TURN_STEPS = 2
"""Steps of a window between others, at least."""

_IN_ORDER = ("step_seconds", "phase_seconds", "parts", "waits_ms", "losses")
"""What a rank says of each step of a stretch."""


def _joined(earlier: Sequence[Message], later: Sequence[Message]) -> list[Message]:
    """What each rank says of two stretches of a window, as of one."""
    if not earlier:
        return list(later)
    joined = []
    for before, after in zip(earlier, later, strict=True):
        made, more = len(before["step_seconds"]), len(after["step_seconds"])
        both = {**after, **{name: before[name] + after[name] for name in _IN_ORDER}}
        both["aside"] = before["aside"] + [made + place for place in after["aside"]]
        for name in ("bounds", "bounds_loading"):
            both[name] = before[name] and after[name]
        both["tokens"] = before["tokens"] + after["tokens"]
        samples = [before["samples"], after["samples"]]
        both["samples"] = None if None in samples else sum(samples)
        for name in ("timing", "sync_points"):
            both[name] = {
                key: (made * before[name].get(key, 0.0) + more * after[name].get(key, 0.0))
                / (made + more)
                for key in before[name].keys() | after[name].keys()
            }
        joined.append(both)
    return joined


def _measurement(
    window: StepWindow,
    start: Start,
    messages: Sequence[Message],
    timed: Sequence[int],
    in_force: Callable[[Facts], dict[str, Value]],
) -> Measurement:
    """What the ranks say of a window, put together.

    Args:
        window: which is over.
        start: of the script.
        messages: of each rank.
        timed: places of the steps whose phases were timed.
        in_force: every knob's value, from what a rank has built.

    """
    count = window.made
    for place in range(count):
        losses = [m["losses"][place] for m in messages]
        add_loss(start, None if any(v is None for v in losses) else statistics.fmean(losses))
    facts = Facts(**messages[0]["facts"])
    start.facts, start.why_not_again = facts, messages[0]["why_not_again"]
    start.shapes = max(m["shapes"] for m in messages)
    aside = {place for m in messages for place in m["aside"]}
    detailed = [place for place in timed if place not in aside] or timed
    results = [_of_rank(m, detailed, in_force(Facts(**m["facts"]))) for m in messages]
    least = least_wait_ms([[m["waits_ms"][place] for place in detailed] for m in messages])
    for result in results:
        result["evidence"].update(least)
    measurement = Measurement(
        **window.result(compiles=is_compiled(facts.values)),
        samples_per_step=_samples(messages, count),
        tokens_per_step=round(sum(m["tokens"] for m in messages) / count) or None,
    )
    for name, value in combine(results)["measurement"].items():
        setattr(measurement, name, value)
    measurement.environment.update(_of_validation(measurement.step_seconds, aside))
    if facts.parameters is not None:
        measurement.environment[PARAMETERS] = facts.parameters
    if "forward" in measurement.phases_ms and LOADING[0] not in measurement.phases_ms:
        measurement.environment[WITHOUT_LOADER] = True
    if facts.draws_in_forward:
        measurement.environment[DRAWS_IN_FORWARD] = True
    measurement.environment[SLOW_STEPS] = merge_ranks(
        [slow_steps(measurement.step_seconds, m["parts"], aside) for m in messages]
    )
    evidence = measurement.bottleneck_evidence
    for name in ("bounds", "bounds_loading"):
        if all(m[name] for m in messages):
            evidence["with_everything_ms"] = evidence["phases_step_ms"]
    if all(m["bounds_loading"] for m in messages):
        evidence[LOADING_ALONE] = 1.0
    if messages[0]["sync_points"]:
        measurement.environment["sync_points"] = messages[0]["sync_points"]
    measurement.first_losses = [v for v in start.losses or [] if math.isfinite(v)]
    return measurement


def _samples(messages: Sequence[Message], steps: int) -> int | None:
    """Samples of a step over all ranks; ``None`` where there is no counting them."""
    counted = [m["samples"] for m in messages]
    return None if None in counted else round(sum(counted) / steps) or None


def _window(plan: Plan, start: Start, deadline: float = math.inf) -> StepWindow:
    """Where the measurement of what is in force in a start stands.

    Args:
        plan: how it is measured.
        start: of the script.
        deadline: monotonic time at which it is given up.

    """
    rule = WindowRule(
        plan.scored_steps,
        plan.scored_seconds,
        uneven=True,
        look_steps=plan.look_steps,
        look_seconds=plan.look_seconds,
        limit_s=sum(start.seconds) + USABLE * max(0.0, deadline - time.monotonic()),
    )
    return StepWindow(rule, start.seconds)


def receive_steps(group: ScriptGroup, plan: Plan, limit_s: float) -> list[Message]:
    """The word of each rank on one step.

    Args:
        group: the start.
        plan: how it is measured, for what an end that comes too early is told of.
        limit_s: seconds to wait.

    Raises:
        EndedError: the script ended, on some ranks or on all.
        GroupGone: a rank failed, or the time is over.

    """
    (least, most), (low, high) = WARMUP_STEPS, plan.scored_steps
    needed = (
        f"the window begins after {least} to {most} steps and covers {low} to {high}, as many as "
        f"fill {plan.scored_seconds:g} s: {most + high} steps are always enough"
    )
    return _all_the_same(group.receive("step", limit_s), needed)


def _all_the_same(messages: list[Message], needed: str) -> list[Message]:
    ended = [rank for rank, m in enumerate(messages) if m["event"] == "ended"]
    if not ended:
        return messages
    steps = [m["step"] for m in messages]
    if len(ended) == len(messages) and len(set(steps)) == 1:
        if not steps[0]:
            raise OwnEndError(
                "the script ended by itself and made no step of a torch optimizer",
                "Only such steps can be measured: give it what it needs to train",
            )
        raise OwnEndError(
            f"the script made {steps[0]} steps and ended, before it could be measured",
            f"Give it more to do (epochs, steps, samples): {needed}. Steps of the optimizer that "
            "stepped first are counted, and none of one that the script puts in its place later",
        )
    raise EndedError(disagreement(steps, ended))


def disagreement(steps: Sequence[int], ended: Sequence[int]) -> str:
    """Ranks that part, in words."""
    counts = ", ".join(f"rank {rank} made {n}" for rank, n in enumerate(steps))
    who = " and ".join(f"rank {rank}" for rank in ended)
    return (
        f"the ranks disagree on the number of steps: {counts}, and {who} has ended. Give each "
        "the same number of batches (DistributedSampler with drop_last=True, or so many steps)"
    )


def add_loss(start: Start, loss: float | None) -> None:
    """Keep the loss of one more step, as long as it is one that is compared."""
    if loss is None or start.losses is None:
        start.losses = None
    elif len(start.losses) < FIRST_LOSSES:
        start.losses.append(loss)


def mean_loss(messages: Sequence[Mapping[str, Any]]) -> float | None:
    """Mean over ranks; ``None`` where one saw none."""
    losses = [m["loss"] for m in messages]
    return None if any(v is None for v in losses) else sum(losses) / len(losses)


def _of_rank(
    message: Message, detailed: Sequence[int], in_force: Mapping[str, Value]
) -> dict[str, Any]:
    """What a rank says of the steps whose phases were timed."""
    phases_ms, timing = phases_of(
        [message["step_seconds"][place] for place in detailed],
        [message["phase_seconds"][place] for place in detailed],
    )
    timing["detailed_step_ms"] = timing["phases_step_ms"]
    return {
        "status": "ok",
        "reason": "",
        "agreed": {},
        "phases_ms": phases_ms,
        "peaks": message["peaks"],
        "in_force": in_force,
        "evidence": {**message["timing"], **timing},
        "environment": {**message["place"], "loss_dtype": message["facts"].get("loss_dtype", "")},
    }


def _of_validation(seconds: Sequence[float], aside: Collection[int]) -> dict[str, Any]:
    """What is kept of the steps that had a round of validation; empty where there were none.

    Args:
        seconds: of each step of the window.
        aside: places of those steps.

    """
    if not aside:
        return {}
    others = [s for place, s in enumerate(seconds) if place not in aside]
    once = {p for kind in read_window(seconds).slow if not kind.scored for p in kind.places}
    return {
        "validation": {
            "steps": len(aside),
            "of": len(seconds),
            "step_ms": 1e3 * statistics.fmean(seconds[place] for place in aside),
            "usual_ms": 1e3 * statistics.median(others) if others else None,
            "scored": not once.issuperset(aside),
        }
    }


def validation_lines(trials: Sequence[Trial]) -> list[str]:
    """How many steps of the baseline had a round of validation; empty where none had."""
    measurement = trials[0].measurement if trials else None
    seen = None if measurement is None else measurement.environment.get("validation")
    if measurement is None or seen is None:
        return []
    if seen["usual_ms"] is None:
        return ["a round of validation ran beside every step of the baseline, and is in the score"]
    often = "as often as it came" if seen["scored"] else "not, as it came too seldom"
    return [
        f"beside {seen['steps']} of {seen['of']} steps of the baseline a round of validation ran: "
        f"{seen['step_ms']:.3g} ms with it, {seen['usual_ms']:.3g} ms without; "
        f"in the score it is {often}"
    ]


_FASTER = 1.5
"""A step that takes so many times longer than when it was made again was another one."""

_MATTERS = 0.25
"""Part of the mean step by which it must take longer: short ones differ by any factor by chance."""

_SURELY = 2.5
"""Standard errors by which more steps must be faster again than slower."""


def are_faster_again(first: Measurement, again: Measurement) -> bool:
    """Whether steps were faster, more often than by chance, when they were made again.

    Args:
        first: from the first step of a start on.
        again: once more from its second step on, in the same start.

    """
    before = dict(enumerate(first.step_seconds, first.discarded_steps))
    after = dict(enumerate(again.step_seconds, again.discarded_steps + 1))
    pairs = [(before[step], after[step]) for step in before.keys() & after.keys()]
    least_s = _MATTERS * statistics.fmean(first.step_seconds)
    faster = sum(a > max(_FASTER * b, b + least_s) for a, b in pairs)
    slower = sum(b > max(_FASTER * a, a + least_s) for a, b in pairs)
    return faster - slower > _SURELY * math.sqrt(faster + slower)


def made_again_lines(trials: Sequence[Trial]) -> list[str]:
    """That the baseline's steps were faster when they were made again; empty where not."""
    measurement = trials[0].measurement if trials else None
    again_ms = None if measurement is None else measurement.environment.get(MADE_AGAIN)
    if measurement is None or again_ms is None:
        return []
    return [
        f"the baseline's first steps took {1e3 * measurement.step_time_s:.4g} ms, and made again "
        f"{again_ms:.4g} ms (where kernels are planned for each new shape): each configuration "
        "was given a new start, and a job that has met all its shapes may gain less"
    ]


# -----------------------------------------------------------------------------
# Why a script did not get as far as a measurement, in words that say what to do.

NO_BATCH = "no batch of a DataLoader was seen"
NO_SAMPLES = (
    "what its DataLoader gives at a time is no known number of samples (batch_size=None, or 1 "
    "where an item may be a batch)"
)

_UNUSED_OF_TRIAL = (
    f"{FIND_UNUSED.name}=false of this trial: there are parameters that the loss does not use in "
    "every step, and DistributedDataParallel waits for their gradients. Leave it to the script"
)

_LAUNCHER_REFUSED = re.compile(r"launcher: UsageError: (.*)")
"""What torchrun's own parser says last."""


def failed_outcome(
    group: ScriptGroup,
    error: GroupGone | EndedError,
    changed: Mapping[str, Value],
    maps: Sequence[Mapped],
) -> Outcome:
    """The outcome of a start that failed; what is left of it is ended.

    Args:
        group: the start.
        error: how it was noticed.
        changed: knobs that were not as the script has them.
        maps: where knobs go in the script's arguments.

    """
    log = str(group.log)
    if isinstance(error, EndedError):
        reason = str(error)
        if isinstance(error, OwnEndError):
            reason = f"{error.what}{last_words(group.tails().get(0, ''))}. {error.advice}"
        return Outcome(error.status, None, reason, log)
    steps, ended, tails = list(group.steps), list(group.ended), group.tails()
    failure = group.why_gone(error)
    if ended and len(ended) < group.nproc:
        return Outcome(Status.INVALID, None, disagreement(steps, ended), log)
    refused = _LAUNCHER_REFUSED.match(failure.reason)
    if refused:
        variables = ", ".join(sorted(n for n in os.environ if n.startswith("PET_")))
        reason = f"torchrun refused its options: {refused[1]}"
        reason += f" (it takes options from the environment, too: {variables})" * bool(variables)
        return Outcome(Status.INVALID, None, reason, str(group.launcher_log))
    path = rank_log(group.logs, failure.rank or 0)
    log = str(path if path.exists() or failure.rank is not None else group.launcher_log)
    tail = tails.get(failure.rank or 0, "") or next(iter(group.tails().values()), "")
    return Outcome(*_status_and_reason(failure, tail, steps, changed, maps, error), log_path=log)


def _status_and_reason(
    failure: Failure,
    tail: str,
    steps: Sequence[int],
    changed: Mapping[str, Value],
    maps: Sequence[Mapped],
    error: GroupGone,
) -> tuple[Status, None, str]:
    reason = failure.reason
    if FIND_UNUSED.of(changed) is False:
        reason = reason.replace(UNUSED_REASON, _UNUSED_OF_TRIAL)
    if "exit code" in reason:
        refused = refusal(tail)
        if refused:
            blamed = [m for m in maps if m.argument and m.argument in refused]
            reason += f": {refused}"
            if blamed:
                reason += f" (from --map {blamed[0].name}={blamed[0].argument})"
            return Status.INVALID, None, reason
        if "; its last line" not in reason:
            reason += last_words(tail)
    if failure.status is Status.TIMEOUT:
        made = ", ".join(f"rank {rank} made {n} steps" for rank, n in enumerate(steps))
        reason = f"no answer in {round(error.limit_s or 0.0, 1):g} s: {made}"
        if failure.stack_dump:
            reason += f"; {failure.stack_dump}"
        if not any(steps):
            reason += ". A step is counted when a torch optimizer has stepped; if the script only "
            reason += f"begins slowly: {command.given().key('limits.trial_s=900')}"
        return failure.status, None, reason
    if failure.status in (Status.CRASH, Status.INVALID):
        reason += f" ({_how_far(steps)})"
    return failure.status, None, reason


def _how_far(steps: Sequence[int]) -> str:
    """How far a start came that failed, and how far it need come."""
    made = min(steps, default=0)
    if not made:
        return "before the first step"
    most = WARMUP_STEPS[1] + Plan.scored_steps[1]
    return f"after step {made} or later; {most} steps are always enough"


def judge_measurement(
    measurement: Measurement, losses: Sequence[float] | None, lost: Mapping[str, str]
) -> tuple[Status, str]:
    """Status and reason of a script that got as far as a measurement.

    Args:
        measurement: what was measured.
        losses: of the first steps; ``None`` where none were seen.
        lost: knobs that are not in force, and why.

    """
    bad = next((loss for loss in losses or () if not math.isfinite(loss)), None)
    if bad is not None:
        return Status.DIVERGED, f"the loss is {bad} in one of the first steps"
    if lost:
        return Status.NOT_APPLIED, "; ".join(lost.values())
    return Status.OK, ""


def require_ranks_together(first: Sequence[Mapping[str, Any]], world_size: int) -> None:
    """Refuse a script whose ranks each train alone.

    Raises:
        TrainApartError: they do.

    """
    joined = first[0]["joined"]
    if world_size > 1 and joined == 1 and not first[0]["facts"]["wrappers"]:
        raise TrainApartError(
            f"its {world_size} ranks train apart from each other: no process group was made, and "
            "the model is wrapped in no DistributedDataParallel or FSDP. Wrap it "
            "(init_process_group, DistributedDataParallel(model)), or have it started as one "
            f"process: {command.given().without_ranks}"
        )
