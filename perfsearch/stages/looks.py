"""Close looks at configurations: which trials get one, and what is made of them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

from perfsearch.core.knob import Configuration
from perfsearch.core.space import key_of
from perfsearch.core.trial import Measurement
from perfsearch.metrics.diagnosis import diagnose
from perfsearch.metrics.findings import Thresholds
from perfsearch.metrics.looks import closest_look
from perfsearch.runners.base import Outcome, Plan

if TYPE_CHECKING:
    from perfsearch.config import MetricsSettings
    from perfsearch.stages.confirm import Verdict
    from perfsearch.stages.session import Session


def detailed(plan: Plan, metrics: MetricsSettings, closely: bool) -> Plan:
    """The plan with a close look, where one is due or asked for on every trial."""
    if not closely and metrics.detail == "light":
        return plan
    return replace(
        plan,
        detail="full",
        begin_step=metrics.begin_step,
        end_step=metrics.end_step,
        trace=metrics.trace and closely,
    )


def leave_traces(outcome: Outcome) -> bool:
    """Whether the processes ran under the profiler, whose hooks stay in a GPU's driver."""
    measured = outcome.measurement
    return measured is not None and "device_busy_ms" in measured.bottleneck_evidence


def note_findings(measurement: Measurement, thresholds: Thresholds) -> None:
    """Keep with the measurement what holds it back, for every view of it."""
    if measurement.step_seconds and measurement.phases_ms and not measurement.not_finite():
        found = diagnose(measurement, thresholds)
        measurement.environment["bottleneck"] = found[0].name
        measurement.environment["findings"] = [str(finding) for finding in found]


def finding_lines(measurement: Measurement) -> list[str]:
    """What holds a measured configuration back, a line a finding; empty where nobody looked."""
    return [f"- {finding}" for finding in measurement.environment.get("findings", [])]


def explanations(session: Session, verdict: Verdict) -> list[str]:
    """What holds the baseline back, and what the best where that is another."""
    texts = []
    for label, measured in _looked_at(session, verdict).items():
        lines = finding_lines(measured)
        if lines:
            texts.append("\n".join([f"what holds the {label} back:", *lines]))
    return texts


def bottleneck_tags(session: Session, verdict: Verdict) -> dict[str, str]:
    """The first finding of each, as MLflow tags of the search."""
    return {
        f"perfsearch.bottleneck_{label}": str(measured.environment["bottleneck"])
        for label, measured in _looked_at(session, verdict).items()
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


def _looked_at(session: Session, verdict: Verdict) -> dict[str, Measurement]:
    wanted = _wanted(session, verdict)
    found = {label: closest_look(session.trials, c) for label, c in wanted.items()}
    return {label: measured for label, measured in found.items() if measured is not None}
