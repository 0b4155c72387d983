"""What the strategy is asked and told, and what becomes of a bug of it.

An exception of the strategy, or a proposal that is not in the space, is its failure: it is asked no
more, and the next proposal is the error that ends the search.
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from perfsearch.core import shortage
from perfsearch.core.errors import BadInputError
from perfsearch.core.files import private
from perfsearch.core.knob import Configuration, Value
from perfsearch.core.proposed import OutsideError, own_values
from perfsearch.core.trial import Trial, in_one_line
from perfsearch.runners.base import Runner
from perfsearch.strategies.base import LOG, Strategy, StrategyError

_SHOWN = 300
"""Characters of a strategy's own words in a line for people."""

_BUG = "It is a bug of the strategy"

Answer = TypeVar("Answer")


class Proposals:
    """A search's strategy, asked and told.

    Args:
        strategy: that proposes.
        name: of it, as it was chosen.
        runner: of whose space its proposals are to be; the values of its baseline always are.
        run_dir: where its log goes.

    """

    def __init__(self, strategy: Strategy, name: str, runner: Runner, run_dir: Path) -> None:
        self._strategy, self._name, self._runner, self._run_dir = strategy, name, runner, run_dir
        self.failure = ""
        """Why it is asked no more, in one line for people; empty where it is."""

    def ask(self) -> dict[str, Value] | None:
        """Return the next proposal, with a value of its own for each knob, or ``None``.

        Raises:
            StrategyError: there will be none any more.

        """
        proposed = self._guarded(self._strategy.ask, None)
        if not self.failure and proposed is not None:
            self.failure = self._outside(proposed)
        if self.failure:
            raise StrategyError(self.failure)
        return proposed

    def ask_again(self, proposed: Configuration | None) -> dict[str, Value] | None:
        """Ask once more for what was ``proposed`` before a kill."""
        same = None if proposed is None else dict(proposed)
        again = self._guarded(lambda: self._strategy.ask_again(proposed), same)
        if not self.failure and again is not None:
            self.failure = self._outside(again)
        return same if self.failure else again

    def tell(self, trial: Trial) -> None:
        """Tell it of a trial that ended."""
        self._guarded(lambda: self._strategy.tell(trial), None)

    def describe(self) -> str:
        """One line for people on what it is doing and why."""
        return self._guarded(self._strategy.describe, "")

    def _guarded(self, call: Callable[[], Answer], otherwise: Answer) -> Answer:
        """What a call of the strategy returns, ``otherwise`` where it failed, now or before."""
        if self.failure:
            return otherwise
        try:
            return call()
        except StrategyError as error:
            self.failure = str(error)
        except BadInputError:
            raise  # the user's to mend
        except Exception as error:
            if shortage.remedy(error):
                raise  # nobody's bug
            self.failure = self._raised(error)
        return otherwise

    def _raised(self, error: Exception) -> str:
        log = self._run_dir / LOG
        where = ""
        with contextlib.suppress(OSError):
            with open(log, "a", opener=private) as file:
                traceback.print_exception(error, file=file)
            where = f". Its traceback: {log}"
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return in_one_line(
            f"strategy {self._name} failed: {_short(what)}{self._place(error)}{where}"
        )

    def _place(self, error: Exception) -> str:
        """The last line of the strategy's own file that was reached, else the last of any."""
        frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is ours
        module = sys.modules.get(type(self._strategy).__module__)
        own = [f for f in frames if f.filename == getattr(module, "__file__", None)]
        frame = next(reversed(own or frames), None)
        return "" if frame is None else f" ({Path(frame.filename).name}, line {frame.lineno})"

    def _outside(self, proposed: Any) -> str:
        """Why a proposal is none of the space, in one line; empty where it is one."""
        space, told = self._runner.space, f"strategy {self._name} proposed"
        knobs = ", ".join(space.by_name)
        if not isinstance(proposed, Mapping):
            what = f"{_shown(proposed)}; allowed: None, or a dict with a value for each of {knobs}"
            return f"{told} {what}. {_BUG}"
        try:
            own_values(space, self._runner.baseline, proposed)
        except OutsideError as error:
            why = error.why.removesuffix(".")
            return in_one_line(f"{told} {error.name}={_shown(error.value)}; {why}. {_BUG}")
        missing = [name for name in space.by_name if name not in proposed]
        if missing:
            return f"{told} no {' and no '.join(missing)}; needed: a value for each knob. {_BUG}"
        return ""


def _shown(value: Any) -> str:
    """A proposed value as it is written in a configuration, else as Python writes it."""
    plain = type(value) in (bool, int, float, str, type(None))
    return in_one_line(_short(json.dumps(value) if plain else repr(value)))


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
