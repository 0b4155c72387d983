"""The strategy that is used when none is named."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from perfsearch.core.knob import Value
from perfsearch.core.option import option
from perfsearch.core.trial import Trial
from perfsearch.strategies.base import Strategy
from perfsearch.strategies.bayes import Bayes
from perfsearch.strategies.grid import Grid
from perfsearch.strategies.mcmc import Mcmc


class Auto(Strategy):
    """Chooses by the space: all of a small one, a Markov chain on predictions where the runner
    predicts costs, a Gaussian process otherwise (which ``benchmarks/results/strategies.md`` found
    best).
    """

    @dataclass(frozen=True)
    class Options:
        """Options of ``strategy=auto``.

        Attributes:
            try_all: spaces of up to this many configurations are tried whole.
            min_gain: a search of a larger one ends when no configuration is expected to gain more
                than this, relative; 0 never ends for that reason.
            warm_start: a prior search of a similar job to start from, as with
                ``strategy=bayes``; it tells nothing where all are tried or costs are predicted.

        """

        try_all: int = option(8, low=0)
        min_gain: float = option(0.0005, low=0, below=1)
        warm_start: str | None = None

    @cached_property
    def _choice(self) -> tuple[str, Strategy]:
        """Why, and the strategy itself; made when it is first needed.

        The runner may have to describe the job first, which goes on beside the baseline.
        """
        space, hints, seed = self.space, self.hints, self.seed
        size = space.size
        start = hints.baseline
        if size is not None and size <= self.options.try_all:
            return f"{size} configurations are few enough to try all", Grid(space, hints, seed)
        if space.feasible(start) and hints.predict(start).cost is not None:
            why = "the runner predicts costs, so the search runs on predictions"
            chosen = Mcmc(space, hints, seed)
            # to be shown like those of a strategy of one's own
            chosen.chain_results = self.chain_results
            return why, chosen
        why = (
            "more configurations than can be listed"
            if size is None
            else f"{size} configurations are too many to try all"
        )
        return why, Bayes(space, hints, seed, Bayes.Options(min_gain=self.options.min_gain))

    def ask(self) -> dict[str, Value] | None:
        """Return what the chosen strategy proposes."""
        chosen = self._choice[1]
        point = chosen.ask()
        self.stop_reason = chosen.stop_reason
        self.expected_gain = chosen.expected_gain
        return point

    def tell(self, trial: Trial) -> None:
        """Pass the trial on to the chosen strategy."""
        self._choice[1].tell(trial)

    def describe(self) -> str:
        """One line for people."""
        why, chosen = self._choice
        text = f"{why}: {chosen.describe()}"
        if self.hints.prior_search is None or isinstance(chosen, Bayes):
            return text
        return f"{text}; strategy.warm_start has no part in it"
