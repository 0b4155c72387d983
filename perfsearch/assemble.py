"""From checked settings to the objects that a search is made of, and to the search itself."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfsearch import runners, strategies
from perfsearch.config import Settings, default_run_dir
from perfsearch.config_options import ConfigError, build_options
from perfsearch.core.hints import Hints
from perfsearch.core.journal import JOURNAL
from perfsearch.core.narrow import is_auto
from perfsearch.core.space import Space
from perfsearch.runners import Runner
from perfsearch.strategies import Strategy
from perfsearch.workloads.spec import SCRIPT

if TYPE_CHECKING:
    from perfsearch.stages.session import Result, View

_OWN_MODE = ".perfsearch"
"""Left where a mode without a search, such as ``estimate``, was the first to write."""

_MARKS = (JOURNAL, ".lock", _OWN_MODE)
"""Files that a directory has which a search worked in, or may work in."""

_PIPELINE_MODES = ("search", "profile")

ViewFactory = Callable[[Settings], "AbstractContextManager[View]"]
"""Opens what shows a search while it runs."""

StrategyFactory = Callable[[Space, Hints], Strategy]
"""Makes the strategy once the runner's space and hints are known."""


@dataclass(frozen=True)
class _Factory:
    """A strategy's class with everything but the space; can be sent to another process."""

    strategy: type[Strategy]
    seed: int
    options: Any
    by_bound: bool = False

    def __call__(self, space: Space, hints: Hints) -> Strategy:
        if self.by_bound:
            from perfsearch.strategies._by_bound import ByBound

            return ByBound(space, hints, self.seed, replace(self, by_bound=False))
        return self.strategy(space, hints, self.seed, self.options)


def strategy_factory(settings: Settings) -> StrategyFactory:
    """The strategy that ``settings`` names, its options checked.

    Raises:
        BadInputError: no such strategy, a wrong option, or an optional package is missing.

    """
    name = settings.strategy.name
    strategy: type[Strategy] = _load(strategies.load, "strategy", name)
    options = build_options(strategy.Options, settings.strategy.options, "strategy")
    return _Factory(strategy, settings.seed, options, is_auto(settings.runner.options))


def build_runner(settings: Settings) -> Runner:
    """The runner that ``settings`` names; it has started nothing yet.

    Raises:
        BadInputError: no such runner, it lacks ``settings.mode``, or anything that the runner
            itself finds wrong (a missing GPU, an impossible batch, a factory that fails).

    """
    name = settings.runner.name
    runner = _runner(settings)
    modes = ["search", *(["profile"] if runner.trains else [])]
    if settings.mode not in modes and _own(runner, settings.mode) is None:
        own = [mode for mode in ("estimate", "simulate") if _own(runner, mode) is not None]
        has = " and mode=".join([*modes, *own])
        raise ConfigError("mode", f"mode={settings.mode}: runner={name} has only mode={has}.")
    of_script = runner.for_script(settings) if settings.workload.name == SCRIPT else None
    if of_script is not None:
        from perfsearch.runners._script import Script

        return Script.from_options(settings, *of_script)
    return runner.from_settings(settings)


def _runner(settings: Settings) -> type[Runner]:
    runner: type[Runner] = _load(runners.load, "runner", settings.runner.name)
    return runner


def run(settings: Settings, open_view: ViewFactory) -> int:
    """Do what ``settings.mode`` asks for; return the exit code.

    Args:
        settings: the checked configuration.
        open_view: opens what shows it, once nothing is left that could be refused.

    Raises:
        BadInputError: something asked for cannot be done; nothing was started.

    """
    return _run(settings, open_view)[1]


def search(settings: Settings, open_view: ViewFactory) -> Result:
    """The same, returning what the search came to.

    Args:
        settings: the checked configuration.
        open_view: as ``run`` takes it.

    Raises:
        BadInputError: something asked for cannot be done, or ``settings.mode`` is none of the
            pipeline's.
        Interrupted: a signal came; finished trials are recorded first.

    """
    if settings.mode not in _PIPELINE_MODES:
        allowed = " and mode=".join(_PIPELINE_MODES)
        raise ConfigError(
            "mode", f"mode={settings.mode}: it has no result. From Python there is mode={allowed}."
        )
    result, _ = _run(settings, open_view)
    assert result is not None
    return result


def _run(settings: Settings, open_view: ViewFactory) -> tuple[Result | None, int]:
    """What the search came to, where there was one, and the exit code."""
    settings = _runner(settings).settle(settings)
    strategy = strategy_factory(settings)
    directory = settings.run_dir or default_run_dir(settings)
    _require_writable(directory)
    foreign = _foreign_file(directory)
    if foreign and settings.run_dir is not None and settings.mode in _PIPELINE_MODES:
        raise ConfigError(
            "run_dir",
            f"run_dir={directory}: it holds {foreign!r} and no search of perfsearch, and files of "
            "a search would be written among them. Name a new or an empty directory.",
        )
    runner = build_runner(settings)
    with open_view(settings) as view:
        own = _own(runner, settings.mode)
        if own is None:
            from perfsearch.pipeline import search

            result = search(settings, runner, strategy, view)
            if result.exit_code:
                return result, int(result.exit_code)
            return result, runner.follow_up(result.handed_over)
        try:
            return None, int(own(settings, view.note))
        finally:
            runner.close()
            if not foreign and directory.is_dir():
                (directory / _OWN_MODE).touch()


def _own(runner: Any, mode: str) -> Callable[[Settings, Callable[[str], None]], int] | None:
    """The runner's own way to do what ``mode`` asks for; ``None``: the pipeline does it."""
    method = None if mode == "search" else getattr(runner, mode, None)
    return method if callable(method) else None


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


def _foreign_file(directory: Path) -> str:
    """A file that is not perfsearch's, with which those of a search would mix; or empty."""
    if not directory.is_dir() or any((directory / mark).exists() for mark in _MARKS):
        return ""
    return next((path.name for path in sorted(directory.iterdir())), "")


def _load(load: Callable[[str], type[Any]], group: str, name: str) -> Any:
    try:
        found = load(name)
    except LookupError as error:
        raise ConfigError(group, str(error)) from error
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "perfsearch"):
            raise
        raise ConfigError(
            group,
            f"{group}={name}: needs the package {missing}, which is not installed. "
            f"Install it, or choose another {group}.",
        ) from error
    for package, extra in found.requires.items():
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                group,
                f"{group}={name}: needs the package {package}, which is not installed. "
                f"Run: pip install 'perfsearch[{extra}]'",
            )
    return found
