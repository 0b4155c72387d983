"""The objective in its unit."""

import pytest

from perfsearch.core.objective import Metric, Objective
from perfsearch.core.trial import Measurement


@pytest.mark.parametrize(
    ("samples", "metric", "unit", "value"),
    [
        (16, "throughput", "samples/s", 32.0),
        (None, "throughput", "steps/s", 2.0),
        (None, "latency", "ms/step", 500.0),
    ],
)
def test_steps_are_counted_where_samples_cannot_be(samples, metric, unit, value):
    objective = Objective(Metric(metric))
    found = Measurement([0.5, 0.5, 0.5], samples)
    assert (objective.unit(found), objective.value(found)) == (unit, pytest.approx(value))
