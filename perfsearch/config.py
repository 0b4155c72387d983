"""What a search is told: typed settings, and the check of what the user wrote.

The dataclasses are the schema of every top-level key; ``conf/config.yaml`` repeats their
defaults for Hydra, and a test holds the two together. Nothing here imports torch or Hydra.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from perfsearch.config_options import ConfigError, build_options, join, option, show
from perfsearch.search.budget import Budget
from perfsearch.search.knob import Numerics
from perfsearch.search.objective import Metric
from perfsearch.search.suggest import nearest

SCHEMA_VERSION = 1
"""Version of the settings as written to ``config.yaml`` of a run."""


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
        min_gain: smallest relative gain that is worth having, 0.03 for 3%.

    """

    metric: Metric = Metric.THROUGHPUT
    min_gain: float = option(0.03, low=0.0, high=10.0)


@dataclass(frozen=True)
class BudgetSettings:
    """What the search stage may spend; ``None`` is no limit. Confirmation has its own.

    Attributes:
        trials: search trials started.
        seconds: active search time, summed over resumes.
        gpu_hours: the same in device-hours.
        remaining_steps: steps that the training will still run after the search.

    """

    trials: int | None = option(25, low=0)
    seconds: float | None = option(180.0, above=0)
    gpu_hours: float | None = option(None, above=0)
    remaining_steps: int | None = option(None, low=0)

    def budget(self) -> Budget:
        """The same as the search's own type."""
        return Budget(self.trials, self.seconds, self.gpu_hours, self.remaining_steps)


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
        loss_tolerance: largest difference of a first loss, relative to the baseline's, at which
            a trial still counts as the same computation.

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
        begin_step: first scored step whose timings are kept.
        end_step: one past the last scored step whose timings are kept; ``None`` is no end.
        detail: timings of phases, ``light`` while scoring or ``full``.
        trace: keep a Chrome trace of a few steps of baseline and best.

    """

    interval_s: float = option(1.0, low=0.1)
    begin_step: int = option(0, low=0)
    end_step: int | None = option(None, low=1)
    detail: Literal["light", "full"] = "light"
    trace: bool = False

    def __post_init__(self) -> None:
        if self.end_step is not None and self.end_step <= self.begin_step:
            raise ValueError(
                f"end_step={self.end_step} must be above begin_step={self.begin_step}."
            )


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
        if self.launcher == "local" and self.nnodes > 1:
            raise ConfigError(
                "nnodes",
                f"nnodes={self.nnodes}: launcher=local starts ranks on one node. Allowed: 1.",
            )


GROUPS = ("runner", "strategy", "workload")
"""Keys whose value is one option of a group, with keys of its own."""

_DEFINES_A_SEARCH = (
    "mode",
    "runner",
    "strategy",
    "workload",
    "nproc",
    "nnodes",
    "seed",
    "numerics",
    "batch",
    "objective",
)

_INSTANTIATION_KEY = re.compile(r"^_[a-z]+_$")


def validate(plain: Mapping[str, Any]) -> Settings:
    """Check a composed configuration whole, and give it its types.

    Args:
        plain: plain dicts, lists and scalars, interpolations resolved.

    Returns:
        The typed settings. The keys of runner, strategy and workload are left to their own
        options dataclasses.

    Raises:
        ConfigError: one message with the key, its value, what is allowed, the nearest valid key.

    """
    _refuse_instantiation(plain)
    fields = {f.name for f in dataclasses.fields(Settings)}
    for key in plain:
        if key not in fields:
            raise ConfigError(str(key), f"{key}: no such key. {nearest(str(key), fields)}")
    values = dict(plain)
    for group in GROUPS:
        values[group] = _selected(group, values.get(group))
    return build_options(Settings, values, "")


def _selected(group: str, node: Any) -> Selected:
    available = _available(group)
    if node is None or node == {}:
        raise ConfigError(
            group, f"{group}: none is chosen. Set {group}=NAME. {nearest('', available)}"
        )
    if isinstance(node, str):
        raise ConfigError(group, f"{group}={node}: no such option. {nearest(node, available)}")
    if not isinstance(node, Mapping):
        raise ConfigError(group, f"{group}={show(node)}: the name of an option is needed here.")
    name = node.get("name")
    if not isinstance(name, str):
        raise ConfigError(f"{group}.name", f"{group}.name={show(name)}: the option's name is text.")
    if available and name not in available:
        raise ConfigError(
            f"{group}.name", f"{group}.name={name}: no such option. {nearest(name, available)}"
        )
    return Selected(name, {str(k): v for k, v in node.items() if k != "name"})


def _available(group: str) -> list[str]:
    """Names that a group can take, or none where only its own registry can tell."""
    if group == "runner":
        from perfsearch import runners

        return runners.names()
    if group == "strategy":
        from perfsearch import strategies

        return strategies.names()
    return []


def _refuse_instantiation(node: Any, key: str = "") -> None:
    """Refuse ``_target_`` and its kin: nothing is ever built from a name in a configuration."""
    for name, value in _items(node):
        here = join(key, name)
        if isinstance(name, str) and _INSTANTIATION_KEY.match(name):
            raise ConfigError(
                here,
                f"{here}={show(value)}: nothing is built from names in a configuration. "
                "Your own code comes in by workload=custom workload.factory=module:function.",
            )
        _refuse_instantiation(value, here)


def _items(node: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(node, Mapping):
        yield from node.items()
    elif isinstance(node, list | tuple):
        yield from enumerate(node)


def to_plain(settings: Settings) -> dict[str, Any]:
    """Plain values that ``validate`` turns back into the same settings; for ``config.yaml``."""
    plain = _plain(dataclasses.asdict(settings))
    for group in GROUPS:
        chosen = plain[group]
        plain[group] = {"name": chosen["name"], **chosen["options"]}
    assert isinstance(plain, dict)
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def search_hash(settings: Settings) -> str:
    """Eight hex digits of what defines the search: a larger budget continues the same one."""
    plain = to_plain(settings)
    defining = {key: plain[key] for key in _DEFINES_A_SEARCH}
    text = json.dumps(defining, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def default_run_dir(settings: Settings) -> Path:
    """``outputs/RUNNER-STRATEGY-HASH``, relative to the current directory."""
    name = f"{settings.runner.name}-{settings.strategy.name}-{search_hash(settings)}"
    return Path("outputs") / name
