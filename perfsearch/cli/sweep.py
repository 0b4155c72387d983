"""Validation of what Hydra would compose of a command line, before anything starts."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from perfsearch.cli.security import (
    check_hydra,
    check_hydra_keys,
    check_resolvers,
    check_swept,
    check_values,
)
from perfsearch.config.compose import composed, initialized, plain
from perfsearch.config.messages import explain
from perfsearch.config.options import ConfigError
from perfsearch.config.schema import GROUPS, validate

if TYPE_CHECKING:
    import argparse

SEARCH_PATH = "hydra.searchpath"


def check_group_choices(flags: argparse.Namespace) -> None:
    """Refuse a list or mapping where an option's name is needed; Hydra would stumble over it."""
    for override in parsed(flags.overrides):
        key = override.key_or_group
        if key in GROUPS and isinstance(override.value(), list | dict):
            raise ConfigError(
                key,
                f"{override.input_line}: one option's name is needed. For several: -m {key}=A,B.",
            )


def check_before_anything_starts(flags: argparse.Namespace) -> list[list[str]]:
    """Refuse foreign code, and check every job of a sweep before the first one starts.

    Returns:
        The words of each job of a sweep, as far as they are known before; else nothing.

    """
    swept: list[list[str]] = []
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    overrides = parsed(flags.overrides)
    overridden = [o.key_or_group for o in overrides]
    name = flags.config_name or "config"
    if added := [key.removeprefix("hydra.") for key in overridden if key.startswith("hydra.")]:
        check_hydra_keys(_by_command_line([]), added)
    with initialized(flags.config_path):
        # Hydra composes no sweep outside of its own command: the first job stands for all of them.
        several = any(o.is_sweep_override() for o in overrides)
        config = composed(_jobs(overrides)[0] if several else flags.overrides, name)
        sweeps = bool(flags.multirun or config.hydra.mode == RunMode.MULTIRUN)
        if several and not sweeps:
            config = composed(flags.overrides, name)  # which refuses them
        if OmegaConf.select(config, "hydra.callbacks"):
            raise ConfigError(
                "hydra.callbacks",
                "hydra.callbacks: nothing is built from names in a configuration. Remove it.",
            )
        raw = OmegaConf.to_container(config)
        assert isinstance(raw, dict)
        node = raw.pop("hydra")
        check_resolvers({**raw, "hydra": {"sweeper": {"params": _params(node)}}}, overridden)
        check_values(plain(copy.deepcopy(config), complete=False), overridden)
        if sweeps and config.hydra.runtime.choices["hydra/sweeper"] == "basic":
            by_file = [f"{k}={v}" for k, v in (config.hydra.sweeper.params or {}).items()]
            swept = _jobs([*parsed(by_file), *overrides])
            for job in swept:
                values = plain(composed(job, name))
                check_values(values, overridden)
                _check_job(values)
        elif sweeps:  # whose jobs are known only as they come
            check_swept(_params(node), overridden)
    if flags.config_path or node["searchpath"]:  # files that are not ours had a say
        check_hydra(node, _by_command_line(overrides))
    return swept


def _params(node: Mapping[str, Any]) -> dict[str, Any]:
    """What Hydra's own node sweeps over, by key, where a file may set it."""
    return dict((node.get("sweeper") or {}).get("params") or {})


def parsed(overrides: Sequence[str]) -> list[Any]:
    """Hydra's reading of ``KEY=VALUE`` words."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    read: list[Any] = OverridesParser.create().parse_overrides(list(overrides))
    return read


def _jobs(overrides: Sequence[Any]) -> list[list[str]]:
    """The words of each job, combined as Hydra's own sweeper does; one job where nothing sweeps."""
    from hydra.core.global_hydra import GlobalHydra

    choices: dict[str, list[str]] = {}
    for override in overrides:
        key = override.get_key_element()
        if not override.is_sweep_override():
            choices[key] = [override.input_line]
        elif override.is_discrete_sweep():
            override.config_loader = GlobalHydra.instance().config_loader()  # for glob(...)
            choices[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        else:
            raise ConfigError(
                override.key_or_group,
                f"{override.input_line}: an interval has no end of values. "
                f"Give some of them: {key}=A,B or {key}=range(FIRST,END).",
            )
    return [list(job) for job in itertools.product(*choices.values())]


def _is_hydras(override: Any) -> bool:
    return bool(override.key_or_group.partition("/")[0].partition(".")[0] == "hydra")


def _by_command_line(overrides: Sequence[Any]) -> Mapping[str, Any]:
    """Hydra's own node as our files and the command line make it, no other file.

    Other files are only taken where the command line chooses something that is in them alone.
    """
    from hydra.errors import MissingConfigException
    from omegaconf import OmegaConf

    words = [o.input_line for o in overrides if _is_hydras(o)]
    own = [o.input_line for o in overrides if _is_hydras(o) and o.key_or_group != SEARCH_PATH]
    with initialized():
        try:
            config = composed(own)
        except MissingConfigException:
            config = composed(words)
        node = OmegaConf.to_container(config.hydra)
    assert isinstance(node, dict)
    return {str(key): value for key, value in node.items()}


def _check_job(values: Mapping[str, Any]) -> None:
    from perfsearch.pipeline.search import build_runner, strategy_factory

    settings = validate(values)
    strategy_factory(settings)
    build_runner(settings).close()


def nearest_configuration(flags: argparse.Namespace) -> dict[str, Any]:
    """The configuration of those overrides that can be composed, to find near misses in."""
    kept: list[str] = []
    found: dict[str, Any] = {}
    with initialized(flags.config_path):
        for override in [None, *flags.overrides]:
            candidate = [*kept, override] if override else kept
            try:
                config = composed(candidate, flags.config_name or "config")
                found, kept = plain(config, complete=False), candidate
            except Exception as error:
                if explain(error, dict) is None:
                    raise
    return found
