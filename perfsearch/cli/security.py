"""What a configuration file may not do, though the same words on the command line may.

A file can come from somebody else. It must not name code to run, nor a server to talk to; it cannot
read the environment, and what it names to write must stay below the current directory, where runs
go by default.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from perfsearch.config.compose import MISSING
from perfsearch.config.options import ConfigError, join, leaves, show
from perfsearch.config.schema import GROUPS
from perfsearch.core.errors import nearest

PATH_KEYS = ("run_dir", "tracking.uri", "limits.lock_directory", "runner.export_to", "runner.cache")
"""Keys of our own that decide where something is written."""

CODE_KEYS = (
    *("workload.command", "workload.module", "workload.factory", "workload.silence"),
    *("workload.map", "workload.map_file", "runner.ds_config", "strategy.command"),
)
"""Keys of our own that decide which code runs, or with which arguments."""

_PLAIN_REFERENCE = re.compile(r"\$\{\.*[\w.\-\[\]]+\}")
"""What stands for another key's value, and asks nothing else for one."""

_FREE = (
    "sweeper.params",
    "mode",
    "runtime",
    "overrides",
    "job",
    "help",
    "hydra_help",
    "searchpath",
)
"""Parts of Hydra's own node that a file may set, or that tell of the command line itself."""

_LOCAL_STORES = ("file", "sqlite")

_SERVER_NAMES = ("databricks", "databricks-uc", "uc")
"""Stores elsewhere that MLflow knows by a name alone."""


def check_hydra(composed: Mapping[str, Any], by_command_line: Mapping[str, Any]) -> None:
    """Refuse Hydra's own settings where a configuration file changed them.

    Among them are classes to build, files to log to, and directories to make.

    Args:
        composed: the node ``hydra`` as it was composed.
        by_command_line: the same from the command line's overrides alone.

    Raises:
        ConfigError: naming the first key that differs.

    """
    allowed = dict(leaves(by_command_line))
    for key, value in leaves(composed):
        if any(key == free or key.startswith(f"{free}.") for free in _FREE):
            continue
        if value != allowed.get(key):
            raise ConfigError(
                f"hydra.{key}",
                f"hydra.{key}={show(value)}: a configuration file may not set it. "
                f"Remove it there; on the command line hydra.{key}=VALUE may stand.",
            )


def check_hydra_keys(composed: Mapping[str, Any], added: Iterable[str]) -> None:
    """Refuse what the command line says of Hydra's own node and Hydra would never read.

    Args:
        composed: the node ``hydra`` as it was composed.
        added: keys below ``hydra`` that were given, as ``job.name``.

    Raises:
        ConfigError: naming the first such key and the nearest valid one.

    """
    from hydra.conf import HydraConf

    for key in added:
        known: Any = HydraConf
        for place, part in enumerate(key.split(".")):
            if not dataclasses.is_dataclass(known):
                break
            types = get_type_hints(known)
            if part not in types:
                whole, above = f"hydra.{key}", ".".join(["hydra", *key.split(".")[:place]])
                raise ConfigError(whole, f"{whole}: no such key. {nearest(part, types, above)}")
            known = types[part]
            if place == 0 and "_target_" in dict(leaves(composed.get(part))):
                break  # a plugin's own settings


def check_resolvers(raw: Mapping[str, Any], overridden: Iterable[str]) -> None:
    """Refuse values of a configuration file that ask for more than another key's value.

    ``${oc.env:NAME}`` reads the environment, and so may what others resolve.

    Args:
        raw: the configuration as plain values, nothing in it resolved.
        overridden: keys that the command line sets itself.

    Raises:
        ConfigError: naming the key.

    """
    own = set(overridden)
    for key, value in _texts(raw):
        if "${" not in _PLAIN_REFERENCE.sub("", value) or _is_set(key, own):
            continue
        raise ConfigError(
            key,
            f"{key}={value}: a configuration file may refer to other keys, as in ${{seed}}, and "
            "not read the environment. "
            f"If you mean it, give {key}='{value}' on the command line.",
        )


def check_values(composed: Mapping[str, Any], overridden: Iterable[str]) -> None:
    """Refuse what a configuration file may not say: code, servers, and places elsewhere.

    Args:
        composed: the configuration as plain values, resolved.
        overridden: keys that the command line sets itself.

    Raises:
        ConfigError: naming the key.

    """
    own = set(overridden)
    for key in CODE_KEYS:
        value = _value(composed, key)
        if value and value != MISSING and not _is_set(key, own):
            raise ConfigError(
                key,
                f"{key}={show(value)}: a configuration file may not say which code runs, nor with "
                f"which arguments. If you mean it, give {key}=... on the command line.",
            )
    for key in PATH_KEYS:
        value = _value(composed, key)
        if value is None or _is_set(key, own):
            continue
        path = _local_path(str(value))
        if path is None:
            raise ConfigError(
                key,
                f"{key}={value}: a configuration file may not name a server. If you mean it, give "
                f"{key}=... on the command line, or set MLFLOW_TRACKING_URI.",
            )
        here = Path.cwd().resolve()
        if not (here / path).resolve().is_relative_to(here):
            raise ConfigError(
                key,
                f"{key}={value}: a configuration file may only name places below the current "
                f"directory. If you mean it, give {key}={value} on the command line.",
            )


def check_swept(params: Iterable[str], overridden: Iterable[str]) -> None:
    """Refuse keys that a configuration file sweeps over and whose values cannot be seen before.

    Args:
        params: keys of the sweep, as ``hydra.sweeper.params`` has them.
        overridden: keys that the command line sets itself.

    Raises:
        ConfigError: naming the key.

    """
    own = set(overridden)
    for param in params:
        key = param.lstrip("+~")
        if key in (*CODE_KEYS, *PATH_KEYS, *GROUPS) and not _is_set(key, own):
            raise ConfigError(
                f"hydra.sweeper.params.{key}",
                f"hydra.sweeper.params.{key}: a configuration file may not sweep over it. "
                f"Remove it there; on the command line -m {key}=A,B may stand.",
            )


def _is_set(key: str, own: set[str]) -> bool:
    """Whether the command line gives a key, or one that it is part of; a group's name does not."""
    parts = re.split(r"[.\[]", key)
    above = {".".join(parts[: n + 1]) for n in range(len(parts))}
    return bool((own - set(GROUPS)) & above)


def _value(tree: Mapping[str, Any], key: str) -> Any:
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _texts(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text below a node, keys of mappings among them, with the key that it stands under."""
    if isinstance(node, str):
        yield key, node
    elif isinstance(node, Mapping):
        for name, value in node.items():
            here = join(key, name)
            yield here, str(name)
            yield from _texts(value, here)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _texts(value, key)


def _local_path(text: str) -> Path | None:
    """Where a path or a store's URI writes on this machine; ``None`` for a server."""
    scheme, separator, rest = text.partition(":")
    if text in _SERVER_NAMES:
        return None
    if not separator or "/" in scheme:
        return Path(text)
    if scheme.partition("+")[0] not in _LOCAL_STORES:
        return None
    without_host = rest[3:] if scheme != "file" and rest.startswith("///") else rest
    if scheme == "file" and rest.startswith("//"):
        without_host = "/" + rest[2:].partition("/")[2]
    return Path(without_host.partition("?")[0])
