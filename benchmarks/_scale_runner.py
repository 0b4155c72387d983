"""A runner that measures nothing, and says as much of each trial as one of real ranks does."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from perfsearch.core.hardware import Environment
from perfsearch.core.knob import Configuration, Kind, Knob
from perfsearch.core.space import Space
from perfsearch.core.trial import Measurement, Outcome, Status
from perfsearch.runners.base import Plan, Runner

STEPS = 60
_PHASES = ("loading", "copy", "forward", "backward", "comm_exposed", "optimizer", "rest", "wait")


class Many(Runner):
    """A space of 60,000 configurations.

    Args:
        full: whether a trial has the phases, readings and evidence that trials of ``runner=ddp``
            have (6 KB in the journal), or what those of ``runner=replay`` have.
        pace_s: seconds that a trial lasts.

    """

    def __init__(self, full: bool, pace_s: float = 0.0) -> None:
        super().__init__(self.Options(), Environment(Path()))
        self.full, self.pace_s = full, pace_s
        knobs = [Knob(f"knob_{i}", Kind.ORDINAL, 1, tuple(range(1, 10))) for i in range(5)]
        self.space = Space(knobs)
        self.baseline = {knob.name: 1 for knob in knobs}

    def measure(self, configuration: Configuration, plan: Plan) -> Outcome:
        """Make up a window of steps."""
        time.sleep(self.pace_s)
        generator = np.random.default_rng([plan.number, plan.attempt])
        away = sum(abs(int(v or 0) - 7) for v in configuration.values())
        steps = 0.02 * np.exp(0.01 * away + generator.normal(0, 0.01, STEPS))
        told = said(generator, dict(configuration)) if self.full else {}
        measured = Measurement(steps.tolist(), 32, first_losses=[3.0, 2.5, 2.25], **told)
        return Outcome(Status.OK, measured)

    def export(self, configuration: Configuration, directory: Path) -> list[Path]:
        """Write nothing."""
        return []


def said(generator: np.random.Generator, configuration: dict[str, Any]) -> dict[str, Any]:
    """What ranks of ``runner=ddp`` say beside their steps; numbers differ from trial to trial."""

    def numbers(names: Any) -> dict[str, float]:
        return {name: float(generator.random()) for name in names}

    findings = [
        f"{part} (moderate): it takes {generator.random():.2f} ms of a {generator.random():.2f} ms "
        "step. Use another implementation, or give the job processors of its own."
        for part in _PHASES[:3]
    ]
    return {
        "phases_ms": numbers(_PHASES),
        "in_force": {**configuration, **{f"more_{i}": False for i in range(12)}},
        "system": numbers(f"node_0/disk_{i}_usage_megabytes" for i in range(28)),
        "bottleneck_evidence": numbers(f"straggler_{i}_excess_ms" for i in range(12)),
        "environment": {
            "precision": "float32",
            "bottleneck": "input_bound",
            "findings": findings,
            "ranks": [
                {"host": "node-0", "device": f"cuda:{i}", "step_ms": float(generator.random())}
                for i in range(2)
            ],
        },
    }
