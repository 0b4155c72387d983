"""A comparison of jobs, start by start: ``perfsearch compare``. Nothing is searched."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perfsearch.config.schema import Settings
from perfsearch.core.files import write_json
from perfsearch.core.knob import Value
from perfsearch.core.losses import largest_difference
from perfsearch.core.signals import ExitCode
from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.core.verdict import (
    Plan,
    Reading,
    leader,
    plan_of_starts,
    plan_of_steps,
    told,
)
from perfsearch.pipeline import record
from perfsearch.pipeline.blocks import Blocks
from perfsearch.pipeline.confirm import expectation, tell_two_kinds
from perfsearch.pipeline.resume import restore
from perfsearch.pipeline.search import Course
from perfsearch.pipeline.search import search as run_session
from perfsearch.pipeline.session import (
    BASELINE,
    Result,
    Session,
    Verdict,
    View,
)
from perfsearch.pipeline.turns import measure_in_turns
from perfsearch.runners._arms import ARM, Arms
from perfsearch.strategies._nothing import Nothing
from perfsearch.tracking import export, names

_TURNS = 11
"""Tells the draws of orders of windows from others by the same seed."""

_HOPED_FOR = 0.03
"""Gain by which it is said what is to be expected, where none is named."""

SCHEMA = 1
"""Version of the result file, under ``schema``."""


@dataclass(frozen=True)
class Question:
    """What is asked of the arms.

    Attributes:
        max_starts: of each arm, the first look at the reference apart.
        min_gain: relative difference that matters; a comparison ends once it is known to be less.
        allowed_slowdown: relative slowdown up to which an arm does not count as slower.
        seconds: time for all of it.
        json_file: where the result is written, beside the run directory.

    """

    max_starts: int = 8
    min_gain: float = 0.0
    allowed_slowdown: float = 0.0
    seconds: float | None = None
    json_file: Path | None = None


def compare(settings: Settings, arms: Arms, question: Question, view: View) -> Result:
    """Compare the first arm with each of the others; the exit code says what came of it.

    Args:
        settings: of the session: limits, seed, tracking, and the directory.
        arms: that are compared.
        question: what is asked of them.
        view: what shows it.

    Raises:
        BadInputError: it may not start; nothing was started.
        Interrupted: a signal came; what is known is shown first.

    """
    return run_session(settings, arms, Nothing, view, course=_Comparison(arms, question))


class _Comparison(Course):
    """Starts the arms in blocks until what is asked is decided."""

    def __init__(self, arms: Arms, question: Question) -> None:
        self.arms, self.question = arms, question
        self.names = list(arms.arms)
        self._begin = time.monotonic()
        self._blocks: Blocks | None = None

    # -------------------------------------------------------------------------
    # Measuring.

    def stages(self, session: Session) -> Result:
        """Look at the reference first, to see that it runs, and measure in blocks then."""
        restore(session)  # which begins the record of a new one
        session.view.stage("first", f"whether {self.names[0]} runs, and what it trains")
        trial = self._measure(session, BASELINE, Purpose.BASELINE)
        if trial.status is not Status.OK:
            log = f". Full log: {trial.log_path}" if trial.log_path else ""
            reason = f"{self.names[0]} cannot be measured: {trial.status}, {trial.reason}{log}"
            code = ExitCode.NO_TRIAL_SUCCEEDED
            return Result(code, session.run_dir, session.trials, Verdict(reason=reason))
        plan = self._plan(session)
        blocks = self._blocks = Blocks(
            [BASELINE, *range(1, len(self.names))],
            plan,
            session.settings.seed,
            lambda arm, block: self._measure(session, arm, Purpose.CONFIRM),
            lambda: self._seconds_left == 0.0,
            measure_together=lambda arms, block: self._together(session, arms, block),
        )

        def when_failed(arm: int, trial: Trial) -> None:
            session.view.warning(f"{self._name(arm)} is out: {trial.status}, {trial.reason}")

        def when_read(count: int) -> None:
            session.journal.append("confirmed", blocks=count, intervals=self._intervals)

        self._look_at_others(session, blocks, when_failed)
        blocks.run(when_failed, when_read)
        tell_two_kinds(session, {self._name(arm): costs for arm, costs in blocks.costs.items()})
        code, reason = self._decide(blocks)
        return Result(code, session.run_dir, session.trials, self._verdict(session, code, reason))

    def _plan(self, session: Session) -> Plan:
        """When the arms are read; says what is to be expected."""
        question, arms = self.question, self.arms
        if arms.in_one_start:  # which is known once one was switched to another
            arms.in_one_start = not self._measure(session, 1, Purpose.REPEAT).fresh_process
            how = "knobs can be changed between its steps: all are measured inside one start"
            session.view.note(how if arms.in_one_start else f"not so that {how}")
        least = max(question.min_gain, question.allowed_slowdown)
        more: dict[str, Any] = {
            "comparisons": len(self.names) - 1,
            "min_gain": least,
            "sharpness": 0.5 if question.allowed_slowdown else 1.0,
        }
        session.view.stage("blocks", f"each of {len(self.names)} arms once a block")
        if arms.in_one_start:
            return plan_of_steps(**more)
        plan = plan_of_starts(question.max_starts, **more)
        session.view.note(expectation(session, plan, least or _HOPED_FOR, len(self.names)))
        return plan

    def _measure(self, session: Session, arm: int, purpose: Purpose) -> Trial:
        configuration: dict[str, Value] = {ARM: self._name(arm)}
        left, fresh = self._seconds_left, not self.arms.in_one_start
        if purpose is Purpose.CONFIRM and not fresh:
            purpose = Purpose.REPEAT
        number = 0 if purpose is Purpose.BASELINE else None
        trial = session.run(configuration, purpose, fresh=fresh, number=number, seconds_left=left)
        while self.arms.said:
            session.view.note(self.arms.said.pop(0))
        return trial

    def _look_at_others(
        self, session: Session, blocks: Blocks, when_failed: Callable[[int, Trial], None]
    ) -> None:
        """Measure the other arms once alone, where it is to be seen whether all may be alive."""
        for arm in blocks.arms[1:] if self.arms.in_turns else ():
            trial = self._measure(session, arm, Purpose.CONFIRM)
            if trial.status is Status.INTERRUPTED:
                return
            if trial.status is not Status.OK:
                blocks.trials.append(trial)
                blocks.leave_out(arm, trial, when_failed)

    def _together(self, session: Session, arms: Sequence[int], block: int) -> list[Trial]:
        """A trial of each of these arms, their windows in turns; none where that cannot be."""
        if not self.arms.in_turns or self._seconds_left == 0.0:
            return []
        why = self.arms.why_not_in_turns()
        trials: list[Trial] = []
        if not why:
            trials = measure_in_turns(
                session,
                [{ARM: self._name(arm)} for arm in arms],
                np.random.default_rng([session.settings.seed, block, _TURNS]),
                lambda: self._seconds_left,
            )
            failed = next((t for t in trials if t.status.has_failed), None)
            if failed is None:
                return trials
            why = f"trial {failed.number} failed beside the others: {failed.reason}"
        self.arms.in_turns = False
        session.view.note(f"starts are measured one at a time from now on, as {why}")
        return []

    @property
    def _seconds_left(self) -> float | None:
        limit = self.question.seconds
        return None if limit is None else max(0.0, limit - (time.monotonic() - self._begin))

    def _name(self, arm: int) -> str:
        return self.names[max(arm, 0)]

    @property
    def _intervals(self) -> dict[str, Any]:
        readings = self._blocks.readings if self._blocks is not None else {}
        return {self._name(arm): vars(reading.interval) for arm, reading in readings.items()}

    # -------------------------------------------------------------------------
    # What came of it.

    def _decide(self, blocks: Blocks) -> tuple[ExitCode, str]:
        """The exit code, and one line for people. Of several arms the best decides."""
        reference, failed = self.names[0], blocks.failed
        if BASELINE in failed:
            trial = failed[BASELINE]
            why = f"{reference} ran at first and failed then: {trial.status}, {trial.reason}"
            return ExitCode.NO_TRIAL_SUCCEEDED, why
        if blocks.readings:
            first = leader({arm: r.interval for arm, r in blocks.readings.items()})
            return self._answer(blocks.readings[first]), "; ".join(
                f"{self._name(arm)}: {told(reading, reference)}"
                for arm, reading in blocks.readings.items()
            )
        if len(blocks.arms) > 1:
            return ExitCode.NO_DIFFERENCE, "too few starts for an interval: nothing is shown"
        other = [arm for arm, trial in failed.items() if trial.status is Status.DIVERGED]
        lines = [
            f"{self._name(arm)}: "
            f"{'not the same computation' if arm in other else str(trial.status)}: {trial.reason}"
            for arm, trial in failed.items()
        ]
        code = ExitCode.OTHER_COMPUTATION if other else ExitCode.NO_TRIAL_SUCCEEDED
        return code, "; ".join(lines)

    def _answer(self, reading: Reading) -> ExitCode:
        interval = reading.interval
        if interval.is_gain:
            return ExitCode.DONE
        slower = interval.high < 1 - self.question.allowed_slowdown
        return ExitCode.SLOWER if slower else ExitCode.NO_DIFFERENCE

    def _verdict(self, session: Session, code: ExitCode, reason: str) -> Verdict:
        """By the number of each arm's first trial, as views of a session show it."""
        blocks = self._blocks
        assert blocks is not None
        first = {arm: self._trials(session, arm)[0].number for arm in blocks.readings}
        intervals = {first[arm]: reading.interval for arm, reading in blocks.readings.items()}
        winner = leader(intervals) if code is ExitCode.DONE else None
        costs = {first.get(arm, arm): costs for arm, costs in blocks.costs.items()}
        return Verdict(intervals, winner, reason, costs, blocks.trials)

    def _trials(self, session: Session, arm: int) -> list[Trial]:
        """Those of an arm that ended by themselves; the first look is apart."""
        name = self._name(arm)
        ended = [t for t in session.trials if t.status is not Status.INTERRUPTED]
        measured = {t.number for t in self._blocks.trials} if self._blocks is not None else ()
        return [t for t in ended if t.configuration[ARM] == name and t.number in measured]

    # -------------------------------------------------------------------------
    # The record of it.

    def close_record(self, session: Session, result: Result) -> None:
        """Write the files, finish the MLflow view, and show the table."""
        run_dir = session.run_dir
        record.write_views(session, result.verdict)
        found = self._found(session, result.verdict.reason, int(result.exit_code))
        files = [run_dir / "comparison.json"]
        if self.question.json_file is not None:
            files.append(self.question.json_file)
        for file in files:
            write_json(file, found, durable=True)
        tags = {"perfsearch.verdict": result.exit_code.name.lower()}
        record.append_summary(session, result.verdict, tags, result.verdict.reason)
        for line in self.arms.not_as_before():
            session.view.note(line)
        self._show(session)
        session.view.note(result.verdict.reason)
        for file in [*files, run_dir / "report.html"]:
            session.view.note(f"  {file}")
        session.tracker.close(names.mlflow_status_of_search(result.exit_code))
        session.view.note(session.tracker.how_to_open())

    def interrupted(self, session: Session) -> None:
        """Show what is known by then."""
        self._show(session)
        for arm, reading in self._blocks.readings.items() if self._blocks else ():
            session.view.note(f"{self._name(arm)}: {told(reading, self.names[0])}, so far")
        session.view.note(f"interrupted after {len(session.trials)} starts: no verdict")
        session.tracker.close("KILLED")

    def _show(self, session: Session) -> None:
        rows = [self._row(session, arm) for arm in (BASELINE, *range(1, len(self.names)))]
        cells = [["arm", session.unit, "ms/step", "gain (95% interval)", "starts", "losses apart"]]
        for row in rows:
            numbers = [row[key] for key in ("rate", "step_ms", "losses_apart")]
            rate, step, apart = ("" if n is None else f"{n:.4g}" for n in numbers)
            cells.append([row["name"], rate, step, row["speed"], str(len(row["rates"])), apart])
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for line in cells:
            padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
            session.view.note("  ".join(padded).rstrip())

    def _row(self, session: Session, arm: int) -> dict[str, Any]:
        """What is known of an arm, as plain values."""
        blocks = self._blocks
        trials = self._trials(session, arm)
        good = [t for t in trials if t.status is Status.OK and t.cost and t.measurement]
        rates = [session.objective.from_cost(t.cost or 0.0) for t in good]
        steps = [1e3 * t.measurement.step_time_s for t in good if t.measurement]
        reading = blocks.readings.get(arm) if blocks is not None else None
        speed = "" if reading is None else reading.interval.gain
        bad = next((t for t in trials if t.status.has_failed), None)
        return {
            "name": self._name(arm),
            "rate": statistics.median(rates) if rates else None,
            "rates": rates,
            "step_ms": statistics.median(steps) if steps else None,
            "speed": str(bad.status) if bad is not None else speed,
            "interval": None if reading is None else vars(reading.interval),
            "answer": None if reading is None else str(reading.answer),
            "could_have_shown": None if reading is None else reading.could_have_shown,
            "losses_apart": self._losses_apart(session, good),
            "first_losses": _losses(good),
            "status": str(bad.status) if bad is not None else "ok",
            "reason": bad.reason if bad is not None else "",
            "log": (bad or trials[0]).log_path if trials else "",
        }

    def _losses_apart(self, session: Session, trials: Sequence[Trial]) -> float | None:
        reference = session.baseline
        before = _losses([reference] if reference is not None else [])
        after = [_losses([trial]) for trial in trials]
        if not before or not all(after) or not after:
            return None
        return max(largest_difference(before, losses) for losses in after)

    def _found(self, session: Session, reason: str, exit_code: int) -> dict[str, Any]:
        """The result, for programs."""
        return {
            "schema": SCHEMA,
            "exit_code": exit_code,
            "answer": ExitCode(exit_code).name.lower(),
            "reason": reason,
            "unit": session.unit,
            "min_gain": self.question.min_gain,
            "allowed_slowdown": self.question.allowed_slowdown,
            "arms": [self._row(session, arm) for arm in (BASELINE, *range(1, len(self.names)))],
            "provenance": {**export.provenance(), "identity": self.arms.identity()},
        }


def _losses(trials: Sequence[Trial]) -> list[float]:
    """First losses of the first of them that has any."""
    found = [t.measurement.first_losses for t in trials if t.measurement is not None]
    return next((losses for losses in found if losses), [])
