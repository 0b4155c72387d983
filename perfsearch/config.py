"""What a search is told: the check of what the user wrote, and what it is written back as.

The typed settings themselves are in ``perfsearch.config_schema``. Nothing here imports torch or
Hydra.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from perfsearch.config_options import ConfigError, build_options, join, option, plain_value, show
from perfsearch.config_schema import (
    BudgetSettings,
    ConfirmSettings,
    LimitSettings,
    MetricsSettings,
    ObjectiveSettings,
    Selected,
    Settings,
    TrackingSettings,
)
from perfsearch.core import registry
from perfsearch.core.errors import nearest

__all__ = [
    "BudgetSettings",
    "ConfigError",
    "ConfirmSettings",
    "LimitSettings",
    "MetricsSettings",
    "ObjectiveSettings",
    "Selected",
    "Settings",
    "TrackingSettings",
    "build_options",
    "default_run_dir",
    "option",
    "search_hash",
    "to_plain",
    "validate",
]

SCHEMA_VERSION = 1
"""Version of the settings as written to ``config.yaml`` of a run, under ``schema_version``."""

GROUPS = ("runner", "strategy", "workload")
"""Keys whose value is one option of a group, with keys of its own."""

_REGISTRIES = {"runner": "perfsearch.runners", "strategy": "perfsearch.strategies"}
"""Packages that hold the options of a group, a module each."""

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
    package = _REGISTRIES.get(group)
    return [] if package is None else registry.names(package)


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
    plain = plain_value(dataclasses.asdict(settings))
    uri = settings.tracking.uri
    if uri is not None and _has_credentials(uri):
        plain["tracking"]["uri"] = None  # files are handed on; MLflow reads them from variables
    for group in GROUPS:
        chosen = plain[group]
        plain[group] = {"name": chosen["name"], **chosen["options"]}
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
