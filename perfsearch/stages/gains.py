"""Between baseline and search: what holds the job back, and what there is to gain."""

from __future__ import annotations

from perfsearch.core.trial import Status
from perfsearch.metrics.bounds import (
    LOADING,
    PARTS,
    Bound,
    bound_of,
    bounds,
    gain_of,
    in_short,
    percent,
    searched,
)
from perfsearch.metrics.diagnosis import diagnose
from perfsearch.metrics.findings import Severity
from perfsearch.stages.session import Session


def show(session: Session) -> None:
    """Print the most that each group of knobs can give, from the baseline's timings."""
    found = _bounds(session)
    if not found:
        return
    names = searched(session.runner.space.knobs)
    lines = ["what there is to gain, at most, by what a knob can make shorter:"]
    for one in found:
        knobs = in_short(names[one.part]) or f"no knob is searched{_why_none(session, one)}"
        lines.append(f"- {one.part} {percent(one.gain)}: {one.evidence}; {knobs}")
    total = bound(session)
    if total is not None:
        lines.append(f"all that is searched: {percent(total)}")
    session.view.note("\n".join(lines))


def _why_none(session: Session, one: Bound) -> str:
    settings = session.settings
    workload = settings.workload
    if one.part != LOADING or workload.name != "custom" or settings.runner.name != "ddp":
        return ""  # other runners have no knob of the loader
    if workload.options.get("draws_in_loader") is False:
        return ""
    return " (workload.draws_in_loader=false allows it, where loading draws no random numbers)"


def bound(session: Session) -> float | None:
    """The most that the searched knobs can gain, relative; ``None`` where it is not known."""
    return bound_of(_bounds(session), session.runner.space.knobs)


def reason_to_stop(session: Session) -> str:
    """Why a search over these knobs cannot gain ``objective.min_gain``; empty where it may.

    With ``batch=free`` other batches make other steps, which these timings do not bound.
    """
    settings, found = session.settings, _bounds(session)
    least = settings.objective.min_gain
    total = bound(session)
    if total is None or total >= least or settings.batch == "free" or session.only_rerun:
        return ""
    return (
        f"these knobs can gain {percent(total)} at most, less than objective.min_gain={least:g} "
        f"(0 searches all the same). {_instead(session, found)}"
    )


def _instead(session: Session, found: list[Bound]) -> str:
    names = searched(session.runner.space.knobs)
    better = [b for b in found if not names[b.part] and b.part in PARTS and b.share > 0.01]
    words = []
    if better:
        listed = ", ".join(f"{b.part} ({percent(gain_of(b.share))} at most)" for b in better)
        words.append(f"What is not searched: {listed}")
    trial = session.baseline
    assert trial is not None and trial.measurement is not None
    findings = diagnose(trial.measurement, session.settings.metrics.thresholds)
    words += [f.advice.rstrip(".") for f in findings if f.severity is not Severity.INFO]
    words += [] if len(words) > bool(better) else [findings[0].advice.rstrip(".")]
    return ". ".join(words) + "."


def _bounds(session: Session) -> list[Bound]:
    trial = session.baseline
    if trial is None or trial.status is not Status.OK or trial.measurement is None:
        return []
    return bounds(trial.measurement)
