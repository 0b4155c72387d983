"""Rules that never contradict one another, or their own numbers, whatever was measured."""

from __future__ import annotations

import random
import re

import pytest

from perfsearch.core.trial import Measurement
from perfsearch.metrics.diagnosis import Finding, Severity, diagnose
from perfsearch.metrics.thresholds import Thresholds

STEP_MS = 100.0
LIMITS = Thresholds()
PHASES = (
    *("dataloader_next", "to_device", "forward", "backward", "comm_exposed", "rank_wait"),
    *("optimizer", "other"),
)

FIRES = {
    "input_bound": (LIMITS.input_moderate, LIMITS.input_high),
    "host_to_device_copy": (LIMITS.to_device, None),
    "straggler": (LIMITS.straggler_excess, LIMITS.comm_high),
    "rank_imbalance": (LIMITS.comm_moderate, None),
    "communication_bound": (LIMITS.comm_moderate, LIMITS.comm_high),
    "other_work": (LIMITS.other, 2 * LIMITS.other),
    "sync_points": (LIMITS.sync_wait, None),
    "launch_bound": (1 - LIMITS.device_busy, 2 * (1 - LIMITS.device_busy)),
    "optimizer_bound": (LIMITS.optimizer, None),
}
"""From which share of the step on a finding is moderate, and high."""


def consistent(draw: random.Random) -> Measurement:
    """A step of 100 ms: its phases sum to it at most, and a device idles while it waits."""
    often, loud = draw.choice((0.2, 0.7)), draw.choice((0.02, 1.0))
    present = [name for name in PHASES if draw.random() < often]
    weights = {name: draw.random() ** draw.choice((1, 4)) for name in present}
    for name in weights.keys() - {"forward", "backward", "comm_exposed"}:
        weights[name] *= loud
    rest = draw.choice((0.0, 0.0, loud * draw.random()))
    total = sum(weights.values()) + rest or 1.0
    phases = {name: STEP_MS * weight / total for name, weight in weights.items()}
    evidence: dict[str, float] = {}
    if draw.random() < 0.6:
        waits_ms = phases.get("dataloader_next", 0.0)
        busy_ms = (STEP_MS - waits_ms) * (1 - draw.choice((0.0, 1.0)) * draw.random())
        evidence["device_busy_ms"] = busy_ms
        evidence["device_exposed_ms"] = min(busy_ms, phases.get("comm_exposed", 0.0))
        evidence["sync_wait_ms"] = draw.choice((0.0, STEP_MS * draw.random()))
    if draw.random() < 0.5:
        evidence["detailed_step_ms"] = evidence["with_everything_ms"] = STEP_MS
        evidence["comm_least_ms"] = phases.get("comm_exposed", 0.0)
        evidence["without_communication_ms"] = STEP_MS * draw.choice((1.0, draw.random()))
    for name in present:
        evidence[f"straggler_{name}_excess_ms"] = phases[name] * draw.choice((0.0, draw.random()))
        evidence[f"straggler_{name}_rank"] = float(draw.randrange(2))
        if draw.random() < 0.7:
            evidence[f"{name}_error_ms"] = draw.random()
    system = {"gpu_utilization_percentage": draw.choice((50.0, 95.0, 100.0))}
    return Measurement(
        [STEP_MS / 1e3] * 3,
        32,
        world_size=2,
        phases_ms=phases,
        bottleneck_evidence=evidence,
        system=system if draw.random() < 0.5 else {},
    )


def check_severity(finding: Finding) -> None:
    moderate, high = FIRES[finding.name]
    assert finding.share is not None
    assert finding.share >= moderate
    is_high = high is not None and finding.share >= high
    assert finding.severity is (Severity.HIGH if is_high else Severity.MODERATE)


def check_said(finding: Finding) -> None:
    """The share that a finding is judged by stands in its words."""
    assert finding.share is not None
    percentages = [int(found) for found in re.findall(r"(\d+)%", finding.evidence)]
    assert any(abs(100 * finding.share - said) <= 0.51 for said in percentages)


@pytest.mark.parametrize("seed", range(8))
def test_no_finding_contradicts_its_threshold_or_another(seed):
    draw = random.Random(seed)
    for _ in range(300):
        measured = consistent(draw)
        found = diagnose(measured, LIMITS)
        names = {finding.name for finding in found}
        if any(finding.severity is Severity.INFO for finding in found):
            assert len(found) == 1, found
        costs = [f for f in found if f.severity is not Severity.INFO]
        for finding in costs:
            check_severity(finding)
            check_said(finding)
        assert not {"straggler", "rank_imbalance"} <= names
        busy_ms = measured.bottleneck_evidence.get("device_busy_ms")
        if busy_ms is not None:
            # what the device idles is shared out, never counted twice
            idle = 1 - busy_ms / STEP_MS
            waits = ("input_bound", "sync_points", "launch_bound")
            assert sum(f.share or 0.0 for f in costs if f.name in waits) <= idle + 1e-9
        if "compute_bound" in names and busy_ms is not None:
            exposed_ms = measured.bottleneck_evidence["device_exposed_ms"]
            assert busy_ms - exposed_ms >= LIMITS.compute * STEP_MS - 1e-9
        if "balanced" in names:
            phases = measured.phases_ms
            assert max(phases.values(), default=0.0) <= STEP_MS / 2
            assert phases.get("forward", 0.0) + phases.get("backward", 0.0) <= STEP_MS / 2
        if "straggler" in names:
            assert any(f"{name}_error_ms" in measured.bottleneck_evidence for name in PHASES)


def test_every_finding_is_among_those_that_were_drawn():
    draw = random.Random(8)
    drawn = {f.name for _ in range(2000) for f in diagnose(consistent(draw), LIMITS)}
    assert drawn >= {*FIRES, "compute_bound", "mostly_computing", "mostly_one_phase", "balanced"}
