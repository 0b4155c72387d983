"""Every top-level key: types, ranges, defaults and meaning; their check, and how they are written.

A setting is declared here alone (or where it is used, as ``perfsearch.core.objective``): Hydra's
``conf/config.yaml``, ``docs/keys.md``, the help and the messages are made of it. Nothing here
imports torch or Hydra.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from perfsearch.config.options import ConfigError, build_options, join, plain_value, show
from perfsearch.core import registry
from perfsearch.core.errors import nearest
from perfsearch.core.knob import Numerics
from perfsearch.core.objective import Budget, Limits, Objective
from perfsearch.core.option import option
from perfsearch.core.secrets import Redactor
from perfsearch.metrics.thresholds import Thresholds

SCHEMA_VERSION = 1
"""Version of the settings as written to ``config.yaml`` of a run, under ``schema_version``."""

GROUPS = ("runner", "strategy", "workload", "launcher")
"""Keys whose value is one option of a group, with keys of its own."""

CONFIG_MODULE = "perfsearch.conf"
"""The package of our option files, which stand in ``conf/``."""

_REGISTRIES = {
    "runner": "perfsearch.runners",
    "strategy": "perfsearch.strategies",
    "launcher": "perfsearch.workers.launchers",
}
"""Packages that hold the options of a group, a module each."""

_WITH_DEFAULT = frozenset({"launcher"})
"""Groups that settings without Hydra's files may leave out."""

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
class ConfirmSettings:
    """The confirm stage: finalists and baseline, interleaved, in fresh processes.

    Attributes:
        finalists: how many of the best are measured again; 0 skips the stage.
        max_repeats: most measurements of each; 0 skips the stage.
        seconds: time for the whole stage.
        sharpness: half-width of the interval, as a share of the gain, at which a gain that is shown
            ends it: 1 as soon as one is shown, 0.5 once half of it is sure.

    """

    finalists: int = option(1, low=0)
    max_repeats: int = option(8, low=0)
    seconds: float | None = option(180.0, above=0)
    sharpness: float = option(1.0, above=0, high=1)


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
        detail: ``light`` profiles steps of the baseline and the finalists, after those that are
            scored; ``full`` those of every trial.
        begin_step: first step of the profile, counted from 1 at a trial's start; ``null`` is the
            first after the scored ones, which is also the earliest.
        end_step: last step of the profile; ``null`` is ten steps or fewer. A range that begins
            earlier than it can is moved, and stays as long.
        trace: keep a Chrome trace of a few steps of the baseline and the best.
        thresholds: when the rules of the diagnosis fire.

    """

    interval_s: float = option(1.0, low=0.1)
    detail: Literal["light", "full"] = "light"
    begin_step: int | None = option(None, low=1)
    end_step: int | None = option(None, low=1)
    trace: bool = False
    thresholds: Thresholds = field(default_factory=Thresholds)

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
            CPU processes; a script gets one process where it is not meant for several.
        nnodes: number of nodes.
        seed: of every random draw.
        numerics: the most that a searched knob may do to the computation.
        batch: whether every configuration trains the same global batch as the baseline.
        objective: what is optimised.
        budget: limits of the search stage.
        confirm: limits of the confirm stage.
        limits: time and failure limits.
        on_failure: whether a failed trial ends the search; a failed baseline does in any case,
            unless it ran out of memory.
        launcher: where ranks start.
        run_dir: where the run's files go; ``None`` is ``outputs/RUNNER-STRATEGY-HASH``.
        resume: continue an unfinished search, never do, run the failed trials of a finished one
            again, or extend a finished one by what larger limits allow.
        resume_force: parts of the identity that may differ from the resumed search's.
        tracking: MLflow.
        metrics: system metrics and timings.
        sentinel_every: search trials between two measurements of the baseline; 0 for none.
        parallel_trials: trials of the search stage at a time, each on devices of its own; baseline
            and confirmation run alone on the devices of one.

    """

    runner: Selected
    strategy: Selected
    workload: Selected
    mode: Literal["search", "estimate", "measure", "simulate", "profile"] = "search"
    nproc: int | Literal["auto"] = option("auto", low=1)
    nnodes: int = option(1, low=1)
    seed: int = option(0, low=0, high=2**32 - 1)
    numerics: Numerics = Numerics.REORDERED
    batch: Literal["fixed", "free"] = "fixed"
    objective: Objective = field(default_factory=Objective)
    budget: Budget = field(default_factory=Budget)
    confirm: ConfirmSettings = field(default_factory=ConfirmSettings)
    limits: Limits = field(default_factory=Limits)
    on_failure: Literal["continue", "stop"] = "continue"
    launcher: Selected = field(default_factory=lambda: Selected("local"))
    run_dir: Path | None = None
    resume: Literal["auto", "never", "failed", "extend"] = "auto"
    resume_force: tuple[str, ...] = ()
    tracking: TrackingSettings = field(default_factory=TrackingSettings)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    sentinel_every: int = option(10, low=0)
    parallel_trials: int = option(1, low=1)

    def __post_init__(self) -> None:
        if self.run_dir is not None and str(self.run_dir) in ("", "."):
            raise ConfigError(
                "run_dir",
                f"run_dir={self.run_dir}: the run needs a directory of its own. "
                "Name one, or leave the key out for outputs/RUNNER-STRATEGY-HASH.",
            )
        if self.launcher.name == "local" and self.nnodes > 1:
            raise ConfigError(
                "nnodes",
                f"nnodes={self.nnodes}: launcher=local starts ranks on one node. Allowed: 1. For "
                "several: launcher=torchrun launcher.endpoint=HOST:PORT, launcher=slurm or "
                "launcher=ray.",
            )
        if self.parallel_trials > 1 and self.nnodes > 1:
            raise ConfigError(
                "parallel_trials",
                f"parallel_trials={self.parallel_trials}: with nnodes={self.nnodes} a trial has "
                "every device. Allowed: 1.",
            )


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
    version = plain.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise ConfigError(
            "schema_version",
            f"schema_version={show(version)}: this perfsearch reads {SCHEMA_VERSION}. "
            "Use the version that wrote the file.",
        )
    for key in plain:
        if key not in fields and key != "schema_version":
            raise ConfigError(str(key), f"{key}: no such key. {nearest(str(key), fields)}")
    values = {k: v for k, v in plain.items() if k != "schema_version"}
    for group in GROUPS:
        if group in values or group not in _WITH_DEFAULT:
            values[group] = _selected(group, values.get(group))
    return build_options(Settings, values, "")


def _selected(group: str, node: Any) -> Selected:
    """A group's option; of keys below an option's name those of this one are its own."""
    known = available(group)
    if node is None or node == {}:
        raise ConfigError(group, f"{group}: none is chosen. Set {group}=NAME. {nearest('', known)}")
    if isinstance(node, str):
        raise ConfigError(group, f"{group}={node}: no such option. {nearest(node, known)}")
    if not isinstance(node, Mapping):
        raise ConfigError(group, f"{group}={show(node)}: the name of an option is needed here.")
    name = node.get("name")
    if not isinstance(name, str):
        raise ConfigError(f"{group}.name", f"{group}.name={show(name)}: the option's name is text.")
    if known and name not in known:
        why = f"no such option. {nearest(name, known)}"
        if (resources.files(CONFIG_MODULE) / group / f"{name}.yaml").is_file():
            code, option_file = _files(group, name)
            why = f"{option_file} is there, and {code} is missing. An option is both files."
        raise ConfigError(f"{group}.name", f"{group}.name={name}: {why}")
    of_one = {k for k, v in node.items() if k in known and isinstance(v, Mapping)}
    options = {str(k): v for k, v in node.items() if k != "name" and k not in of_one}
    return Selected(name, options | dict(node[name] if name in of_one else {}))


def available(group: str) -> list[str]:
    """Names that a group can take, or none where only its own registry can tell."""
    package = _REGISTRIES.get(group)
    return [] if package is None else registry.names(package)


def no_option_file(group: str, name: str) -> str:
    """What to say of an option whose code is there and whose file is not; empty of any other.

    Args:
        group: of the option.
        name: one that no file of the group has.

    """
    if name not in available(group):
        return ""
    code, option_file = _files(group, name)
    return (
        f"{group}={name}: {code} is there, and {option_file} is missing. Write it, with "
        f"'name: {name}' and each option's default."
    )


def _files(group: str, name: str) -> tuple[str, str]:
    """Where the code of an option and its file belong, from the top of the source tree."""
    code = f"{_REGISTRIES[group].replace('.', '/')}/{name}.py"
    return code, f"conf/{group}/{name}.yaml"


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
    """Plain values that ``validate`` turns back into the same settings; for ``config.yaml``.

    Secrets are masked, since such files are handed on.
    """
    plain = plain_value(dataclasses.asdict(settings))
    uri = settings.tracking.uri
    if uri is not None and _has_credentials(uri):
        plain["tracking"]["uri"] = None  # files are handed on; MLflow reads them from variables
    for group in GROUPS:
        chosen = plain[group]
        plain[group] = Redactor().tree({"name": chosen["name"], **chosen["options"]})
    return {"schema_version": SCHEMA_VERSION, **plain}


def _has_credentials(uri: str) -> bool:
    return "@" in urllib.parse.urlsplit(uri).netloc


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
