"""Which measurement of a configuration tells the most of it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from perfsearch.core.knob import Configuration
from perfsearch.core.space import key_of
from perfsearch.core.trial import Measurement, Purpose, Status, Trial


def closest_look(trials: Sequence[Trial], configuration: Configuration) -> Measurement | None:
    """The measurement of a configuration's trials whose steps were looked at closely.

    Of several the one whose scored steps are nearest the median of the trials that confirmed the
    configuration, as the verdict rests on these; else the first. Without a close look the same of
    all that ended well. A sentinel is none: it is there to see drift.
    """
    key = key_of(configuration)
    found = [
        (trial.purpose, trial.measurement)
        for trial in trials
        if trial.measurement is not None
        and trial.measurement.step_seconds
        and trial.status is Status.OK
        and trial.purpose is not Purpose.SENTINEL
        and key_of(trial.configuration) == key
    ]
    detailed = [m for _, m in found if "detailed_step_ms" in m.bottleneck_evidence]
    candidates = detailed or [m for _, m in found]
    confirmed_s = [m.step_time_s for purpose, m in found if purpose is Purpose.CONFIRM]
    if not candidates or not confirmed_s:
        return next(iter(candidates), None)
    middle_s = statistics.median(confirmed_s)
    return min(candidates, key=lambda m: abs(m.step_time_s - middle_s))
