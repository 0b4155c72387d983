"""A session that holds a job's warm processes, and measures what it is asked for beside the
baseline: ``perfsearch session``. Nothing is searched.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from perfsearch.config.options import ConfigError
from perfsearch.config.schema import Selected, Settings
from perfsearch.core.errors import BadInputError, nearest
from perfsearch.core.knob import Scope, Value, same_value
from perfsearch.core.narrow import SEARCH, KnobError, checked
from perfsearch.core.signals import ExitCode, Interrupted
from perfsearch.core.space import key_of
from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.core.verdict import Plan, Unit, told
from perfsearch.pipeline import baseline, explore, record
from perfsearch.pipeline.blocks import Blocks
from perfsearch.pipeline.search import (
    Course,
    ViewFactory,
    build_runner,
    check_directory,
    settled,
    start_record,
)
from perfsearch.pipeline.search import search as run_session
from perfsearch.pipeline.session import BASELINE, BreakerError, Result, Session, Verdict
from perfsearch.pipeline.session_socket import DIRECTORY, SessionSocket
from perfsearch.runners.base import ClosingLines, Runner
from perfsearch.strategies._nothing import Nothing
from perfsearch.tracking import export, names

SCHEMA = 1
"""Version of an answer, under ``schema``."""

MOST_REPEATS = 100

STAGE, OPEN_IN = "session", "open in "
"""The stage by which a view is told that a session can be asked, and what stands before where."""

_TRIED = 0
"""The place of what is tried among the arms, ``BASELINE`` being the other."""


def hold(settings: Settings, open_view: ViewFactory, idle_s: float) -> int:
    """Open a session, and measure what comes until it is ended; return the exit code.

    Args:
        settings: of the job, as for a search.
        open_view: opens what shows it.
        idle_s: it ends after so many seconds in which nobody asked.

    Raises:
        BadInputError: it may not start; nothing was started.
        Interrupted: a signal came, while something was measured.

    """
    if settings.mode != "search":
        raise ConfigError("mode", f"mode={settings.mode}: a session has only mode=search.")
    settings = replace(
        settled(settings),
        strategy=Selected("session"),
        run_dir=settings.run_dir or DIRECTORY,
        resume="never",
    )
    check_directory(settings)
    runner = build_runner(settings)
    with open_view(settings) as view:
        return int(run_session(settings, runner, Nothing, view, course=Tries(idle_s)).exit_code)


@dataclass(frozen=True)
class Request:
    """What is to be measured.

    Attributes:
        changed: knobs that are not as the job has them.
        configuration: all searched knobs.
        repeats: how often, each time beside the baseline.

    """

    changed: dict[str, Value]
    configuration: dict[str, Value]
    repeats: int = 1

    @classmethod
    def read(cls, plain: Mapping[str, Any], runner: Runner) -> Request:
        """Understand what a caller wants.

        Raises:
            BadInputError: a search would refuse it, or it is none of the session's.

        """
        knobs, repeats = plain.get("knobs"), plain.get("repeats", 1)
        if not isinstance(knobs, dict) or not knobs:
            raise BadInputError(f"nothing to try. Give KEY=VALUE. {nearest('', _names(runner))}")
        if isinstance(repeats, bool) or not isinstance(repeats, int):
            raise BadInputError(f"repeats={repeats}: allowed: a whole number")
        if not 1 <= repeats <= MOST_REPEATS:
            raise BadInputError(f"repeats={repeats}: allowed: 1 to {MOST_REPEATS}")
        changed = {name: _value(runner, name, value) for name, value in knobs.items()}
        space = runner.space
        configuration = space.canonical({**runner.baseline, **changed})
        for name, value in changed.items():
            if not same_value(configuration[name], value):
                when = space.by_name[name].when.items()
                needs = " and ".join(f"{other} of {list(values)}" for other, values in when)
                raise KnobError(
                    f"runner.knobs.{name}={value}: it matters only with {needs}. Give that, too."
                )
        broken = space.broken(configuration)
        if broken:
            raise BadInputError(f"{'; '.join(broken)}. Change one of the values.")
        return cls(changed, configuration, repeats)


def _names(runner: Runner) -> list[str]:
    return [*runner.space.by_name, *runner.pinned, *runner.not_searched()]


def _value(runner: Runner, name: str, value: Any) -> Value:
    """A value that a knob of the session can take.

    Raises:
        KnobError: it cannot, or the session does not search the knob.

    """
    knob = runner.space.by_name.get(name)
    if knob is not None:
        return checked(knob, value)
    if name in runner.pinned:
        raise KnobError(
            f"runner.knobs.{name}={value}: it is fixed to {runner.pinned[name]} in this session. "
            f"Open one with runner.knobs.{name}={SEARCH}"
        )
    why = runner.not_searched().get(name)
    if why is not None:
        raise KnobError(f"runner.knobs.{name}={value}: {why}. Leave the key out.")
    raise KnobError(f"runner.knobs.{name}: no such knob. {nearest(name, _names(runner))}")


class Tries(Course):
    """Measures the baseline, then what is asked for at the socket.

    Args:
        idle_s: it ends after so many seconds in which nobody asked.

    """

    def __init__(self, idle_s: float) -> None:
        self.idle_s = idle_s
        self._asked = 0
        self._measures = False

    def stages(self, session: Session) -> Result:
        """Measure the job as it is, and serve until it is ended."""
        start_record(session)
        try:
            baseline.run(session)
        except BreakerError as error:
            code, why = ExitCode.NO_TRIAL_SUCCEEDED, Verdict(reason=str(error))
            return Result(code, session.run_dir, session.trials, why, reason=str(error))
        with SessionSocket(session.run_dir) as listener:
            session.view.stage(STAGE, f"{OPEN_IN}{session.run_dir}")
            session.view.note(
                "in another terminal: perfsearch try KEY=VALUE ... It ends by Ctrl-C, by "
                f"perfsearch try --end, or when nothing was tried for {self.idle_s / 60:g} minutes"
            )
            reason = self._serve(session, listener)
        verdict = Verdict(reason=f"{self._asked} tries; a session claims no gain")
        return Result(ExitCode.DONE, session.run_dir, session.trials, verdict, reason=reason)

    def _serve(self, session: Session, listener: SessionSocket) -> str:
        """Answer until something ends the session; what did."""
        try:
            return self._answer_all(session, listener)
        except Interrupted as interrupted:
            if self._measures or interrupted.exit_code is not ExitCode.SIGINT:
                raise
            return "Ctrl-C"

    def _answer_all(self, session: Session, listener: SessionSocket) -> str:
        while True:
            caller = listener.wait(self.idle_s)
            if caller is None:
                return f"nothing was tried for {self.idle_s / 60:g} minutes"
            if caller.request.get("op") == "end":
                caller.answer({"schema": SCHEMA, "ended": True})
                return "perfsearch try --end"
            self._measures = True
            answer = self._answer(session, caller.request)
            self._measures = False  # before whoever asked knows that it has ended
            caller.answer({"schema": SCHEMA, **answer})

    def _answer(self, session: Session, plain: Mapping[str, Any]) -> dict[str, Any]:
        try:
            request = Request.read(plain, session.runner)
        except BadInputError as error:
            return {"error": str(error)}
        self._asked += 1
        begin_s = time.monotonic()
        session.journal.append("asked", configuration=request.configuration)
        refusal = explore.screened(session, request.configuration)
        if refusal is not None:
            tried = {"status": str(Status.INVALID), "reason": refusal, "log": "", "trials": []}
            return {"changed": request.changed, "baseline": None, "tried": tried, "ratio": None}
        found = self._measure(session, request)
        return {**found, "seconds": time.monotonic() - begin_s}

    def _measure(self, session: Session, request: Request) -> dict[str, Any]:
        plan = None
        if request.repeats > 1:
            scopes = {session.runner.space.by_name[name].scope for name in request.changed}
            unit = Unit.STARTS if Scope.PROCESS in scopes else Unit.STEPS
            plan = Plan((request.repeats,), unit)
        trials: dict[int, list[Trial]] = {BASELINE: [], _TRIED: []}

        def measure(arm: int, block: int) -> Trial:
            is_baseline = arm == BASELINE
            trial = session.measure_baseline_again() if is_baseline else _run(session, request)
            trials[arm].append(trial)
            return trial

        blocks = Blocks(
            [BASELINE, _TRIED], plan, session.settings.seed + self._asked, measure, lambda: False
        )

        def when_read(count: int) -> None:
            number = str(trials[_TRIED][0].number)
            intervals = {number: vars(blocks.readings[_TRIED].interval)}
            session.journal.append("confirmed", blocks=count, intervals=intervals)

        if session.baseline_cost is None:
            measure(_TRIED, 0)  # there is nothing to compare it with
        else:
            blocks.run(lambda arm, trial: None, when_read)
        reading = blocks.readings.get(_TRIED)
        logs = [
            math.log(before.cost / tried.cost)
            for before, tried in zip(trials[BASELINE], trials[_TRIED], strict=False)
            if before.cost and tried.cost and not blocks.failed
        ]
        ratio = math.exp(statistics.fmean(logs)) if logs else None
        said = told(reading, "the baseline") if reading else _one_reading(ratio, request)
        return {
            "changed": request.changed,
            "configuration": request.configuration,
            "unit": session.unit,
            "baseline": _summary(session, trials[BASELINE]),
            "tried": _summary(session, trials[_TRIED]),
            "ratio": ratio,
            "interval": None if reading is None else vars(reading.interval),
            "said": said,
        }

    # -------------------------------------------------------------------------
    # The record of it.

    def close_record(self, session: Session, result: Result) -> None:
        """Write the files, finish the MLflow view, and say where they are."""
        record.write_views(session, result.verdict)
        tags = {"perfsearch.verdict": "session", "perfsearch.ended": result.reason}
        record.append_summary(session, result.verdict, tags, result.verdict.reason)
        runner = session.runner
        if isinstance(runner, ClosingLines):
            for line in runner.closing_lines(runner.baseline, session.trials):
                session.view.note(line)
        record.name_changed_files(session)
        session.view.note(f"session ended: {result.reason}; {result.verdict.reason}")
        session.view.note(f"  {session.run_dir / 'report.html'}")
        session.tracker.close(names.mlflow_status_of_search(result.exit_code))
        session.view.note(session.tracker.how_to_open())

    def interrupted(self, session: Session) -> None:
        """Keep what was measured by then."""
        knobs, pinned = session.runner.space.knobs, session.runner.pinned
        export.write_trials(session.run_dir, session.trials, knobs, pinned)
        session.view.note(f"interrupted; what was measured is in {session.run_dir}")
        session.tracker.close("KILLED")


def _run(session: Session, request: Request) -> Trial:
    """Measure what is asked for; a trial of the search the first time, a repeat later."""
    key = key_of(request.configuration)
    seen = any(key_of(trial.configuration) == key for trial in session.search_trials)
    purpose, begin_s = Purpose.REPEAT if seen else Purpose.SEARCH, time.monotonic()
    trial = session.run(request.configuration, purpose)
    session.search_seconds += time.monotonic() - begin_s
    session.proposals.tell(trial)
    session.told(trial=trial.number)
    return trial


def _summary(session: Session, trials: Sequence[Trial]) -> dict[str, Any] | None:
    """What was read of one arm, as plain values; ``None``: it was not measured."""
    if not trials:
        return None
    last, good = trials[-1], [t for t in trials if t.cost is not None and t.measurement is not None]
    rates = [session.objective.from_cost(t.cost or 0.0) for t in good]
    measured = [t.measurement for t in good if t.measurement is not None]
    peaks = [m.peak_allocated_gib for m in measured if m.peak_allocated_gib]
    return {
        "status": str(last.status),
        "reason": last.reason,
        "log": last.log_path,
        "trials": [t.number for t in trials],
        "rates": rates,
        "rate": statistics.median(rates) if rates else None,
        "step_ms": statistics.median(1e3 * m.step_time_s for m in measured) if measured else None,
        "peak_gib": max(peaks, default=None),
        "new_processes": any(t.fresh_process for t in trials),
    }


def _one_reading(ratio: float | None, request: Request) -> str:
    if ratio is None:
        return "there is nothing to compare"
    words = " ".join(f"{name}={value}" for name, value in request.changed.items())
    return (
        f"{ratio - 1:+.1%} against the baseline, one reading of each: it shows no gain. With an "
        "interval: "
        f"perfsearch try --repeats 6 {words}"
    )
