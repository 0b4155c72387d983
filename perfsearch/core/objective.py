"""From a measurement to the number that is optimised."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from enum import StrEnum

from perfsearch.core.trial import Measurement


class Metric(StrEnum):
    """What ``objective.metric`` can be."""

    THROUGHPUT = "throughput"
    LATENCY = "latency"
    FLOPS = "flops"


@dataclass(frozen=True)
class Objective:
    """The optimised metric, in its own direction for people and as a cost for strategies."""

    metric: Metric = Metric.THROUGHPUT

    @property
    def unit(self) -> str:
        """Unit of ``value``."""
        return {"throughput": "samples/s", "latency": "ms/step", "flops": "FLOP/s"}[self.metric]

    @property
    def maximise(self) -> bool:
        """Whether a larger ``value`` is better."""
        return self.metric is not Metric.LATENCY

    def value(self, measurement: Measurement) -> float:
        """The objective of ``measurement`` in ``unit``.

        Raises:
            ValueError: the measurement lacks what the metric needs, or is not a finite number.

        """
        if self.metric is Metric.LATENCY:
            value = measurement.step_time_s * 1e3
        elif self.metric is Metric.FLOPS:
            if measurement.flops_per_step is None:
                raise ValueError("objective.metric=flops: this workload does not count operations")
            value = measurement.flops_per_step / measurement.step_time_s
        else:
            value = measurement.samples_per_s
        if not math.isfinite(value) or value <= 0:
            raise ValueError(f"the objective is {value}, not a positive number")
        return value

    def cost(self, measurement: Measurement) -> float:
        """Positive number to minimise: the inverse of a maximised value, or the value itself."""
        value = self.value(measurement)
        return 1.0 / value if self.maximise else value

    def from_cost(self, cost: float) -> float:
        """The objective that ``cost`` stands for."""
        return 1.0 / cost if self.maximise else cost


def log_cost_error(measurement: Measurement) -> float | None:
    """Standard error of the log of the median step time, from the spread of the scored steps.

    Uses the asymptotic 1.2533 ratio between the errors of a median and of a mean.
    """
    steps = measurement.step_seconds
    if len(steps) < 3:
        return None
    logs = [math.log(s) for s in steps if s > 0]
    return 1.2533 * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) >= 3 else None
