"""Which measurement of a configuration tells the most of it."""

from __future__ import annotations

from collections.abc import Sequence

from perfsearch.search.knob import Configuration
from perfsearch.search.space import key_of
from perfsearch.search.trial import Measurement, Purpose, Status, Trial


def closest_look(trials: Sequence[Trial], configuration: Configuration) -> Measurement | None:
    """The measurement of a configuration's trials whose steps were looked at closely.

    Without such a one the first that ended well. A sentinel is none: it is there to see drift.
    """
    key = key_of(configuration)
    found = [
        t.measurement
        for t in trials
        if t.measurement is not None
        and t.measurement.step_seconds
        and t.status is Status.OK
        and t.purpose is not Purpose.SENTINEL
        and key_of(t.configuration) == key
    ]
    detailed = [m for m in found if "detailed_step_ms" in m.bottleneck_evidence]
    return next(iter(detailed or found), None)
