"""The contract of a search strategy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from perfsearch.core.hints import ChainResult, Hints, Prediction
from perfsearch.core.knob import Configuration, Value
from perfsearch.core.space import Space
from perfsearch.core.trial import Trial

LOG = "proposer.log"
"""File of the run directory with tracebacks of a strategy, and what a program that proposes writes
to its standard error."""


class StrategyError(Exception):
    """A strategy cannot go on; the message says why, in one line for people."""


class Processes(Protocol):
    """Processes that a strategy starts, and what becomes of them."""

    def environment(self) -> dict[str, str]:
        """Environment variables to start them with, by which all of them can be found."""

    def end(self) -> None:
        """End those that still run, and whatever they started in their turn."""


@dataclass(frozen=True)
class Surroundings:
    """What a search has for a strategy that asks outside of this process.

    Attributes:
        run_dir: the search's directory, for logs.
        budget_left: what is left of the budget now: ``trials`` and ``seconds``, ``None`` without
            a limit.
        processes: how to start some.

    """

    run_dir: Path
    budget_left: Callable[[], Mapping[str, float | None]]
    processes: Processes


class Strategy(ABC):
    """Decides what to try next. It sees no processes, no files, no clock; one that asks outside of
    this process sees the ``Surroundings`` that ``open`` is given, and ends in ``close`` what it
    started.

    Its state comes only from ``seed`` and from the calls of ``ask`` and ``tell``, in order, so
    that repeating the calls restores it. ``tell`` gets every trial that ended, failures included
    (``trial.cost`` is then ``None``), also such as it did not ask for (the baseline, an earlier
    search). ``ask`` may be called again before the answer to the last one is told, and then
    proposes something else; it never proposes what was told or is outstanding while anything else
    is feasible, and returns ``None`` when it is done (see ``stop_reason``).
    ``ask`` raises a ``StrategyError`` where it cannot go on, which ends the search. Any other
    exception, and a proposal with an unknown knob or a value that it cannot take, is a bug of the
    strategy, and ends it too.
    Budgets, duplicates and retries are the pipeline's business.

    ``expected_gain`` is the share by which the last proposal is expected to lower the best cost,
    where the strategy can tell, so that a search can end when that no longer pays.
    ``chain_results`` holds chains over simulated configurations since it was last emptied, to be
    shown.

    A subclass lives in its own module ``perfsearch.strategies.NAME``, with its options in
    ``conf/strategy/NAME.yaml`` and a frozen dataclass ``Options`` that documents them.
    """

    requires: ClassVar[Mapping[str, str]] = {}
    """Packages that it needs beside perfsearch's own, and the extra that brings each."""

    sees_all_knobs: ClassVar[bool] = False
    """Whether ``runner.knobs=auto`` leaves it to choose which knobs to search first."""

    @dataclass(frozen=True)
    class Options:
        """Options of the strategy, as keys ``strategy.*``."""

    def __init__(self, space: Space, hints: Hints, seed: int, options: Any = None) -> None:
        self.space = space
        self.hints = hints
        self.seed = seed
        self.options: Any = options if options is not None else type(self).Options()
        self.stop_reason = ""
        self.expected_gain: float | None = None
        self.chain_results: list[ChainResult] = []

    @abstractmethod
    def ask(self) -> dict[str, Value] | None:
        """Return a feasible configuration to try next, or ``None`` when done."""

    @abstractmethod
    def tell(self, trial: Trial) -> None:
        """Take note of a trial that ended."""

    def ask_again(self, proposed: Configuration | None) -> dict[str, Value] | None:
        """Ask once more for what was ``proposed`` before a kill, as a search goes on from there;
        ``None`` where nothing was, as long as trials were outstanding.

        Overridden where asking again would lead to another answer.
        """
        return self.ask()

    def open(self, surroundings: Surroundings) -> None:  # noqa: B027 - few reach out
        """Get ready in a search, before the first call of ``ask``."""

    def close(self) -> None:  # noqa: B027 - as above
        """End what it started; nothing is asked any more. It may be called twice."""

    def describe(self) -> str:
        """One line for people on what it is doing and why."""
        return ""


__all__ = [
    "LOG",
    "Hints",
    "Prediction",
    "Processes",
    "Strategy",
    "StrategyError",
    "Surroundings",
]
