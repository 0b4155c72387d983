"""Stage 2: measure the configuration that the user has today, as trial 0."""

from __future__ import annotations

from perfsearch.metrics.diagnosis import diagnose, report
from perfsearch.search.trial import Purpose, Status, Trial
from perfsearch.stages.session import Session


def _again(session: Session, known: Trial) -> bool:
    asked = session.only_rerun and known.status.has_failed
    return asked or known.status is Status.INTERRUPTED


def run(session: Session) -> Trial:
    """Run trial 0 unless an earlier run of the same search has it, and tell the strategy.

    A failure is reported with its cause before anything else is tried; the search goes on, since a
    baseline that runs out of memory is a reason to search, and the limit on consecutive failures
    counts it like any other.
    """
    session.view.stage("baseline", "the configuration as it is today")
    known = session.baseline
    if known is not None and not _again(session, known):
        return known
    trial = session.run(dict(session.runner.baseline), Purpose.BASELINE, number=0)
    session.strategy.tell(trial)
    session.told(trial=trial.number)
    if trial.status is not Status.OK:
        log = f" Full log: {trial.log_path}" if trial.log_path else ""
        session.view.warning(f"the baseline failed: {trial.status}, {trial.reason}.{log}")
    elif trial.measurement is not None and trial.measurement.phases_ms:
        session.view.note("what holds it back:\n" + report(diagnose(trial.measurement)))
    return trial
