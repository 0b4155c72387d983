"""What a search optimises, and what it may spend."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from perfsearch.core.option import option
from perfsearch.core.steps import Statistic
from perfsearch.core.trial import Measurement


class Metric(StrEnum):
    """What ``objective.metric`` can be."""

    THROUGHPUT = "throughput"
    LATENCY = "latency"
    FLOPS = "flops"


REWARDS_LESS = (
    "objective.metric=latency: with batch=free a step that trains less is a faster one. Set "
    "objective.metric=throughput, or batch=fixed"
)
"""Why steps of different batches are not compared by their time."""


@dataclass(frozen=True)
class Objective:
    """What is optimised, in its own direction for people and as a cost for strategies.

    Attributes:
        metric: samples per second (steps, where samples cannot be counted), milliseconds a step, or
            floating-point operations per second.
        statistic: what of a window's steps is scored: their rate, slow steps included, or the
            median step.
        min_gain: relative gain below which no search is started: the baseline's timings bound what
            its knobs can give; 0 searches always.

    """

    metric: Metric = Metric.THROUGHPUT
    statistic: Statistic = Statistic.RATE
    min_gain: float = option(0.03, low=0)

    def unit(self, measured: Measurement | None) -> str:
        """Unit of ``value``.

        Args:
            measured: a trial of the search, all of which count alike; ``None``: there is none yet.

        """
        if self.metric is not Metric.THROUGHPUT:
            return {Metric.LATENCY: "ms/step", Metric.FLOPS: "FLOP/s"}[self.metric]
        counted = measured is None or measured.samples_per_step is not None
        return "samples/s" if counted else "steps/s"

    @property
    def maximise(self) -> bool:
        """Whether a larger ``value`` is better."""
        return self.metric is not Metric.LATENCY

    def value(self, measurement: Measurement) -> float:
        """The objective of ``measurement`` in its ``unit``.

        Raises:
            ValueError: the measurement lacks what the metric needs, or is not a finite number.

        """
        if self.metric is Metric.LATENCY:
            value = measurement.step_time_s * 1e3
        elif self.metric is Metric.FLOPS:
            if measurement.flops_per_step is None:
                raise ValueError("objective.metric=flops: this workload does not count operations")
            value = measurement.flops_per_step / measurement.step_time_s
        elif measurement.samples_per_s is not None:
            value = measurement.samples_per_s
        else:
            value = measurement.steps_per_s
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
    """Standard error of the log of the step time, from the spread of the scored steps.

    That of a median uses the asymptotic 1.2533 ratio between the errors of a median and of a mean.
    """
    steps = measurement.step_seconds
    if measurement.statistic != Statistic.MEDIAN:
        return measurement.reading.log_error if len(steps) >= 3 else None
    if len(steps) < 3:
        return None
    logs = [math.log(s) for s in steps if s > 0]
    return 1.2533 * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) >= 3 else None


@dataclass(frozen=True)
class Budget:
    """Limits of the search stage; ``None`` is no limit. Confirmation has its own.

    Attributes:
        trials: search trials started (baseline, sentinels, confirmation, retries and screened
            configurations do not count).
        seconds: active search time, summed over resumes.
        gpu_hours: the same in GPU hours.
        remaining_steps: how many steps the training will still run after the search.
        patience: search trials in a row without a new best after which it ends.

    """

    trials: int | None = option(25, low=0)
    seconds: float | None = option(180.0, above=0)
    gpu_hours: float | None = option(None, above=0)
    remaining_steps: int | None = option(None, low=0)
    patience: int | None = option(None, low=1)

    def seconds_left(self, seconds: float, devices: int) -> float | None:
        """Search time that is left after ``seconds``; ``None`` without a limit."""
        limits = [] if self.seconds is None else [self.seconds]
        if self.gpu_hours is not None:
            limits.append(self.gpu_hours * 3600 / devices)
        return max(0.0, min(limits) - seconds) if limits else None

    def spent(self, trials: int, seconds: float, devices: int) -> str | None:
        """Why nothing more may be started, or ``None``."""
        if self.trials is not None and trials >= self.trials:
            return f"budget.trials={self.trials} spent"
        if self.seconds is not None and seconds >= self.seconds:
            return f"budget.seconds={self.seconds:g} spent"
        if self.gpu_hours is not None and seconds * devices / 3600 >= self.gpu_hours:
            return f"budget.gpu_hours={self.gpu_hours:g} spent"
        return None


@dataclass(frozen=True)
class Limits:
    """Bounds on everything that may hang or fail.

    Attributes:
        startup_s: seconds for processes to start and join, importing torch and building the model
            included.
        trial_s: seconds for a trial, start-up apart.
        grace_s: seconds between asking a process to end and killing it.
        consecutive_failures: failed trials in a row that stop the search.
        loss_tolerance: largest difference of a first loss, relative to the baseline's, at which a
            trial still counts as the same computation. Where that loss is below 1 it is absolute,
            but at most 5% of the largest of them; what the loss's type can tell (0.8% in
            bfloat16) is allowed in any case.
        lock_directory: where searches lock the devices that they use, one directory for all users
            of the host; ``null`` is the variable PERFSEARCH_LOCK_DIRECTORY, or
            /tmp/perfsearch-locks.

    """

    startup_s: float = option(180.0, above=0)
    trial_s: float = option(300.0, above=0)
    grace_s: float = option(10.0, low=0)
    consecutive_failures: int = option(8, low=1)
    loss_tolerance: float = option(1e-3, above=0)
    lock_directory: Path | None = None
