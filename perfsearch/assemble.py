"""From checked settings to the objects that a search is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from perfsearch import runners, strategies
from perfsearch.config import Settings
from perfsearch.config_options import ConfigError, build_options
from perfsearch.runners import Runner
from perfsearch.search.hints import Hints
from perfsearch.search.space import Space
from perfsearch.strategies import Strategy

StrategyFactory = Callable[[Space, Hints], Strategy]
"""Makes the strategy once the runner's space and hints are known."""


@dataclass(frozen=True)
class _Factory:
    """A strategy's class with everything but the space; can be sent to another process."""

    strategy: type[Strategy]
    seed: int
    options: Any

    def __call__(self, space: Space, hints: Hints) -> Strategy:
        return self.strategy(space, hints, self.seed, self.options)


def strategy_factory(settings: Settings) -> StrategyFactory:
    """The strategy that ``settings`` names, its options checked.

    Raises:
        BadInputError: no such strategy, a wrong option, or an optional package is missing.

    """
    name = settings.strategy.name
    strategy: type[Strategy] = _load(strategies.load, "strategy", name)
    options = build_options(strategy.Options, settings.strategy.options, "strategy")
    return _Factory(strategy, settings.seed, options)


def build_runner(settings: Settings) -> Runner:
    """The runner that ``settings`` names; it has started nothing yet.

    Raises:
        BadInputError: no such runner, it lacks ``settings.mode``, or anything that the runner
            itself finds wrong (a missing GPU, an impossible batch, a factory that fails).

    """
    name = settings.runner.name
    runner: type[Runner] = _load(runners.load, "runner", name)
    if settings.mode != "search" and not callable(getattr(runner, settings.mode, None)):
        raise ConfigError("mode", f"mode={settings.mode}: runner={name} has only mode=search.")
    return runner.from_settings(settings)


def _load(load: Callable[[str], type[Any]], group: str, name: str) -> Any:
    try:
        return load(name)
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
