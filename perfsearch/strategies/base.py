"""The contract of a search strategy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from perfsearch.core.hints import ChainResult, Hints, Prediction
from perfsearch.core.knob import Value
from perfsearch.core.space import Space
from perfsearch.core.trial import Trial


class Strategy(ABC):
    """Decides what to try next. It sees no processes, no files, no clock.

    Its state comes only from ``seed`` and from the calls of ``ask`` and ``tell``, in order, so
    that repeating the calls restores it. ``tell`` gets every trial that ended, failures included
    (``trial.cost`` is then ``None``), also such as it did not ask for (the baseline, an earlier
    search). ``ask`` may be called again before the answer to the last one is told, and then
    proposes something else; it never proposes what was told or is outstanding while anything else
    is feasible, and returns ``None`` when it is done (see ``stop_reason``).
    Budgets, duplicates and retries are the pipeline's business.

    ``expected_gain`` is the share by which the last proposal is expected to lower the best cost,
    where the strategy can tell, so that a search can end when that no longer pays. ``chain_results`` holds
    Markov chains over simulated configurations since it was last emptied, to be shown.

    A subclass lives in its own module ``perfsearch.strategies.NAME``, with its options in
    ``conf/strategy/NAME.yaml`` and a frozen dataclass ``Options`` that documents them.
    """

    requires: ClassVar[Mapping[str, str]] = {}
    """Packages that it needs beside perfsearch's own, and the extra that brings each."""

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

    def describe(self) -> str:
        """One line for people on what it is doing and why."""
        return ""


__all__ = ["Hints", "Prediction", "Strategy"]
