"""The command ``perfsearch``; the only file that imports Hydra, and only when it is needed."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfsearch import __version__
from perfsearch.cli_errors import explain
from perfsearch.config import Settings, default_run_dir, validate
from perfsearch.config_options import ConfigError
from perfsearch.exits import ExitCode, Interrupted, interruptible
from perfsearch.search.errors import BadInputError
from perfsearch.search.suggest import nearest

if TYPE_CHECKING:
    import argparse

_CONFIG_MODULE = "pkg://perfsearch.conf"
_BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; see ``ExitCode``.

    Args:
        argv: arguments without the program's name; ``None`` takes the command line's.

    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--help" in arguments or "-h" in arguments:
        from perfsearch.help import help_text

        print(help_text(), end="")
        return ExitCode.DONE
    if "--version" in arguments:
        print(f"perfsearch {__version__}")
        return ExitCode.DONE
    try:
        _require_supported_python()
        with interruptible():
            return _command(arguments)
    except Interrupted as interrupted:
        return interrupted.exit_code
    except BadInputError as error:
        print(f"perfsearch: {error}", file=sys.stderr)
        return ExitCode.BAD_INPUT


def _require_supported_python() -> None:
    if sys.version_info >= (3, 14):
        found = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise BadInputError(
            f"Python {found}: Hydra 1.3 does not run on it. Use Python 3.11, 3.12 or 3.13."
        )


def _command(arguments: list[str]) -> int:
    flags = _parse(arguments)
    job = _Job()
    try:
        if not (flags.cfg or flags.info or flags.hydra_help or flags.shell_completion):
            _check_before_anything_starts(flags)
        with _hydra_environment(arguments):
            import hydra

            hydra.main(version_base="1.3", config_path=_CONFIG_MODULE, config_name="config")(job)()
    except BadInputError:
        raise
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
    for argument in rest:
        if argument.startswith("-"):
            name = argument.partition("=")[0]
            raise BadInputError(f"{name}: no such option. {nearest(name, names)}")
        raise BadInputError(f"{argument}: write all KEY=VALUE together, options before or after.")
    if flags.config_path is not None:
        raise BadInputError("--config-path: add options of your own by --config-dir DIRECTORY.")
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
def _composer(flags: argparse.Namespace) -> Iterator[Any]:
    """Hydra with the same search path that its command line will use."""
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import create_config_search_path
    from hydra.core.config_search_path import SearchPathQuery
    from hydra.core.global_hydra import GlobalHydra

    path = create_config_search_path(_CONFIG_MODULE)
    if flags.config_dir is not None:
        directory = os.path.abspath(flags.config_dir)
        if not os.path.isdir(directory):
            raise BadInputError(f"--config-dir {flags.config_dir}: there is no such directory.")
        path.prepend("command-line", f"file://{directory}", SearchPathQuery(provider="schema"))
    try:
        yield Hydra.create_main_hydra2(task_name="perfsearch", config_search_path=path)
    finally:
        GlobalHydra.instance().clear()


def _check_before_anything_starts(flags: argparse.Namespace) -> None:
    """Refuse foreign code, and check every job of a sweep before the first one starts."""
    from hydra.types import RunMode
    from omegaconf import OmegaConf

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
        if sweeps and OmegaConf.select(master, "hydra.sweeper._target_") == _BASIC_SWEEPER:
            for overrides in _jobs_of_sweep(hydra.config_loader, master):
                config = hydra.config_loader.load_sweep_config(master, overrides)
                _check_job(_plain(config))


def _jobs_of_sweep(config_loader: Any, master: Any) -> list[list[str]]:
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    written = [f"{k}={v}" for k, v in (master.hydra.sweeper.params or {}).items()]
    written.extend(master.hydra.overrides.task)
    parsed = OverridesParser.create(config_loader=config_loader).parse_overrides(written)
    return [job for batch in BasicSweeper.split_arguments(parsed, None) for job in batch]


def _check_job(plain: Mapping[str, Any]) -> None:
    from perfsearch.assemble import build_runner, strategy_factory

    settings = validate(plain)
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
                composed, kept = _plain(config), candidate
            except Exception as error:
                if explain(error, dict) is None:
                    raise
        return composed


def _plain(config: Any) -> dict[str, Any]:
    from omegaconf import OmegaConf, open_dict

    with open_dict(config):
        config.pop("hydra", None)
    plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    return {str(k): v for k, v in plain.items()}


class JobFailedError(Exception):
    """A job of a sweep in another process ended with an exit code other than 0."""


class _Job:
    """What Hydra calls once a job, in this process or, by another launcher, in a new one."""

    def __init__(self) -> None:
        self.exit_codes: list[int] = []
        self.process = os.getpid()

    def __call__(self, config: Any) -> None:
        code = self._exit_code(config)
        self.exit_codes.append(code)
        if code in (ExitCode.SIGINT, ExitCode.SIGTERM):
            raise Interrupted(ExitCode(code))
        if code and os.getpid() != self.process:
            raise JobFailedError(f"exit code {code}")

    def _exit_code(self, config: Any) -> int:
        os.environ.pop("HYDRA_FULL_ERROR", None)
        try:
            return run(validate(_plain(config)))
        except BadInputError as error:
            print(f"perfsearch: {error}", file=sys.stderr)
            return ExitCode.BAD_INPUT
        except Exception as error:
            message = explain(error, dict)
            if message is not None:
                print(f"perfsearch: {message}", file=sys.stderr)
                return ExitCode.BAD_INPUT
            traceback.print_exc()
            return ExitCode.NO_TRIAL_SUCCEEDED


def run(settings: Settings) -> int:
    """Do what ``settings.mode`` asks for, with a view in this terminal; return the exit code.

    Raises:
        BadInputError: something asked for cannot be done; nothing was started.

    """
    from perfsearch.assemble import build_runner, strategy_factory
    from perfsearch.view import open_view

    strategy = strategy_factory(settings)
    _require_writable(settings.run_dir or default_run_dir(settings))
    runner = build_runner(settings)
    with open_view(settings) as view:
        if settings.mode == "search":
            from perfsearch.pipeline import search

            return int(search(settings, runner, strategy, view).exit_code)
        try:
            return int(getattr(runner, settings.mode)(settings, view))
        finally:
            runner.close()


def _require_writable(directory: Path) -> None:
    """Refuse a run directory that cannot be made or written, without making it."""
    existing = directory.absolute()
    while not existing.exists():
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ConfigError(
            "run_dir",
            f"run_dir={directory}: {existing} cannot be written ({error.strerror}). "
            "Set run_dir=DIRECTORY to one that can.",
        ) from error


if __name__ == "__main__":
    sys.exit(main())
