"""What the stages of one search share, how any of them runs a trial, and what comes of it."""

from __future__ import annotations

import contextlib
import math
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from perfsearch.core.errors import NodesGoneError
from perfsearch.core.files import private
from perfsearch.core.journal import Journal, JournalError
from perfsearch.core.knob import Configuration, Value
from perfsearch.core.losses import loss_disagreement
from perfsearch.core.objective import Objective, log_cost_error
from perfsearch.core.signals import ExitCode, deferred
from perfsearch.core.space import key_of
from perfsearch.core.steps import ALIKE, steps_alike
from perfsearch.core.trial import (
    Measurement,
    Outcome,
    Purpose,
    Status,
    Trial,
    loss_resolution,
)
from perfsearch.core.verdict import Interval, leader
from perfsearch.metrics.diagnosis import CAUSES, causes_of, diagnose
from perfsearch.metrics.slow_steps import SLOW_STEPS, THROTTLED, blame_quota
from perfsearch.metrics.system import merge_nodes
from perfsearch.metrics.thresholds import Thresholds
from perfsearch.pipeline.known import Known
from perfsearch.pipeline.loss_check import (
    AVERAGE_THEM,
    adds_up,
    between_starts,
    has_other_kernels,
    is_perturbed,
    of_rounding,
    other_draws,
)
from perfsearch.pipeline.proposals import Proposals
from perfsearch.pipeline.transfer import Transfer
from perfsearch.runners.base import (
    MeasuresInTurns,
    Perturbs,
    Plan,
    Runner,
    StartsScripts,
    Turns,
)
from perfsearch.strategies.base import Strategy
from perfsearch.training.clock import WARMUP_STEPS
from perfsearch.workers import launchers

if TYPE_CHECKING:
    from perfsearch.config.schema import MetricsSettings, Settings
    from perfsearch.metrics.system import SystemSampler
    from perfsearch.pipeline.cards import Card
    from perfsearch.tracking import Tracker

CUT_OFF = "the time for it was over"
"""Reason of a trial that was ended because the search's time was."""

LOSSES_UNSEEN = (
    "no backward pass of the baseline was seen, and so no loss: nothing shows that configurations "
    "train the same"
)

BASELINE = -1
"""The baseline's place among the arms of a block of the confirmation."""

_LOOK_STEPS = 400
"""Steps of the baseline in which it is looked for slow ones that recur seldom."""

_LOOK_SECONDS = 4
"""How many times as long as a window usually takes that may take."""

_TURN_SECONDS = 0.2
"""How long each is measured at a time where several are measured in turns: other work comes and
goes within seconds, and what the first step of a window costs more is a fraction of a
millisecond."""

_SCORED_IN_TURNS_S = 4.0
"""How long each of those is measured in all, if it has as many steps: where all meet the same load,
what is left of its noise falls with that time, and starting them takes longer."""

CONFIRMED_STEPS = 20
"""Steps of a confirmation, at least."""

_JUDGED = (Status.OK, Status.CRASH, Status.INVALID, Status.DIVERGED)
"""Outcomes that a second start of the baseline may put in another light."""

MAX_RETRIES = 2
"""How often a trial is started again after a failure that is not the configuration's."""


class BreakerError(Exception):
    """A circuit breaker ended the search; the message says which and why."""


@dataclass
class Running:
    """A trial under way: what it is, and how it is measured now.

    Attributes:
        number: of the trial.
        configuration: what is measured.
        purpose: why.
        lane: on which share of the devices.
        seconds_left: what the stage could still spend when it began; ``None``: no limit.
        fresh: whether in new processes.
        profiled: whether further steps are profiled.
        perturbed: whether weights are changed after the first step, by as much as rounding.
        in_turns: whether it is measured in turns with others.
        attempt: 0, or which retry this is.
        left_s: what the stage could still spend when this attempt began; ``None``: no limit.
        begin_s: monotonic time of its start.
        told_s: monotonic time at which the strategy was last told of a trial before it.
        ended_s: monotonic time at which the last attempt ended.
        plan: of the present attempt.

    """

    number: int
    configuration: dict[str, Value]
    purpose: Purpose
    lane: int = 0
    seconds_left: float | None = None
    fresh: bool = False
    profiled: bool = False
    perturbed: bool = False
    in_turns: bool = False
    attempt: int = 0
    left_s: float | None = None
    begin_s: float = 0.0
    told_s: float = 0.0
    ended_s: float = 0.0
    plan: Plan = field(default_factory=lambda: Plan(0))


@dataclass
class Session:
    """One search under way: its parts, and the trials so far in order of their numbers."""

    settings: Settings
    runner: Runner
    strategy: Strategy
    journal: Journal
    view: View
    tracker: Tracker
    run_dir: Path
    trials: list[Trial] = field(default_factory=list)
    transfer: Transfer = field(default_factory=Transfer)
    sampler: SystemSampler | None = None
    search_seconds: float = 0.0
    screened: int = 0
    simulated: int = 0  # chains of the journal that a resumed strategy runs once more
    consecutive_failures: int = 0
    recycle: set[int] = field(default_factory=set)  # lanes whose processes are started anew
    lanes: int = 1  # trials of the exploration at a time
    under_way: dict[int, Running] = field(default_factory=dict)
    rerun: list[tuple[dict[str, Value], int | None]] = field(default_factory=list)
    only_rerun: bool = False
    numbers_from: int = 0
    resumed: bool = False  # trial 0 is of an earlier run, whose processes are gone
    _said: set[str] = field(default_factory=set)
    _last_told: float = field(default_factory=time.monotonic)
    _known: Known = field(init=False)
    proposals: Proposals = field(init=False)

    def __post_init__(self) -> None:
        self._known = Known(self.trials)
        name = self.settings.strategy.name
        self.proposals = Proposals(self.strategy, name, self.runner, self.run_dir)

    @property
    def objective(self) -> Objective:
        """What is optimised."""
        return self.settings.objective

    @property
    def unit(self) -> str:
        """Unit of the objective of this search's trials."""
        measured = next((t.measurement for t in self.trials if t.measurement), None)
        return self.objective.unit(measured)

    @property
    def baseline(self) -> Trial | None:
        """Trial 0, once it has ended."""
        return self._known.catch_up().baseline

    @property
    def baseline_cost(self) -> float | None:
        """Median cost of the baseline and its sentinels."""
        return self._known.catch_up().baseline_cost

    @property
    def search_trials(self) -> Sequence[Trial]:
        """Trials of the search stage that came to an end of their own."""
        return self._known.catch_up().searched

    @property
    def sentinels(self) -> Sequence[Trial]:
        """Trials that measured the baseline again."""
        return self._known.catch_up().sentinels

    @property
    def best(self) -> Trial | None:
        """The fastest valid search trial so far, by its single reading."""
        return self._known.catch_up().best

    def budget_left(self) -> dict[str, float | None]:
        """Search trials and seconds that are left; ``None`` where there is no limit."""
        budget = self.settings.budget
        trials = budget.trials
        return {
            "trials": None if trials is None else max(0, trials - len(self.search_trials)),
            "seconds": budget.seconds_left(self.search_seconds, self.devices),
        }

    @property
    def devices(self) -> int:
        """Ranks that trials of the search occupy at a time."""
        return self.lanes * self.runner.devices

    def recycle_all(self) -> None:
        """Have every lane start its processes anew for its next trial."""
        self.recycle.update(range(self.lanes))

    @property
    def next_number(self) -> int:
        """Number of the next trial."""
        last = max((self._known.catch_up().last_number, *self.under_way))
        return max(last + 1, self.numbers_from)

    def add(self, trial: Trial) -> None:
        """Take up a trial; a later end of the same number replaces an earlier one.

        In place, since the runner's hints read this very list.
        """
        if self.find(trial.number) is not None:
            self.trials[:] = [t for t in self.trials if t.number != trial.number]
            self._known.read_anew()
        trial.pack()
        self.trials.append(trial)

    def find(self, number: int) -> Trial | None:
        """The trial of that number, if it ended."""
        return self._known.catch_up().by_number.get(number)

    def numbered(self, number: int) -> Trial:
        """The trial of that number.

        Raises:
            JournalError: the journal tells of a trial that never finished.

        """
        trial = self.find(number)
        if trial is None:
            raise JournalError(f"{self.journal.path}: trial {number} was told but never finished")
        return trial

    def confirmed(self, verdict: Verdict, finalist: int) -> dict[int, list[Measurement]]:
        """What was measured of the baseline and of a finalist where the gain was confirmed."""
        arms = {BASELINE: self.runner.baseline, finalist: self.numbered(finalist).configuration}
        return {
            arm: [
                t.measurement
                for t in verdict.trials
                if t.measurement is not None and key_of(t.configuration) == key_of(configuration)
            ]
            for arm, configuration in arms.items()
        }

    def recorded(self, configuration: Mapping[str, Value]) -> Trial | None:
        """The trial that already answers ``configuration``, if there is one."""
        return self._known.catch_up().answer(configuration)

    def run(
        self,
        configuration: dict[str, Value],
        purpose: Purpose,
        *,
        fresh: bool = False,
        number: int | None = None,
        seconds_left: float | None = None,
        profiled: bool = False,
        perturbed: bool = False,
    ) -> Trial:
        """Measure a configuration, record how it ended, and return it; never raises for a failure.

        Failures from outside are started again up to ``MAX_RETRIES`` times, in new processes. Where
        the outcome is in another start of a script than the baseline's, the baseline is started
        once more before it is judged, as a trial with the next number.

        Args:
            configuration: what to measure.
            purpose: why.
            fresh: whether in new processes.
            number: of the trial; by default the next one.
            seconds_left: what the stage may still spend. With the grace time on top it bounds the
                trial, which is then ``interrupted``, as the configuration may be a good one.
            profiled: whether further steps are profiled, after those that are scored.
            perturbed: whether weights are changed after the first step, by as much as rounding.

        """
        running = Running(
            self.next_number if number is None else number,
            configuration,
            purpose,
            seconds_left=seconds_left,
            fresh=fresh,
            profiled=profiled,
            perturbed=perturbed,
        )
        try:
            self.begin(running)
            outcome = measure_guarded(self.runner, configuration, running.plan)
            while self.begins_again(running, outcome):
                outcome = measure_guarded(self.runner, configuration, running.plan)
        except BaseException:
            self.break_off(running)
            raise
        return self.end(running, outcome)

    def begin(self, running: Running) -> None:
        """Put a trial on record as started, and plan how it is measured."""
        running.begin_s, running.told_s = time.monotonic(), self._last_told
        self.under_way[running.number] = running
        self.view.trial_started(running.number, running.purpose, running.configuration)
        self._attempt(running)

    def begins_again(self, running: Running, outcome: Outcome) -> bool:
        """Whether the trial is to be measured once more, as its failure came from outside; it is
        then planned anew.
        """
        running.ended_s = time.monotonic()
        last = running.attempt == MAX_RETRIES or running.left_s == 0.0
        if not outcome.status.is_from_outside or last:
            return False
        self.view.warning(f"trial {running.number}: {outcome.reason}; starting it again")
        running.attempt += 1
        self._attempt(running)
        return True

    def break_off(self, running: Running) -> None:
        """Record a trial that was not measured to its end, for whoever goes on."""
        number, configuration, purpose = running.number, running.configuration, running.purpose
        trial = Trial(number, configuration, purpose, Status.INTERRUPTED, reason="interrupted")
        trial.seconds = time.monotonic() - running.begin_s
        trial.lane = running.lane
        self._finish(trial)

    def end(self, running: Running, outcome: Outcome) -> Trial:
        """Judge what was measured, and record it."""
        number, configuration, purpose = running.number, running.configuration, running.purpose
        if outcome.status is Status.TIMEOUT and running.plan.time_limit_s < self._trial_limit_s:
            outcome = replace(outcome, status=Status.INTERRUPTED, reason=CUT_OFF)
        self.recycle.discard(running.lane)
        if was_profiled(outcome):
            self.recycle.add(running.lane)
        begin, now = running.begin_s, running.ended_s
        try:
            if self._lacks_second_start(configuration, purpose, outcome):
                self.measure_baseline_again(self.next_number, fresh=True)
            if self._lacks_perturbed_baseline(configuration, outcome):
                self.measure_baseline_again(self.next_number, perturbed=True)
        except BaseException:
            self.break_off(running)
            raise
        trial = self._judge(number, configuration, purpose, outcome)
        trial.seconds, trial.lane = outcome.started_s + now - begin, running.lane
        steps_s = 0.0
        if trial.measurement is not None:
            scored_s = sum(trial.measurement.step_seconds)
            detail_s = trial.measurement.detail_seconds
            steps_s = scored_s + trial.measurement.discarded_seconds + detail_s
            if self.sampler is not None and not running.in_turns:
                end = max(begin, now - detail_s)
                trial.measurement.system = self._sampled(max(begin, end - scored_s), end)
                note_quota(trial.measurement)
            note_findings(trial.measurement, self.settings.metrics.thresholds)
        # A search trial's cost runs from tell to tell, so that the strategy's own time counts.
        since = running.told_s if purpose is Purpose.SEARCH else begin
        trial.overhead_seconds = max(0.0, outcome.started_s + now - since - steps_s)
        self._finish(trial)
        return trial

    def _sampled(self, begin_monotonic: float, end_monotonic: float) -> dict[str, float]:
        """System metrics of every node over a window."""
        assert self.sampler is not None
        own = self.sampler.window(begin_monotonic, end_monotonic)
        launcher = launchers.of(getattr(self.runner, "environment", None))
        others = launcher.windows(begin_monotonic, end_monotonic)
        return merge_nodes([own, *others]) if others else own

    def told(self, **data: object) -> None:
        """Journal that the strategy knows of a trial; the next one's overhead counts from here."""
        self.journal.append("told", search_seconds=round(self.search_seconds, 3), **data)
        self._last_told = time.monotonic()

    @property
    def _trial_limit_s(self) -> float:
        return self.settings.limits.trial_s

    def _attempt(self, running: Running) -> None:
        """Put an attempt on record, and plan it."""
        self.journal.append(
            "started",
            trial=running.number,
            purpose=running.purpose,
            configuration=running.configuration,
            attempt=running.attempt,
        )
        plan = with_look(self._plan(running), self.baseline)
        plan = with_profile(plan, self.settings.metrics, running.profiled)
        if running.seconds_left is not None:
            spent_s = time.monotonic() - running.begin_s
            running.left_s = max(0.0, running.seconds_left - spent_s)
            limit_s = running.left_s + self.settings.limits.grace_s
            plan = replace(plan, time_limit_s=min(plan.time_limit_s, limit_s))
        running.plan = plan

    def _plan(self, running: Running) -> Plan:
        fresh = running.fresh or running.lane in self.recycle or running.attempt > 0
        plan = Plan(
            number=running.number,
            purpose=running.purpose,
            fresh=fresh,
            attempt=running.attempt,
            time_limit_s=self._trial_limit_s,
            log_directory=self.run_dir / "logs" / f"{running.number:04d}",
            perturbed=running.perturbed,
            lane=running.lane,
            turn_seconds=_TURN_SECONDS if running.in_turns else math.inf,
        )
        if running.purpose is Purpose.CONFIRM:
            plan = replace(plan, scored_seconds=2 * plan.scored_seconds)
        return plan

    def _judge(
        self,
        number: int,
        configuration: dict[str, Value],
        purpose: Purpose,
        outcome: Outcome,
    ) -> Trial:
        """Turn an outcome into a trial: score it, unless it failed or computed something else."""
        trial = Trial(
            number,
            configuration,
            purpose,
            outcome.status,
            outcome.measurement,
            reason=outcome.reason,
            log_path=outcome.log_path,
            fresh_process=outcome.fresh_process,
        )
        measurement = outcome.measurement
        broken = measurement.not_finite() if measurement is not None else []
        if broken:
            trial.measurement = measurement = None
            if outcome.status in (Status.OK, Status.PRUNED):
                trial.status = Status.DIVERGED
                trial.reason = f"NaN or infinity in {', '.join(broken)}"
        if outcome.status not in (Status.OK, Status.PRUNED) or measurement is None:
            return trial
        if outcome.status is Status.OK:
            reason = self._loss_check(configuration, measurement)
            if reason:
                trial.status, trial.reason = Status.DIVERGED, reason
                return trial
        score_trial(trial, self.objective)
        return trial

    def _loss_check(self, configuration: Configuration, measurement: Measurement) -> str:
        """Why the first losses are not the reference's; empty when they agree."""
        free, starts = self.settings.batch == "free", isinstance(self.runner, StartsScripts)
        if starts and self._is_todays(configuration):
            return ""  # what its starts differ by is what others may, too
        reference = next(
            (
                t
                for t in self.trials
                if t.status is Status.OK
                and t.measurement
                and t.measurement.first_losses
                and (not free or t.measurement.samples_per_step == measurement.samples_per_step)
            ),
            None,
        )
        if reference is None:
            if self.sees_no_losses and LOSSES_UNSEEN not in self._said:
                self._said.add(LOSSES_UNSEEN)
                self.view.warning(f"{LOSSES_UNSEEN}. Call backward() on the loss")
            return ""
        assert reference.measurement is not None
        tolerance = self.settings.limits.loss_tolerance
        allowance = other_draws(reference, configuration, self.runner.space.knobs)
        today = self._known.like(self.runner.baseline)
        if starts:
            allowance = max(between_starts(today), allowance)
        if self._rounds_otherwise(reference, configuration):
            allowance = max(of_rounding(today), allowance)
        if allowance.share > tolerance and allowance.kind not in self._said:
            self._said.add(allowance.kind)
            self.view.note(allowance.why)
        both = (reference.measurement, measurement)
        finest = max(loss_resolution(m.environment.get("loss_dtype", "")) for m in both)
        is_baseline = reference.purpose is Purpose.BASELINE
        whose = "the baseline" if is_baseline else f"trial {reference.number}"
        expected = reference.measurement.first_losses
        seen = measurement.first_losses
        reason = loss_disagreement(expected, seen, tolerance, whose, finest, allowance.share)
        cause = adds_up(reference, configuration, expected, seen) if reason else ""
        if cause and AVERAGE_THEM not in self._said:
            self._said.add(AVERAGE_THEM)
            self.view.warning(AVERAGE_THEM)
        return f"{reason}; {cause}" if cause else reason

    @property
    def sees_no_losses(self) -> bool:
        """Whether nothing shows that configurations of a script train the same."""
        baseline = self.baseline
        measured = None if baseline is None or baseline.status.has_failed else baseline.measurement
        starts = isinstance(self.runner, StartsScripts)
        return starts and measured is not None and not measured.first_losses

    def _is_todays(self, configuration: Configuration) -> bool:
        return key_of(configuration) == key_of(self.runner.baseline)

    def _lacks_second_start(
        self, configuration: Configuration, purpose: Purpose, outcome: Outcome
    ) -> bool:
        """Whether the baseline must be started once more before an outcome can be judged by it.

        Which is in another start of the user's script than the baseline's was, while two starts of
        the baseline itself have not been compared. A confirmation has starts of the baseline of its
        own, and needs one more only where it would be judged before them, and hard.
        """
        baseline = self.baseline
        if not isinstance(self.runner, StartsScripts) or self._is_todays(configuration):
            return False
        if baseline is None or baseline.status is not Status.OK:
            return False
        if outcome.status not in _JUDGED or not (outcome.fresh_process or self.resumed):
            return False
        again = (Purpose.SENTINEL, Purpose.CONFIRM)
        if any(
            t.purpose in again and t.fresh_process and t.status is not Status.INTERRUPTED
            for t in self._known.like(self.runner.baseline)
        ):
            return False
        measured = outcome.measurement
        agrees = measured is not None and not self._loss_check(configuration, measured)
        return not (purpose is Purpose.CONFIRM and agrees)

    def _lacks_perturbed_baseline(self, configuration: Configuration, outcome: Outcome) -> bool:
        """Whether what rounding makes of losses must be known before an outcome can be judged.

        Which has other losses than the baseline, and was computed by other kernels.
        """
        baseline, measured = self.baseline, outcome.measurement
        if baseline is None or not self._rounds_otherwise(baseline, configuration):
            return False
        if outcome.status is not Status.OK or measured is None or measured.not_finite():
            return False
        if any(is_perturbed(t) for t in self.trials):
            return False
        return bool(self._loss_check(configuration, measured))

    def _rounds_otherwise(self, reference: Trial, configuration: Configuration) -> bool:
        """Whether losses may be apart by what rounding makes of them, which is then measured."""
        runner = self.runner
        if isinstance(runner, Perturbs):
            return runner.rounds_otherwise(reference.configuration, configuration)
        return isinstance(runner, StartsScripts) and has_other_kernels(
            reference, configuration, runner.space.knobs
        )

    def measure_baseline_again(
        self, number: int | None = None, fresh: bool = False, perturbed: bool = False
    ) -> Trial:
        """Measure the baseline once more in the search, and tell the strategy.

        Args:
            number: of the trial, where none of its kind was broken off; by default the next one.
            fresh: whether in new processes.
            perturbed: whether weights are changed as rounding changes them.

        """
        baseline = dict(self.runner.baseline)
        broken_off = [t.number for t in self.sentinels if t.status is Status.INTERRUPTED]
        number = broken_off[0] if broken_off else number
        trial = self.run(
            baseline,
            Purpose.SENTINEL,
            number=number,
            fresh=fresh,
            perturbed=perturbed,
        )
        self.proposals.tell(trial)
        self.told(trial=trial.number)
        if trial.cost is None:
            self.view.warning(f"the baseline, measured again, ended {trial.status}: {trial.reason}")
        return trial

    def _finish(self, trial: Trial) -> None:
        with deferred():  # recorded, known and shown, or none of it
            self.journal.append("finished", unix_s=time.time(), trial=trial.to_json())
            self.under_way.pop(trial.number, None)
            self.add(trial)
        left = self._seconds_left()
        self.view.trial_finished(trial, self.best, self.baseline, left)

    def _seconds_left(self) -> float | None:
        limit = self.settings.budget.seconds
        return None if limit is None else max(0.0, limit - self.search_seconds)


# -----------------------------------------------------------------------------
# What a stage hands to the next, and what shows it.


@dataclass
class Verdict:
    """What the confirmation says.

    Attributes:
        intervals: speed-up of each finalist by its search trial's number.
        winner: number of the search trial whose configuration is handed over; ``None`` when the
            baseline is.
        reason: one line for people.
        costs: cost by finalist (``BASELINE`` for the baseline), a list over blocks.
        trials: the confirmation's own trials.
        chosen_by: those by which the finalists were chosen.
        is_open: nothing could be compared, or too little, so that a gain that matters
            (``objective.min_gain``) is neither shown nor excluded.

    """

    intervals: dict[int, Interval] = field(default_factory=dict)
    winner: int | None = None
    reason: str = ""
    costs: dict[int, list[float]] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)
    chosen_by: list[Trial] = field(default_factory=list)
    is_open: bool = False

    @property
    def interval(self) -> Interval | None:
        """The leading finalist's interval."""
        return self.intervals[leader(self.intervals)] if self.intervals else None


@dataclass
class Result:
    """What a search came to.

    Attributes:
        exit_code: 0 done, 1 no trial succeeded, 3 a circuit breaker or a failure of the
            strategy stopped it.
        run_dir: where its files are.
        trials: every trial, in order of their ends.
        verdict: what the confirmation says.
        best: the configuration that is handed over, searched and pinned knobs; the baseline's
            where no gain was confirmed.
        handed_over: the same as the runner takes it, the searched knobs only.
        reason: why the search stage ended.
        seconds: wall time of this call.
        objective: what was optimised.
        mlflow_run_id: MLflow's run of the search; ``None`` where no store has one.

    """

    exit_code: ExitCode
    run_dir: Path
    trials: list[Trial]
    verdict: Verdict = field(default_factory=Verdict)
    best: dict[str, object] = field(default_factory=dict)
    handed_over: dict[str, Value] = field(default_factory=dict)
    reason: str = ""
    seconds: float = 0.0
    objective: Objective = field(default_factory=Objective)
    mlflow_run_id: str | None = None

    @property
    def is_baseline(self) -> bool:
        """Whether ``best`` is the baseline's, as nothing was shown to be faster."""
        return self.verdict.winner is None


class View(Protocol):
    """What shows a search to a person while it runs."""

    def stage(self, name: str, detail: str = "") -> None:
        """Say that a stage of the pipeline begins."""

    def trial_started(self, number: int, purpose: Purpose, configuration: Configuration) -> None:
        """Take note that a trial runs."""

    def trial_finished(
        self,
        trial: Trial,
        best_so_far: Trial | None,
        baseline: Trial | None,
        seconds_left: float | None,
        message: str = "",
    ) -> None:
        """Say how a trial ended, and how it compares.

        Args:
            trial: the trial.
            best_so_far: the best of those that count, this one included.
            baseline: trial 0, once it is measured.
            seconds_left: what is left of ``budget.seconds``; ``None`` without that limit.
            message: a remark, such as that a record was served.

        """

    def note(self, text: str) -> None:
        """Say something."""

    def warning(self, text: str) -> None:
        """Say something that should not be missed."""

    def expects(self, trials: int) -> None:
        """Take note that the stage takes about so many trials."""

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """Show a table; the first row is its header, the last column may be long."""

    def card(self, card: Card) -> None:
        """Show labelled lines under a title."""

    def result(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show the closing table.

        Args:
            rows: ``label``, ``trial``, ``objective``, ``unit``, ``step_ms``, ``interval`` (or
                ``None``) and ``confirmed``; the baseline first, then the fastest.

        """


# -----------------------------------------------------------------------------
# A trial: its profile, and its runner, of which nothing that it raises ends a search.


def with_look(plan: Plan, baseline: Trial | None) -> Plan:
    """The plan with as many steps as it takes to meet what recurs.

    The baseline looks for it. What it has found is met twice by each later window, and where that
    comes in clusters, by as many steps as it takes to have the usual share of it. Those that are
    measured in turns have more steps, but not more than the baseline's job had.
    """
    if plan.purpose is Purpose.BASELINE:
        longest_s = _LOOK_SECONDS * plan.scored_seconds
        return replace(plan, look_steps=_LOOK_STEPS, look_seconds=longest_s)
    known = None if baseline is None else baseline.measurement
    seconds = () if known is None else known.step_seconds
    kinds = known.reading.slow if known is not None and seconds else ()
    recurring = [k for k in kinds if k.period_steps is not None and k.share > ALIKE]
    least = CONFIRMED_STEPS if plan.purpose is Purpose.CONFIRM else 0
    if not all(kind.is_periodic for kind in recurring):
        least = max(least, steps_alike(seconds))
    if known is not None and seconds and math.isfinite(plan.turn_seconds):
        # no more than the baseline has made, as the job may end after them
        most = min(_LOOK_STEPS, len(seconds) - WARMUP_STEPS[1])
        least = max(least, min(most, round(_SCORED_IN_TURNS_S / known.step_time_s)))
    twice = [math.ceil(2 * k.period_steps) + 1 for k in recurring if k.period_steps is not None]
    return replace(plan, look_steps=max([least, *twice]))


def with_profile(plan: Plan, metrics: MetricsSettings, profiled: bool) -> Plan:
    """The plan with a profile, where one is due or asked for on every trial."""
    if not profiled and metrics.detail == "light":
        return plan
    look_steps = plan.look_steps
    if metrics.begin_step is not None:  # the profile comes after what is scored
        look_steps = min(look_steps, max(0, metrics.begin_step - 1 - WARMUP_STEPS[1]))
    return replace(
        plan,
        look_steps=look_steps,
        detail="full",
        begin_step=metrics.begin_step,
        end_step=metrics.end_step,
        trace=metrics.trace and profiled,
    )


def score_trial(trial: Trial, objective: Objective) -> None:
    """Give a measured trial its cost; one that lacks what the objective needs has crashed."""
    measurement = trial.measurement
    if measurement is None:
        return
    measurement.statistic = objective.statistic
    try:
        trial.cost = objective.cost(measurement)
        trial.objective = objective.value(measurement)
        trial.cost_error = log_cost_error(measurement)
    except ValueError as error:
        trial.status, trial.reason = Status.CRASH, str(error)


def was_profiled(outcome: Outcome) -> bool:
    """Whether the processes ran under the profiler, whose hooks stay in a GPU's driver."""
    measured = outcome.measurement
    return measured is not None and "device_busy_ms" in measured.bottleneck_evidence


def note_quota(measurement: Measurement) -> None:
    """Say that slow steps are a CPU quota's, where processes were held back for as long."""
    throttled = measurement.system.get(THROTTLED)
    if throttled is not None and measurement.step_seconds:
        blame_quota(measurement.environment.get(SLOW_STEPS, []), throttled / 100)


def note_findings(measurement: Measurement, thresholds: Thresholds) -> None:
    """Keep with the measurement what holds it back, for every view of it."""
    if measurement.step_seconds and measurement.phases_ms and not measurement.not_finite():
        found = diagnose(measurement, thresholds)
        measurement.environment["bottleneck"] = found[0].name
        measurement.environment[CAUSES] = causes_of(found)
        measurement.environment["findings"] = [str(finding) for finding in found]


LOG = "controller.log"
"""File of a trial's log directory with the traceback of what the runner itself raised."""


def measure_guarded(runner: Runner, configuration: Configuration, plan: Plan) -> Outcome:
    """What came of the trial; an exception of the runner is a failed trial with its traceback.

    A system call that failed says nothing of the configuration; anything else may.

    Raises:
        NodesGoneError: nothing can be measured any more.

    """
    try:
        return runner.measure(configuration, plan)
    except NodesGoneError:
        raise
    except Exception as error:
        return _of_exception(error, plan)


def guarded_turns(runner: MeasuresInTurns, running: Running) -> Turns[Outcome]:
    """The same of a trial that is measured in turns with others."""
    try:
        return (yield from runner.measure_in_turns(running.configuration, running.plan))
    except NodesGoneError:
        raise
    except Exception as error:
        return _of_exception(error, running.plan)


def _of_exception(error: Exception, plan: Plan) -> Outcome:
    """The failed trial that an exception of the runner is; called while it is handled."""
    log = plan.log_directory / LOG
    with contextlib.suppress(OSError):  # a full disk may be the very cause
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "a", opener=private) as file:
            traceback.print_exc(file=file)
    lines = str(error).strip().splitlines() or [""]
    status = Status.INFRASTRUCTURE if isinstance(error, OSError) else Status.CRASH
    reason = f"the runner raised {type(error).__name__}: {lines[0]}"
    return Outcome(status, reason=reason, log_path=str(log), fresh_process=plan.fresh)
