"""The command ``perfsearch``; it imports Hydra only when needed, as ``perfsearch.compose`` does."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from perfsearch import __version__
from perfsearch.cli_errors import explain
from perfsearch.cli_job import Job, JobFailedError, plain
from perfsearch.cli_knobs import open_knobs
from perfsearch.cli_recorded import take_recorded_configuration
from perfsearch.cli_trust import check_hydra, check_hydra_keys, check_paths
from perfsearch.config import GROUPS, validate
from perfsearch.config_options import ConfigError
from perfsearch.exits import ExitCode, Interrupted, interruptible
from perfsearch.search.errors import BadInputError
from perfsearch.search.suggest import nearest
from perfsearch.surroundings import (
    flush_output,
    open_standard_streams,
    require_current_directory,
    require_supported_python,
    write_nowhere,
)

if TYPE_CHECKING:
    import argparse

_CONFIG_MODULE = "pkg://perfsearch.conf"
_SIGPIPE = 141
"""What a shell reports of a command whose reader went away."""
_BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


def main(argv: Sequence[str] | None = None, given: Mapping[str, Any] | None = None) -> int:
    """Run the command and return its exit code; see ``ExitCode``.

    Args:
        argv: arguments without the program's name; ``None`` takes the command line's.
        given: keys whose values are taken as they are, not as Hydra would read them; they go
            before what ``argv`` says.

    """
    open_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _main(arguments, given or {})
        flush_output()
        return code
    except BrokenPipeError:
        write_nowhere()
        return _SIGPIPE


def _main(arguments: list[str], given: Mapping[str, Any]) -> int:
    if "--help" in arguments or "-h" in arguments:
        from perfsearch.help import help_text

        print(help_text(), end="")
        return ExitCode.DONE
    if "--version" in arguments:
        print(f"perfsearch {__version__}")
        return ExitCode.DONE
    try:
        require_supported_python()
        require_current_directory()
        with interruptible():
            return _command(arguments, given)
    except Interrupted as interrupted:
        return interrupted.exit_code
    except BadInputError as error:
        print(f"perfsearch: {error}", file=sys.stderr)
        return ExitCode.BAD_INPUT


def _overrides_first(arguments: list[str]) -> list[str]:
    """Let options stand anywhere; Hydra's parser wants all KEY=VALUE side by side."""
    from hydra._internal.utils import get_args_parser

    takes_value = {
        name
        for action in get_args_parser()._actions
        for name in action.option_strings
        if action.nargs is None
    }
    overrides: list[str] = []
    options: list[str] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        is_value = before in takes_value or (before in ("--info", "-i") and "=" not in argument)
        (options if argument.startswith("-") or is_value else overrides).append(argument)
    return [*overrides, *options]


def _command(arguments: list[str], given: Mapping[str, Any]) -> int:
    arguments = _overrides_first(open_knobs(arguments))
    flags = _parse(arguments)
    if flags.config_path is not None:
        take_recorded_configuration(arguments, flags)
    job = Job(given)
    try:
        _check_group_choices(flags)
        if not (flags.cfg or flags.info or flags.hydra_help or flags.shell_completion):
            _check_before_anything_starts(flags)
        with _hydra_environment(arguments):
            import hydra

            hydra.main(version_base="1.3", config_path=_CONFIG_MODULE, config_name="config")(job)()
    except BadInputError:
        raise
    except JobFailedError as failed:
        job.exit_codes.append(failed.exit_code)
    except Exception as error:
        message = explain(error, lambda: _nearest_configuration(flags))
        if message is None:
            raise
        raise BadInputError(message) from error
    return max(job.exit_codes, default=ExitCode.DONE)


def _parse(arguments: list[str]) -> argparse.Namespace:
    """Hydra's own arguments, with one clear message for what it cannot take."""
    from hydra._internal.utils import get_args_parser

    parser: argparse.ArgumentParser = get_args_parser()
    names = [name for action in parser._actions for name in action.option_strings]

    def refuse(message: str) -> None:
        raise BadInputError(f"{message}. See perfsearch --help.")

    parser.error = refuse  # type: ignore[assignment, method-assign]
    flags, rest = parser.parse_known_args(arguments)
    if rest:
        name = rest[0].partition("=")[0]
        raise BadInputError(f"{name}: no such option. {nearest(name, names)}")
    actions = ("run", "multirun", "cfg", "info", "hydra_help", "shell_completion")
    asked = [f"--{name.replace('_', '-')}" for name in actions if getattr(flags, name)]
    if len(asked) > 1:
        raise BadInputError(f"{' '.join(asked)}: only one of these at a time.")
    if flags.resolve and not flags.cfg:
        raise BadInputError("--resolve: it goes with --cfg only.")
    if flags.experimental_rerun is not None:
        raise BadInputError("--experimental-rerun: give best/config.yaml's values as KEY=VALUE.")
    return flags


@contextmanager
def _hydra_environment(arguments: list[str]) -> Iterator[None]:
    """Let Hydra read ``arguments``, and let it raise its errors rather than print them."""
    before_argv, before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [sys.argv[0], *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = before_argv
        if before is None:
            os.environ.pop("HYDRA_FULL_ERROR", None)
        else:
            os.environ["HYDRA_FULL_ERROR"] = before


@contextmanager
def _composer(flags: argparse.Namespace, own: bool = False) -> Iterator[Any]:
    """Hydra with the same search path that its command line will use, or with our files only."""
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import create_config_search_path
    from hydra.core.config_search_path import SearchPathQuery
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig

    path = create_config_search_path(_CONFIG_MODULE if own else flags.config_path or _CONFIG_MODULE)
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


def _check_group_choices(flags: argparse.Namespace) -> None:
    """Refuse a list or mapping where an option's name is needed; Hydra would stumble over it."""
    for override in _parsed(flags.overrides):
        key = override.key_or_group
        if key in GROUPS and isinstance(override.value(), list | dict):
            raise ConfigError(
                key,
                f"{override.input_line}: one option's name is needed. For several: -m {key}=A,B.",
            )


def _check_before_anything_starts(flags: argparse.Namespace) -> None:
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
    from perfsearch.assemble import build_runner, strategy_factory

    settings = validate(composed)
    strategy_factory(settings)
    build_runner(settings).close()


def _nearest_configuration(flags: argparse.Namespace) -> dict[str, Any]:
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


if __name__ == "__main__":
    sys.exit(main())
