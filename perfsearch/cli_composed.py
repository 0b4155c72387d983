"""What Hydra would compose of a command line, looked at before anything starts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from perfsearch.cli_errors import explain
from perfsearch.cli_job import plain
from perfsearch.cli_trust import check_hydra, check_hydra_keys, check_paths
from perfsearch.config import GROUPS, validate
from perfsearch.config_options import ConfigError
from perfsearch.core.errors import BadInputError

if TYPE_CHECKING:
    import argparse

CONFIG_MODULE = "pkg://perfsearch.conf"
_BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


@contextmanager
def _composer(flags: argparse.Namespace, own: bool = False) -> Iterator[Any]:
    """Hydra with the same search path that its command line will use, or with our files only."""
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import create_config_search_path
    from hydra.core.config_search_path import SearchPathQuery
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig

    path = create_config_search_path(CONFIG_MODULE if own else flags.config_path or CONFIG_MODULE)
    if flags.config_dir is not None and not own:
        directory = os.path.abspath(flags.config_dir)
        if not os.path.isdir(directory):
            raise BadInputError(f"--config-dir {flags.config_dir}: there is no such directory.")
        path.prepend("command-line", f"file://{directory}", SearchPathQuery(provider="schema"))
    try:
        yield Hydra.create_main_hydra2(task_name="perfsearch", config_search_path=path)
    finally:
        GlobalHydra.instance().clear()
        HydraConfig.instance().cfg = None


def check_group_choices(flags: argparse.Namespace) -> None:
    """Refuse a list or mapping where an option's name is needed; Hydra would stumble over it."""
    for override in _parsed(flags.overrides):
        key = override.key_or_group
        if key in GROUPS and isinstance(override.value(), list | dict):
            raise ConfigError(
                key,
                f"{override.input_line}: one option's name is needed. For several: -m {key}=A,B.",
            )


def check_before_anything_starts(flags: argparse.Namespace) -> None:
    """Refuse foreign code, and check every job of a sweep before the first one starts."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    overridden = [o.key_or_group for o in _parsed(flags.overrides)]
    with _composer(flags) as hydra:
        name = flags.config_name or "config"
        mode = hydra.get_mode(config_name=name, overrides=flags.overrides)
        sweeps = flags.multirun or mode == RunMode.MULTIRUN
        master = hydra.compose_config(
            config_name=name,
            overrides=flags.overrides,
            run_mode=RunMode.MULTIRUN if sweeps else RunMode.RUN,
            with_log_configuration=False,
        )
        if OmegaConf.select(master, "hydra.callbacks"):
            raise ConfigError(
                "hydra.callbacks",
                "hydra.callbacks: nothing is built from names in a configuration. Remove it.",
            )
        check_paths(OmegaConf.to_container(master), overridden)
        composed = OmegaConf.to_container(master.hydra)
        check_hydra_keys(composed, _added_to_hydra(flags.overrides))
        if sweeps and OmegaConf.select(master, "hydra.sweeper._target_") == _BASIC_SWEEPER:
            for overrides in _jobs_of_sweep(hydra.config_loader, master):
                config = hydra.config_loader.load_sweep_config(master, overrides)
                HydraConfig.instance().set_config(config)
                job = plain(config)
                check_paths(job, overridden)
                _check_job(job)
    if not (flags.config_path or flags.config_dir or composed["searchpath"]):
        return  # no file but our own had a say
    with _composer(flags, own=True) as hydra:
        alone = hydra.compose_config(
            config_name="config",
            overrides=[o.input_line for o in _parsed(flags.overrides) if _is_hydras(o)],
            run_mode=RunMode.MULTIRUN if sweeps else RunMode.RUN,
            with_log_configuration=False,
        )
        check_hydra(composed, OmegaConf.to_container(alone.hydra))


def _parsed(overrides: Sequence[str]) -> list[Any]:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed: list[Any] = OverridesParser.create().parse_overrides(list(overrides))
    return parsed


def _added_to_hydra(overrides: Sequence[str]) -> list[str]:
    """Keys below ``hydra`` that the command line gives with a plus sign."""
    return [
        o.key_or_group.removeprefix("hydra.")
        for o in _parsed(overrides)
        if o.is_add() and o.key_or_group.startswith("hydra.")
    ]


def _is_hydras(override: Any) -> bool:
    return bool(override.key_or_group.partition("/")[0].partition(".")[0] == "hydra")


def _jobs_of_sweep(config_loader: Any, master: Any) -> list[list[str]]:
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    written = [f"{k}={v}" for k, v in (master.hydra.sweeper.params or {}).items()]
    written.extend(master.hydra.overrides.task)
    parsed = OverridesParser.create(config_loader=config_loader).parse_overrides(written)
    return [job for batch in BasicSweeper.split_arguments(parsed, None) for job in batch]


def _check_job(composed: Mapping[str, Any]) -> None:
    from perfsearch.pipeline.search import build_runner, strategy_factory

    settings = validate(composed)
    strategy_factory(settings)
    build_runner(settings).close()


def nearest_configuration(flags: argparse.Namespace) -> dict[str, Any]:
    """The configuration of those overrides that can be composed, to find near misses in."""
    from hydra.types import RunMode

    with _composer(flags) as hydra:
        kept: list[str] = []
        composed: dict[str, Any] = {}
        for override in [None, *flags.overrides]:
            candidate = [*kept, override] if override else kept
            try:
                config = hydra.compose_config(
                    config_name=flags.config_name or "config",
                    overrides=candidate,
                    run_mode=RunMode.MULTIRUN,
                    with_log_configuration=False,
                )
                composed, kept = plain(config, complete=False), candidate
            except Exception as error:
                if explain(error, dict) is None:
                    raise
        return composed
