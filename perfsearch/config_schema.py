"""The schema of every top-level key: types, ranges, defaults and meaning.

``conf/config.yaml`` repeats the defaults for Hydra, and a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from perfsearch.config_options import ConfigError, option
from perfsearch.config_thresholds import ThresholdSettings
from perfsearch.core.knob import Numerics
from perfsearch.core.objective import Budget, Metric


@dataclass(frozen=True)
class Selected:
    """The chosen option of a group: its name, and its own keys as the user wrote them.

    Attributes:
        name: which option of the group.
        options: every other key of the group; checked against the option's own dataclass by
            whoever builds it (see ``build_options``).

    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ObjectiveSettings:
    """What is optimised.

    Attributes:
        metric: samples per second, milliseconds a step, or floating-point operations per second.
        min_gain: relative gain below which no search is started: the baseline's timings bound what
            its knobs can give; 0 searches always.

    """

    metric: Metric = Metric.THROUGHPUT
    min_gain: float = option(0.03, low=0)


@dataclass(frozen=True)
class BudgetSettings:
    """What the search stage may spend; ``None`` is no limit. Confirmation has its own.

    Attributes:
        trials: search trials started.
        seconds: active search time, summed over resumes.
        gpu_hours: the same in device-hours.
        remaining_steps: steps that the training will still run after the search.
        patience: search trials in a row without a new best after which the search ends.

    """

    trials: int | None = option(25, low=0)
    seconds: float | None = option(180.0, above=0)
    gpu_hours: float | None = option(None, above=0)
    remaining_steps: int | None = option(None, low=0)
    patience: int | None = option(None, low=1)

    def budget(self) -> Budget:
        """The same as the search's own type."""
        return Budget(
            self.trials, self.seconds, self.gpu_hours, self.remaining_steps, self.patience
        )


@dataclass(frozen=True)
class ConfirmSettings:
    """The confirm stage: finalists and baseline, interleaved, in fresh processes.

    Attributes:
        finalists: how many of the best are measured again; 0 skips the stage.
        max_repeats: most measurements of each; 0 skips the stage.
        seconds: time for the whole stage.
        precision: relative half-width of the interval at which repeating ends.

    """

    finalists: int = option(2, low=0)
    max_repeats: int = option(6, low=0)
    seconds: float | None = option(180.0, above=0)
    precision: float = option(0.01, above=0)


@dataclass(frozen=True)
class LimitSettings:
    """Bounds on everything that may hang or fail.

    Attributes:
        startup_s: seconds for processes to start and join.
        trial_s: seconds for a trial, start-up apart.
        grace_s: seconds between asking a process to end and killing it.
        consecutive_failures: failed trials in a row that stop the search.
        loss_tolerance: largest difference of a first loss, relative to the baseline's, at which a
            trial still counts as the same computation. Where that loss is below 1 it is absolute,
            but at most 5% of the largest of them; what the loss's type can tell (0.8% in
            bfloat16) is allowed in any case.

    """

    startup_s: float = option(180.0, above=0)
    trial_s: float = option(300.0, above=0)
    grace_s: float = option(10.0, low=0)
    consecutive_failures: int = option(8, low=1)
    loss_tolerance: float = option(1e-3, above=0)


@dataclass(frozen=True)
class TrackingSettings:
    """Where MLflow keeps the search.

    Attributes:
        uri: tracking URI; ``None`` takes ``MLFLOW_TRACKING_URI``, else sqlite in the current
            directory.
        experiment: name of the MLflow experiment.
        enabled: whether MLflow is used at all.

    """

    uri: str | None = None
    experiment: str = "perfsearch"
    enabled: bool = True

    def __post_init__(self) -> None:
        if not self.experiment:
            raise ValueError("experiment is empty; give the MLflow experiment a name.")


@dataclass(frozen=True)
class MetricsSettings:
    """What is measured beside the step times.

    Attributes:
        interval_s: seconds between two readings of the system metrics.
        detail: ``light`` looks closely at the steps of the baseline and the finalists, after those
            that are scored; ``full`` at those of every trial.
        begin_step: first step of the close look, counted from 1 at a trial's start; ``null`` is the
            first after the scored ones, which is also the earliest.
        end_step: last step of the close look; ``null`` is ten steps or fewer. A range that begins
            earlier than it can is moved, and stays as long.
        trace: keep a Chrome trace of a few steps of the baseline and the best.
        thresholds: when the rules of the diagnosis fire.

    """

    interval_s: float = option(1.0, low=0.1)
    detail: Literal["light", "full"] = "light"
    begin_step: int | None = option(None, low=1)
    end_step: int | None = option(None, low=1)
    trace: bool = False
    thresholds: ThresholdSettings = field(default_factory=ThresholdSettings)

    def __post_init__(self) -> None:
        begin, end = self.begin_step, self.end_step
        if begin is not None and end is not None and end < begin:
            raise ValueError(f"end_step={end}: before begin_step={begin}. Give a later step.")


@dataclass(frozen=True)
class Settings:
    """Everything that a search is told, checked.

    Attributes:
        mode: what to do; a runner may lack all but ``search``.
        runner: what is tuned and how it is measured.
        strategy: what is tried next.
        workload: what is trained.
        nproc: processes on this node, one a device; ``auto`` takes every visible GPU, or two
            CPU processes.
        nnodes: number of nodes.
        seed: of every random draw.
        numerics: the most that a searched knob may do to the computation.
        batch: whether every configuration trains the same global batch as the baseline.
        objective: what is optimised.
        budget: limits of the search stage.
        confirm: limits of the confirm stage.
        limits: time and failure limits.
        on_failure: whether a failed trial ends the search.
        launcher: where ranks start.
        run_dir: where the run's files go; ``None`` is ``outputs/RUNNER-STRATEGY-HASH``.
        resume: continue an unfinished search, never do, or run its failed trials again.
        resume_force: parts of the identity that may differ from the resumed search's.
        tracking: MLflow.
        metrics: system metrics and timings.
        sentinel_every: search trials between two measurements of the baseline; 0 for none.

    """

    runner: Selected
    strategy: Selected
    workload: Selected
    mode: Literal["search", "estimate", "simulate", "profile"] = "search"
    nproc: int | Literal["auto"] = option("auto", low=1)
    nnodes: int = option(1, low=1)
    seed: int = option(0, low=0, high=2**32 - 1)
    numerics: Numerics = Numerics.REORDERED
    batch: Literal["fixed", "free"] = "fixed"
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    budget: BudgetSettings = field(default_factory=BudgetSettings)
    confirm: ConfirmSettings = field(default_factory=ConfirmSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    on_failure: Literal["continue", "stop"] = "continue"
    launcher: Literal["local"] = "local"
    run_dir: Path | None = None
    resume: Literal["auto", "never", "failed"] = "auto"
    resume_force: tuple[str, ...] = ()
    tracking: TrackingSettings = field(default_factory=TrackingSettings)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    sentinel_every: int = option(10, low=0)

    def __post_init__(self) -> None:
        if self.run_dir is not None and str(self.run_dir) in ("", "."):
            raise ConfigError(
                "run_dir",
                f"run_dir={self.run_dir}: the run needs a directory of its own. "
                "Name one, or leave the key out for outputs/RUNNER-STRATEGY-HASH.",
            )
        if self.launcher == "local" and self.nnodes > 1:
            raise ConfigError(
                "nnodes",
                f"nnodes={self.nnodes}: launcher=local starts ranks on one node. Allowed: 1.",
            )
