"""What is made of the profiles of trials."""

from __future__ import annotations

import shutil

from perfsearch.core.knob import Configuration
from perfsearch.core.space import key_of
from perfsearch.core.trial import Measurement
from perfsearch.metrics.bounds import profiled_measurement
from perfsearch.pipeline.session import Session, Verdict


def finding_lines(measurement: Measurement) -> list[str]:
    """What holds a measured configuration back, a line a finding; empty without a profile."""
    return [f"- {finding}" for finding in measurement.environment.get("findings", [])]


def explanations(session: Session, verdict: Verdict) -> list[str]:
    """What holds the baseline back, and what the best where that is another."""
    texts = []
    for label, measured in _profiled(session, verdict).items():
        lines = finding_lines(measured)
        if lines:
            texts.append("\n".join([f"what holds the {label} back:", *lines]))
    return texts


def bottleneck_tags(session: Session, verdict: Verdict) -> dict[str, str]:
    """The first finding of each, as MLflow tags of the search."""
    return {
        f"perfsearch.bottleneck_{label}": str(measured.environment["bottleneck"])
        for label, measured in _profiled(session, verdict).items()
        if "bottleneck" in measured.environment
    }


def keep_traces(session: Session, verdict: Verdict) -> list[str]:
    """Copy the Chrome traces of the baseline and the best to ``trace/``; return their paths."""
    kept = []
    for label, configuration in _wanted(session, verdict).items():
        for trial in session.trials:
            logs = session.run_dir / "logs" / f"{trial.number:04d}"
            traces = sorted(logs.glob("rank*.trace.json.gz"))
            if traces and key_of(trial.configuration) == key_of(configuration):
                target = session.run_dir / "trace" / label
                target.mkdir(parents=True, exist_ok=True)
                kept += [str(shutil.copy(trace, target)) for trace in traces]
                break
    return kept


def _wanted(session: Session, verdict: Verdict) -> dict[str, Configuration]:
    wanted: dict[str, Configuration] = {"baseline": session.runner.baseline}
    if verdict.winner is not None:
        wanted["best"] = session.numbered(verdict.winner).configuration
    return wanted


def _profiled(session: Session, verdict: Verdict) -> dict[str, Measurement]:
    wanted = _wanted(session, verdict)
    found = {label: profiled_measurement(session.trials, c) for label, c in wanted.items()}
    return {label: measured for label, measured in found.items() if measured is not None}
