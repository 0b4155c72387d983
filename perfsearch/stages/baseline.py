"""Stage 2: measure the configuration that the user has today, as trial 0."""

from __future__ import annotations

from perfsearch.core.errors import BadInputError
from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.stages import gains, looks
from perfsearch.stages.session import Session

_OF_THE_JOB = ("workload.factory=", "ended, before it could be measured")
"""What a failure's reason says where the job could not be made, or has too little to do."""


def _again(session: Session, known: Trial) -> bool:
    asked = session.only_rerun and known.status.has_failed
    return asked or known.status is Status.INTERRUPTED or _is_users_fault(known)


def _is_users_fault(trial: Trial) -> bool:
    """Whether the job cannot be measured at all, which no configuration of it is to blame for."""
    return trial.status.has_failed and any(part in trial.reason for part in _OF_THE_JOB)


def run(session: Session) -> Trial:
    """Run trial 0 unless an earlier run of the same search has it, and tell the strategy.

    A failure is reported with its cause before anything else is tried; the search goes on, since a
    baseline that runs out of memory is a reason to search, and the limit on consecutive failures
    counts it like any other.

    Raises:
        BadInputError: the user's factory makes no job, or the user's script ends too early. Once
            it is mended, the same command begins with the baseline.

    """
    session.view.stage("baseline", "the configuration as it is today")
    known = session.baseline
    if known is not None and not _again(session, known):
        _explain(session, known)
        return known
    baseline = dict(session.runner.baseline)
    trial = session.run(baseline, Purpose.BASELINE, number=0, closely=True)
    session.strategy.tell(trial)
    session.told(trial=trial.number)
    if trial.status is not Status.OK:
        log = f" Full log: {trial.log_path}" if trial.log_path else ""
        if _is_users_fault(trial):
            raise BadInputError(f"{trial.reason}.{log}")
        session.view.warning(f"the baseline failed: {trial.status}, {trial.reason}.{log}")
    _explain(session, trial)
    return trial


def _explain(session: Session, trial: Trial) -> None:
    """Say what holds the job back and what there is to gain, where its steps were looked at."""
    if trial.status is Status.OK and trial.measurement is not None:
        missing = trial.measurement.environment.get("unsupported", {})
        if "step range" in missing:
            session.view.note(missing["step range"])
        why = missing.get("close look")
        if why is not None:
            begin = session.settings.metrics.begin_step
            asked = "" if begin is None else f" at metrics.begin_step={begin}"
            session.view.warning(f"no close look at the baseline{asked}: {why}")
        lines = looks.finding_lines(trial.measurement)
        if lines:
            session.view.note("\n".join(["what holds it back:", *lines]))
            gains.show(session)
