"""Starts of a script, and going back to the first step of a running one."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from perfsearch.core.hardware import Environment, Hardware
from perfsearch.core.knob import Value, same_value
from perfsearch.core.trial import Measurement, Outcome, loss_resolution
from perfsearch.instrument.facts import Facts
from perfsearch.instrument.launch import LaunchConfig
from perfsearch.instrument.seeds import hash_seed
from perfsearch.instrument.user_files import UserFiles
from perfsearch.knobs import transport
from perfsearch.knobs.transport import Mapped, apply
from perfsearch.runners._script import window
from perfsearch.runners._script.group import EndedError, ScriptGroup
from perfsearch.runners._script.source import Source
from perfsearch.runners._script.ways import Way
from perfsearch.runners._script.window import (
    Start,
    TrainApartError,
    add_loss,
    mean_loss,
    receive_steps,
    settle,
)
from perfsearch.runners.base import Plan, Turns, alone
from perfsearch.training.clock import PROFILED_STEPS
from perfsearch.workers.group import GroupGone

_SAME_LOSS = 1e-5
"""Relative difference up to which steps that were trained twice are the same steps, where their
losses can be told so finely."""

_TIMES_TRAINED_AGAIN = 3
"""How often the same steps are trained again where their losses are not the same, as kernels that
add in no fixed order leave them."""

_ERRORS_APART = 3.0
"""By how many of their standard errors the first time may differ from a repetition."""

_MOST_APART = 1e-3
"""Relative difference beyond which losses are those of other steps."""

_ENDED_BEFORE_TRACE = f"the script ended before {PROFILED_STEPS} more steps were traced"

_MOST_TO_PLACE = 4
"""Steps within which one is found that takes as many batches as the second one did."""


@dataclass
class Runs:
    """At most one start of the script, paused between two steps whenever nothing is measured.

    Attributes:
        orders: what each start is told; its knobs are filled in here.
        arguments: the script's own.
        maps: knobs that it takes by its arguments.
        variables: environment of its processes as it is today.
        hardware: where it runs.
        environment: where it is on record, and time limits.
        way: how it is started.
        files: keeps what a start changes of the user's files.
        imports_once: whether what the script imports is imported once, for later starts.
        sound: whether training the same steps again gave the same losses; ``None``: not tried.
        knobs: what is not as the script has it, in the present start.
        apart: whether the last start was given up as its ranks train apart from each other.
        made: steps that the last one had made when it failed.

    """

    orders: LaunchConfig
    arguments: list[str]
    maps: Sequence[Mapped]
    variables: Mapping[str, str]
    hardware: Hardware
    environment: Environment
    way: Way
    files: UserFiles = field(default_factory=UserFiles)
    imports_once: bool = True
    sound: bool | None = None
    knobs: dict[str, Value] = field(default_factory=dict)
    group: ScriptGroup | None = None
    start: Start | None = None
    apart: bool = False
    made: int = 0
    _forked: bool = False
    _unlike: str = ""

    def __post_init__(self) -> None:
        variables = {**hash_seed(self.environment.seed, os.environ), **self.variables}
        self._source = Source(self.way, variables, self.imports_once)

    def begin(self, knobs: dict[str, Value], plan: Plan, keeps: bool) -> Outcome | None:
        """Start the script and let it make two steps; return the failure, if it is one.

        Args:
            knobs: what is not to be as the script has it.
            plan: of the trial.
            keeps: whether the point after the first step is to be kept, to go back to.

        """
        failed = self._begin(knobs, plan, keeps)
        if not self._forked:
            return failed
        if failed is None:
            self._source.note_success()
        elif self._source.doubts(failed):
            why, variable = failed.reason, self._unlike
            failed = self._begin(knobs, plan, keeps, plainly=True)
            if failed is None:
                self._source.note_failure(why, variable)
        return failed

    def _begin(
        self, knobs: dict[str, Value], plan: Plan, keeps: bool, plainly: bool = False
    ) -> Outcome | None:
        self.end()
        self.apart, self._unlike = False, ""
        group = self.group = self._started(knobs, plan, plainly)
        self._forked = group.forked
        limit_s = self.environment.limits.startup_s + plan.time_limit_s
        deadline = time.monotonic() + limit_s
        try:
            group.join()
            first = receive_steps(group, plan, deadline - time.monotonic())
            window.require_ranks_together(first, self.way.world_size)
            self._learn_imports(first)
            start = Start(
                Facts(**first[0]["facts"]),
                first[0]["pulls"],
                why_not_again=first[0]["why_not_again"],
            )
            if keeps and self.sound is not False:
                start.kept = _keep(group, self.environment.limits.startup_s)
            group.send({"op": "go"})
            second = receive_steps(group, plan, max(0.0, deadline - time.monotonic()))
        except (GroupGone, EndedError) as error:
            self.apart, self.made = isinstance(error, TrainApartError), max(group.steps)
            return self.failure(error, knobs)
        except BaseException:
            self.end(kill=True)
            raise
        start.facts = Facts(**second[0]["facts"])
        pulls = {(a["pulls"], b["pulls"] - a["pulls"]) for a, b in zip(first, second, strict=True)}
        counted = [m["samples"] for m in second]
        start.counts_samples = None not in counted and sum(counted) > 0
        if start.counts_samples:
            start.samples = sum(counted) - sum(m["samples"] or 0 for m in first)
        start.pulls_per_step = next(iter(pulls))[1] if len(pulls) == 1 else None
        start.seconds = [max(m["seconds"] for m in messages) for messages in (first, second)]
        add_loss(start, mean_loss(second))
        self.start, self.knobs = start, dict(knobs)
        return None

    def _learn_imports(self, first: Sequence[Mapping[str, Any]]) -> None:
        """Take up what a start says of its imports with its first step.

        Raises:
            EndedError: what was imported ahead of it is not as it would have been imported.

        """
        self._source.learn(first[0].get("imports"))
        self._unlike = next((m["unlike"] for m in first if m.get("unlike")), "")
        if self._unlike:
            raise EndedError(f"it sets {self._unlike} otherwise than its first start did")

    def _started(self, knobs: dict[str, Value], plan: Plan, plainly: bool) -> ScriptGroup:
        planned = transport.plan(knobs, self.maps)
        files = plan.log_directory.absolute() / "files"
        arguments, told = apply(self.arguments, self.maps, planned.mapped, files)
        seed = self.environment.seed
        orders = LaunchConfig(
            self.orders.script,
            self.orders.module,
            planned.objects,
            report=False,
            seed=seed,
            perturbed=plan.perturbed,
            mapped=told,
            tells_imports=self._source.asks,
        )
        return ScriptGroup(
            orders,
            arguments,
            {**hash_seed(seed, os.environ), **self.variables, **planned.environment},
            self.way,
            self.environment,
            self.hardware.gpus,
            plan.log_directory,
            partial(self._source.process, self.environment),
            self.files.begin,
            plainly,
        )

    def lines_of_imports(self) -> list[str]:
        """What to tell of what could not be imported once."""
        return self._source.lines()

    def close(self) -> None:
        """End the start, if there is one, and what starts are forked from."""
        self.end()
        self._source.close(self.environment)
        self.files.close()

    def failure(self, error: GroupGone | EndedError, knobs: Mapping[str, Value]) -> Outcome:
        """What came of a start that failed; nothing is left of it."""
        assert self.group is not None
        outcome = window.failed_outcome(self.group, error, knobs, self.maps)
        self.end(kill=True)
        return outcome

    def is_waiting_with(self, knobs: Mapping[str, Value]) -> bool:
        """Whether these knobs are in force in a start that has not been measured yet."""
        return self.start is not None and bool(self.start.seconds) and knobs == self.knobs

    def differing(self, knobs: Mapping[str, Value]) -> set[str]:
        """Knobs that would have to change in the running script."""
        return {
            name
            for name in knobs.keys() | self.knobs.keys()
            if not same_value(knobs.get(name), self.knobs.get(name))
        }

    @property
    def can_go_back(self) -> bool:
        """Whether the running script may be taken back to its first step."""
        start = self.start
        return (
            self.group is not None
            and start is not None
            and self.sound is not False
            and not (start.kept or start.why_not_again or start.over)
            and start.pulls_per_step is not None
        )

    def go_back(self, knobs: dict[str, Value], plan: Plan, deadline: float) -> bool:
        """Take the running script back to its first step, with other knobs of step scope.

        The first time, the same configuration is trained again first: unless its losses are the
        ones that it had, nothing is ever changed in a running script. Where kernels add in no fixed
        order, losses need only differ by no more than chance. ``False`` where it has to be started
        again.
        """
        if not self.can_go_back:
            return False
        group, start = self.group, self.start
        assert group is not None and start is not None
        try:
            if start.seconds:
                self._run_on(group, start, plan, deadline)
            if self.sound is None:
                self.sound = self._trains_the_same_again(group, start, plan, deadline)
            if self.sound:
                return self._rewind(group, start, knobs, plan, deadline, plan.perturbed)
        except (GroupGone, EndedError):
            self.end(kill=True)  # a new start will tell what is wrong, if anything is
            return False
        return False

    def _trains_the_same_again(
        self, group: ScriptGroup, start: Start, plan: Plan, deadline: float
    ) -> bool:
        """Whether the first steps, trained again as they were, have the losses that they had."""
        before, repeated = list(start.losses or []), []
        finest = loss_resolution(start.facts.loss_dtype)
        for _ in range(_TIMES_TRAINED_AGAIN if before else 0):
            if not self._rewind(group, start, self.knobs, plan, deadline):
                return False
            while start.losses is not None and len(start.losses) < len(before):
                group.send({"op": "go"})
                messages = receive_steps(group, plan, max(0.0, deadline - time.monotonic()))
                add_loss(start, mean_loss(messages))
            repeated.append(list(start.losses or []))
            if _same(before, repeated[-1], finest):
                return True
            begins_alike = _same(before[:1], repeated[-1][:1], finest)
            if not (begins_alike and _same(before, repeated[-1], _MOST_APART)):
                return False
        return len(repeated) == _TIMES_TRAINED_AGAIN and _differ_by_chance(before, repeated)

    @staticmethod
    def _run_on(group: ScriptGroup, start: Start, plan: Plan, deadline: float) -> None:
        """Let a start that nothing was measured in go on as if it were measured.

        A search that is taken up again begins with one. Only batches that a script was given can be
        given to it again, and only losses that it had can be compared.
        """
        settle(group, plan, start, deadline)
        alone(window.score(group, plan, start, deadline, lambda facts: {}))
        start.seconds = []

    def _rewind(
        self,
        group: ScriptGroup,
        start: Start,
        knobs: dict[str, Value],
        plan: Plan,
        deadline: float,
        perturbed: bool = False,
    ) -> bool:
        """Train the steps after the first again; ``False`` where the place is not found."""
        assert start.pulls_per_step is not None

        def left() -> float:
            return max(0.0, deadline - time.monotonic())

        for _ in range(_MOST_TO_PLACE):
            # batches that a wrapper of the loader has taken in advance are used up by a step in the
            # midst of an epoch; in the first of an epoch it takes others in advance
            group.send({"op": "rewind", "place": start.first_pulls - start.pulls_per_step})
            messages = receive_steps(group, plan, left())
            if all(m["taken"] == start.pulls_per_step for m in messages):
                break
        else:
            return False
        objects = transport.plan(knobs, self.maps).objects
        group.send({"op": "change", "knobs": objects, "perturbed": perturbed})
        group.receive("changed", left())
        self.knobs = dict(knobs)
        start.losses, start.seconds = [], []
        group.send({"op": "go"})
        messages = receive_steps(group, plan, left())
        start.seconds.append(max(m["seconds"] for m in messages))
        add_loss(start, mean_loss(messages))
        return True

    def score(self, plan: Plan, deadline: float, asked: Mapping[str, Value]) -> Turns[Measurement]:
        """Measure what is in force, giving way to others where the plan says so.

        Args:
            plan: how.
            deadline: monotonic time at which it is given up.
            asked: values that only the controller knows to be in force, by knob.

        Raises:
            EndedError, GroupGone: the script did not get so far.

        """
        assert self.group is not None and self.start is not None
        settle(self.group, plan, self.start, deadline)
        measurement = yield from window.score(
            self.group, plan, self.start, deadline, lambda facts: {**asked, **facts.values}
        )
        self.start.seconds = []  # another configuration begins from the point that was kept
        if self.start.over:
            if plan.trace:
                measurement.environment["unsupported"] = {"close look": _ENDED_BEFORE_TRACE}
            self.end(kill=self.start.gone)
        elif plan.trace:
            traced_from = time.monotonic()
            reason = self._trace(self.group, plan, deadline)
            if reason:
                measurement.environment["unsupported"] = {"close look": reason}
            self.end(kill=bool(reason))  # the profiler's hooks stay in a GPU's driver
            # System metrics are those of the steps before.
            measurement.detail_seconds = time.monotonic() - traced_from
        return measurement

    @staticmethod
    def _trace(group: ScriptGroup, plan: Plan, deadline: float) -> str:
        """Have a few more steps traced; why that was not possible, or empty."""
        directory = str(plan.log_directory.absolute())
        group.send({"op": "trace", "count": PROFILED_STEPS, "directory": directory})
        try:
            messages = group.receive("traced", max(0.0, deadline - time.monotonic()))
        except GroupGone as gone:
            late = "the time for them was over" if gone.limit_s is not None else "it failed"
            return f"{PROFILED_STEPS} more steps were to be traced, and {late}"
        if any(m["event"] == "ended" for m in messages):
            return _ENDED_BEFORE_TRACE
        return next((m["reason"] for m in messages if m["reason"]), "")

    def end(self, kill: bool = False) -> None:
        """End the start, if there is one."""
        group, self.group, self.start = self.group, None, None
        if group is not None:
            group.end(kill)
            self.files.end(group.token)


def _keep(group: ScriptGroup, limit_s: float) -> str:
    """Have the ranks keep the present point; why one of them cannot."""
    group.send({"op": "keep"})
    return next((m["reason"] for m in group.receive("kept", limit_s) if m["reason"]), "")


def _same(before: Sequence[float], again: Sequence[float], finest: float) -> bool:
    """Whether these are the same losses, up to a relative difference ``finest``."""
    return len(before) == len(again) and all(
        math.isfinite(a) and abs(a - b) <= max(_SAME_LOSS * max(1.0, abs(a)), finest * abs(a))
        for a, b in zip(before, again, strict=True)
    )


def _differ_by_chance(before: Sequence[float], repeated: Sequence[Sequence[float]]) -> bool:
    """Whether losses differ from those of a repetition as repetitions differ by chance.

    What is not taken back, such as a learning rate that the script computes from its own number of
    steps, has gone on by as much from each repetition to the next: their second differences leave
    that out, and only chance is in them. The first losses come before anything was added up in
    another order, so that they have to be the same.
    """
    first, second, third = repeated
    triples = zip(first, second, third, strict=True)
    by_chance = sum((a - 2 * b + c) ** 2 for a, b, c in triples) / 6
    apart = sum((a - b) ** 2 for a, b in zip(before, first, strict=True)) / 2
    return apart <= _ERRORS_APART**2 * by_chance
