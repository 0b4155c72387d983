"""What a configuration file may not do, though the same words on the command line may.

A file can come from somebody else. It must not name code to run, and what it names to write must
stay below the current directory, where runs go by default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from perfsearch.config.options import ConfigError, leaves, show
from perfsearch.core.errors import nearest

PATH_KEYS = ("run_dir", "tracking.uri", "limits.lock_directory")
"""Keys of our own that decide where something is written."""

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
    """Refuse what the command line adds to Hydra's own node and Hydra would never read.

    Args:
        composed: the node ``hydra`` as it was composed.
        added: keys below ``hydra`` that were given with a plus sign, as ``job.name``.

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


def check_paths(composed: Mapping[str, Any], overridden: Iterable[str]) -> None:
    """Refuse paths of a configuration file that lead out of the current directory.

    Args:
        composed: the configuration as plain values.
        overridden: keys that the command line sets itself.

    Raises:
        ConfigError: naming the key.

    """
    own = set(overridden)
    for key in PATH_KEYS:
        parts = key.split(".")
        if own & {".".join(parts[: n + 1]) for n in range(len(parts))}:
            continue
        value: Any = composed
        for part in parts:
            value = value.get(part) if isinstance(value, Mapping) else None
        path = _local_path(str(value)) if value is not None else None
        here = Path.cwd().resolve()
        if path is not None and not (here / path).resolve().is_relative_to(here):
            raise ConfigError(
                key,
                f"{key}={value}: a configuration file may only name places below the current "
                f"directory. If you mean it, give {key}={value} on the command line.",
            )


def _local_path(text: str) -> Path | None:
    """Where a path or a store's URI writes on this machine; ``None`` for a server."""
    scheme, separator, rest = text.partition(":")
    if not separator or "/" in scheme:
        return Path(text)
    if scheme.partition("+")[0] not in _LOCAL_STORES:
        return None
    without_host = rest[3:] if scheme != "file" and rest.startswith("///") else rest
    if scheme == "file" and rest.startswith("//"):
        without_host = "/" + rest[2:].partition("/")[2]
    return Path(without_host.partition("?")[0])
