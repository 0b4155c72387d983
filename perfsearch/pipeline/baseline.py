"""Stage 2: measure what the user has today as trial 0, and say where its time goes."""

from __future__ import annotations

import math

from perfsearch.core import command
from perfsearch.core.errors import BadInputError
from perfsearch.core.knob import Part
from perfsearch.core.trial import Measurement, Purpose, Status, Trial
from perfsearch.metrics.bounds import (
    UpperBound,
    gain_of,
    gain_text,
    headroom_of,
    knobs_by_part,
    profiled_step_ms,
    upper_bounds,
)
from perfsearch.metrics.diagnosis import Severity, diagnose
from perfsearch.metrics.phases import evidence_beyond_phases, phase_table
from perfsearch.pipeline import profile
from perfsearch.pipeline.session import BreakerError, Session

_OF_THE_JOB = (
    "workload.factory=",
    "ended, before it could be measured",
    "steps cannot be measured",
    "samples cannot be counted",
    "train apart from each other",
)
"""What a failure's reason says where the job could not be made, or has too little to do."""


def run(session: Session) -> Trial:
    """Run trial 0 unless an earlier run of the same search has it, and tell the strategy.

    Where it runs out of memory the search goes on, since another configuration may fit. Any other
    failure ends it: there is nothing to compare with, and whatever is tried would fail alike.

    Raises:
        BreakerError: the baseline does not run.
        BadInputError: the user's factory makes no job, or the user's script ends too early. Once
            it is mended, the same command begins with the baseline.

    """
    session.view.stage("baseline", "the configuration as it is today")
    trial = session.baseline
    if trial is None or _again(session, trial):
        baseline = dict(session.runner.baseline)
        trial = session.run(baseline, Purpose.BASELINE, number=0, profiled=True)
        session.proposals.tell(trial)
        session.told(trial=trial.number)
        if trial.status is not Status.OK:
            _report_failure(session, trial)
    else:
        session.resumed = True
    if trial.status.has_failed and trial.status is not Status.OOM:
        raise BreakerError(f"the baseline failed: {trial.status}, {trial.reason}")
    _explain(session, trial)
    return trial


def _report_failure(session: Session, trial: Trial) -> None:
    log = f" Full log: {trial.log_path}" if trial.log_path else ""
    if _is_users_fault(trial):
        raise BadInputError(f"{trial.reason}.{log}")
    if trial.status is Status.OOM:  # of others the end of the search tells
        session.view.warning(f"the baseline failed: {trial.status}, {trial.reason}.{log}")


def _again(session: Session, known: Trial) -> bool:
    asked = session.only_rerun and known.status.has_failed
    unfit = known.status is Status.INTERRUPTED or known.status.is_from_outside
    return asked or unfit or _is_users_fault(known)


def _is_users_fault(trial: Trial) -> bool:
    """Whether the job cannot be measured at all, which no configuration of it is to blame for."""
    return trial.status.has_failed and any(part in trial.reason for part in _OF_THE_JOB)


def _explain(session: Session, trial: Trial) -> None:
    """Say what holds the job back and what there is to gain, where its steps were profiled."""
    if trial.status is Status.OK and trial.measurement is not None:
        session.view.note(job_line(trial.measurement))
        missing = trial.measurement.environment.get("unsupported", {})
        if "step range" in missing:
            session.view.note(missing["step range"])
        why = missing.get("close look")  # as the journal has it
        if why is not None:
            begin = session.settings.metrics.begin_step
            asked = "" if begin is None else f" at metrics.begin_step={begin}"
            session.view.warning(f"the baseline was not profiled{asked}: {why}")
        lines = profile.finding_lines(trial.measurement)
        if lines:
            session.view.note("\n".join(["what holds it back:", *lines]))
            show_phases(session, trial.measurement)


def job_line(measurement: Measurement) -> str:
    """What a step trains, as far as that is known; empty where only samples are counted."""
    parameters = measurement.environment.get("parameters")
    words = [f"{measurement.samples_per_step} samples"] if measurement.samples_per_step else []
    if measurement.tokens_per_step:
        words.append(f"{measurement.tokens_per_step:,} tokens")
    if parameters:
        millions = parameters / 1e6
        words.append(f"of a model of {millions:,.{0 if millions >= 100 else 2}f} M parameters")
    return f"a step trains {', '.join(words)}" if len(words) > 1 else ""


# -----------------------------------------------------------------------------
# Where the time goes, and headroom: the most that the searched knobs can gain, from the
# timings of the baseline.


def show_phases(session: Session, measurement: Measurement) -> None:
    """Show where a step's time goes, and what the searched knobs can gain where that is known."""
    rows = phase_table(measurement, session.runner.space.knobs)
    if not rows:
        return
    step_ms = profiled_step_ms(measurement)
    session.view.note(f"where a step of {step_ms:.2f} ms goes (profiled, unlike those scored):")
    session.view.table(rows)
    for line in evidence_beyond_phases(measurement):
        session.view.note(line)
    bounds, total = _upper_bounds(session), headroom(session)
    if bounds and not any(bound.says_something for bound in bounds):
        session.view.note("these timings bound no gain: their errors are as large")
    elif total is not None and not math.isinf(total):
        session.view.note(f"all that is searched can gain {gain_text(total)} at most")
    if hint := _why_no_loading(session):
        session.view.note(f"{Part.LOADING}: {hint}")


def _why_no_loading(session: Session) -> str:
    """How loading could be searched where it is not; empty where it is, or cannot be."""
    settings = session.settings
    workload = settings.workload
    if knobs_by_part(session.runner.space.knobs)[Part.LOADING]:
        return ""
    if workload.name != "custom" or settings.runner.name != "ddp":
        return ""  # other runners have no knob of the loader
    if workload.options.get("draws_in_loader") is False:
        return ""
    return "workload.draws_in_loader=false allows it, where loading draws no random numbers"


def headroom(session: Session) -> float | None:
    """The most that the searched knobs can gain, relative; ``None`` where it is not known."""
    return headroom_of(_upper_bounds(session), session.runner.space.knobs)


def reason_to_stop(session: Session) -> str:
    """Why a search over these knobs cannot gain ``objective.min_gain``; empty where it may.

    With ``batch=free`` other batches make other steps, which these timings do not bound.
    """
    settings, found = session.settings, _upper_bounds(session)
    least = settings.objective.min_gain
    total = headroom(session)
    if total is None or total >= least or settings.batch == "free" or session.only_rerun:
        return ""
    return (
        f"these knobs can gain {gain_text(total)} at most, less than objective.min_gain={least:g} "
        f"({command.given().key('objective.min_gain=0')} searches all the same). "
        f"{_instead(session, found)}"
    )


def _instead(session: Session, found: list[UpperBound]) -> str:
    names = knobs_by_part(session.runner.space.knobs)
    better = [b for b in found if not names[b.part] and b.share > 0.01]
    words = []
    if better:
        listed = ", ".join(f"{b.part} ({gain_text(gain_of(b.share))} at most)" for b in better)
        words.append(f"What is not searched: {listed}")
    trial = session.baseline
    assert trial is not None and trial.measurement is not None
    findings = diagnose(trial.measurement, session.settings.metrics.thresholds)
    words += [f.advice.rstrip(".") for f in findings if f.severity is not Severity.INFO]
    words += [] if len(words) > bool(better) else [findings[0].advice.rstrip(".")]
    return ". ".join(filter(None, words)) + "."


def _upper_bounds(session: Session) -> list[UpperBound]:
    trial = session.baseline
    if trial is None or trial.status is not Status.OK or trial.measurement is None:
        return []
    return upper_bounds(trial.measurement)
