"""Bayesian optimisation with a Gaussian process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from perfsearch.core.hints import Hints
from perfsearch.core.knob import Configuration, Value, same_value
from perfsearch.core.option import option
from perfsearch.core.space import Space
from perfsearch.core.trial import Trial
from perfsearch.strategies._candidates import (
    NO_EFFECT,
    SCORED_WHOLE,
    Candidates,
    baseline_in,
    expected_effects,
    feasible_starts,
    from_the_baseline,
    spread_out,
    with_nulls_apart,
)
from perfsearch.strategies._history import History, cost_of, log_costs
from perfsearch.strategies._prices import Prices
from perfsearch.strategies._transfer import log_predicted
from perfsearch.strategies.base import Strategy
from perfsearch.strategies.fast import largest_fit, memory_limited_knob, stage_values

if TYPE_CHECKING:
    from perfsearch.strategies._acquisition import Scores
    from perfsearch.strategies._transfer import Belief


_UNEXPLAINED = 0.05
"""With more learned noise than this, the model does not explain the costs, and is not believed when
it expects no further gain."""

_FEWEST_INITIAL, _MOST_INITIAL = 3, 6
"""Least and most spread-out trials: in a wide space the model's own choices teach it more."""

_SPREAD_STARTS = 3
"""Trials that cost more than others, such as new starts, that are made by what is expected or
spread out, before the model chooses them."""

_TRUSTED = 0.5
"""With at least this weight a prior search takes the place of the spread-out trials."""

_PRIOR_FIRST = 3
"""Its best configurations that are tried in turn, until one of them runs."""

_FLAT = 0.01
"""With a smaller expected improvement than this after few trials, what was seen so far is flat, and
every other proposal is spread out: what is better may lie where a smooth model sees no reason to
look."""

_SURPRISING = 1.7
"""Standard deviations by which the best trial lies below what the others let expect of it, from
which on every other proposal stays around it: what made it good is not understood."""


class Bayes(Strategy):
    """Expected improvement on the logarithm of the cost, times the probability of running.

    A Gaussian process over the encoded knobs (a term a knob, one over pairs, one over all; Matern
    5/2 on ordered knobs, Hamming on the others) predicts the cost; its noise is each trial's own
    standard error plus a learned part. Failures train a model of their own
    (``_acquisition.Feasibility``), so that a good configuration beside a memory cliff is not
    shunned. The first proposals are those that are advised on what holds the baseline back
    (docs/advice.md) and that the runner would try or, stage by stage, the largest that it
    predicts to fit, then spread out by a Sobol sequence that leans to the better
    end of knobs known to be monotonic; in a wide space they are the baseline with the few knobs of
    the largest expected effect spread out. Proposals whose trials have not ended are believed to
    lie at the predicted mean (Ginsbourger et al., 2010, call it the kriging believer). Where the
    runner predicts costs, the process models the ratio to its prediction.

    Of what is expected to gain anything, that is tried which gains most a second, by what a trial
    that changes as much took before (``_prices.Prices``): what a running job can change comes
    before what takes a new process group or new processes. The first trials change cheap knobs
    only. The first three that cost more are the best so far with one dear knob changed, that of
    the largest expected effect first; where nothing is expected they are spread out.

    A smooth model is blind to a narrow valley, and three rules make up for it. In a space small
    enough to be scored whole, every other early proposal is spread out while the model expects
    little. While the best trial lies far below what the others let expect of it, every other
    proposal stays within two steps of it. Before the end, what a forest of randomised trees
    (``_gp.Forest``) still expects to gain is tried.
    """

    @dataclass(frozen=True)
    class Options:
        """Options of ``strategy=bayes``.

        Attributes:
            alpha: standard deviation of the noise on unit-variance scores, as Horovod's
                ``autotune-gaussian-process-noise``; ``None`` learns it.
            initial_points: trials spread over the space before the model decides, the baseline
                and other trials told from outside included; ``None`` is as
                many as there are knobs, at least 3 and at most 6.
            max_samples: proposals after which it ends; ``None`` leaves that to the budget.
            xi: improvement, relative, that is expected of a proposal beyond the best so far.
            min_gain: it ends when no configuration is expected to gain more than this, relative,
                also after up to six trials in a row where the model is least sure or a forest of
                trees sees more, provided that the model explains the costs to 5%; 0 never ends
                for that reason.
            warm_start: a prior search of a similar job (the same runner, knobs of the same
                names) to start from: its run directory, or its run in MLflow by id; ``auto`` takes
                the most similar one in the tracking store; ``None``: none.

        """

        alpha: float | None = option(None, above=0, high=1)
        initial_points: int | None = option(None, low=1)
        max_samples: int | None = option(None, low=1)
        xi: float = option(0.0, low=0, below=1)
        min_gain: float = option(0.0005, low=0, below=1)
        warm_start: str | None = None

    def __init__(self, space: Space, hints: Hints, seed: int, options: Any = None) -> None:
        super().__init__(space, hints, seed, options)
        self._history = History(space, seed)
        self._prices = Prices(space, self._history)
        self._candidates: Candidates | None = None
        self._asked = 0
        self._noise = 0.0
        self._turn = 0
        self._final = FinalExploration(self.options.min_gain)
        self._wide = space.size is None or space.size > SCORED_WHOLE
        few = min(max(_FEWEST_INITIAL, len(space.knobs)), _MOST_INITIAL)
        fits = hints.memory_limit_gib is not None and memory_limited_knob(space, hints) is not None
        self._unvisited = stage_values(space, hints) if fits else []
        told = len(hints.starts) + len(self._unvisited)
        few = max(few, min(told + 1, _MOST_INITIAL + 1))
        self._initial: int = self.options.initial_points or few

    @property
    def _weight(self) -> np.ndarray | None:
        """How much each knob is expected to matter; ``None`` where nothing is known of it."""
        return expected_effects(self.space, self.hints, self._history.trials)

    def ask(self) -> dict[str, Value] | None:
        """Return the configuration of largest expected gain, ``None`` when it is done."""
        limit = self.options.max_samples
        if limit is not None and self._asked >= limit:
            self.stop_reason = f"strategy.max_samples={limit} spent"
            return None
        if self._candidates is None:
            self._candidates = Candidates(self.space, self._history, self._weight)
        near = [t.configuration for t in sorted(self._history.measured(), key=cost_of)[:5]]
        near = [c for c in near if self.space.feasible(c)]
        start = self._start()
        points, rows = self._candidates.list(self._history.generator(), near, start)
        if not points:
            self.stop_reason = self._history.why_none()
            return None
        known = len(self._history.trials) + len(self._history.outstanding)
        self.expected_gain = None
        measured = len(self._history.measured())
        if measured < 2 or (known < self._initial and not self._knows_enough()):
            first = self._first(start, known)
            if first is not None:
                self._asked += 1
                return self._history.propose(first)
            cheap = np.flatnonzero(self._prices.cheap(rows))
            place: int | None = int(cheap[self._spread(rows[cheap], known)])
        else:
            place = self._by_model(points, rows, known)
        if place is None:
            return None
        self._asked += 1
        return self._history.propose(points[place])

    def tell(self, trial: Trial) -> None:
        """Note a trial that ended."""
        self._history.tell(trial)

    def describe(self) -> str:
        """One line for people."""
        measured = len(self._history.measured())
        text = (
            f"Gaussian process, expected improvement times probability of running; {measured} "
            f"trial{'s' * (measured != 1)} measured, {len(self._history.failed())} failed"
        )
        if self._belief is None:
            return text
        return f"{text}; a prior search has weight {self._share():.2f}"

    def _by_model(
        self, points: Sequence[dict[str, Value]], rows: np.ndarray, known: int
    ) -> int | None:
        """Place of the configuration that the model, or a rule beside it, chooses; ``None`` at the
        end.
        """
        share = self._share()
        scores = self._scores(points, rows, share)
        if share and scores.gain.max() < self.options.min_gain:
            # a prior search proposes, but ends nothing
            scores = self._scores(points, rows, 0.0)
        seconds = self._prices.seconds(rows)
        most = float(scores.gain.max())
        place = self._most_a_second(scores.gain, seconds)
        self.expected_gain = float(scores.gain[place])
        best = self._history.best()
        assert best is not None
        self._final.note(cost_of(best), most)
        if most < self.options.min_gain and self._settled():
            last = self._final.next(scores, seconds)
            if last is None:
                self.stop_reason = (
                    f"converged: no configuration is expected to gain more than "
                    f"{self.options.min_gain:.2%} (strategy.min_gain)"
                )
            return last
        early = len(self._history.measured()) < self._enough() and not (share or self._wide)
        if scores.largest_improvement < _FLAT and early:
            self._turn += 1
            if self._turn % 2 == 0:
                runs = np.flatnonzero((scores.gain > 0) & ~self._prices.dear(rows))
                if len(runs):
                    return int(runs[self._spread(rows[runs], known)])
        elif scores.surprise > _SURPRISING:
            self._turn += 1
            if self._turn % 2:
                return self._near(best.configuration, scores, seconds, place)
        return self._dear_start(rows, scores, place) if not share else place

    def _dear_start(self, rows: np.ndarray, scores: Scores, place: int) -> int:
        """``place``, or where it is one of the first that cost more than others do, such as a new
        start, what the runner expects most of; one that is spread out where it expects nothing:
        around cheap trials alone a model believes too much.
        """
        dear = self._prices.dear(rows)
        starts = self._prices.starts()
        if not dear[place] or starts > _SPREAD_STARTS:
            return place
        expected = self._expected_most()
        if expected is not None:
            return expected
        runs = np.flatnonzero((scores.gain > 0) & dear)
        return int(runs[self._spread(rows[runs], starts)]) if len(runs) else place

    def _expected_most(self) -> int | None:
        """Place of the best so far with another value of the one knob that is expected to matter
        most, of those that are dear to change and were never changed; ``None``: there is none.
        """
        weight, best = self._weight, self._history.best()
        if weight is None or best is None:
            return None
        assert self._candidates is not None
        cheap, start = self._prices.cheap_knobs(), self.hints.baseline
        for column in np.argsort(-weight, kind="stable"):
            knob = self.space.knobs[column]
            was_changed = any(
                not same_value(trial.configuration[knob.name], start.get(knob.name, knob.default))
                for trial in self._history.of_space
            )
            if cheap[column] or was_changed or weight[column] <= NO_EFFECT:
                continue
            for value in knob.values:
                place = self._candidates.place_of({**best.configuration, knob.name: value})
                if place is not None:
                    return place
        return None

    def _most_a_second(self, gain: np.ndarray, seconds: np.ndarray) -> int:
        """Place of the most expected gain a second, of what is expected to gain anything."""
        worth = gain >= self.options.min_gain
        return int(np.argmax(np.where(worth, gain, 0.0) / seconds if worth.any() else gain))

    @cached_property
    def _belief(self) -> Belief | None:
        """What a prior search lets expect; made when it is first needed, as the runner may not
        be ready to predict before.
        """
        if self.hints.prior_search is None:
            return None
        from perfsearch.strategies._gp import Prior
        from perfsearch.strategies._transfer import believed

        return believed(self.space, self.hints, Prior(weight=self._weight))

    def _share(self) -> float:
        """How much of the prior search is believed, by the trials so far; 0 without one."""
        if self._belief is None:
            return 0.0
        measured = self._history.measured()
        points = [t.configuration for t in measured]
        logs, error = log_costs(measured)
        logs -= log_predicted(self.hints, points)
        rows = with_nulls_apart(self.space, self.space.encode(points))
        return self._belief.share(rows, logs, error)

    def _knows_enough(self) -> bool:
        """Whether a prior search replaces the first trials: one of the runner's own is made."""
        starts = feasible_starts(self.space, self.hints, self._history.trials)
        untried = bool(starts) and not any(self._history.taken(point) for point in starts)
        return self._share() >= _TRUSTED and not untried

    def _start(self) -> dict[str, Value] | None:
        """The baseline as a configuration of this space, where it is one."""
        start = baseline_in(self.space, self.hints)
        return start if self.space.feasible(start) else None

    def _first(self, start: dict[str, Value] | None, known: int) -> dict[str, Value] | None:
        """The best of a prior search; then what the runner would try first, or the largest that
        is predicted to fit in each stage; then one of the first trials of a wide space whose knobs
        are known to differ in effect.
        """
        if self._belief is not None and len(self._history.measured()) < 2:
            for point in self._belief.best[:_PRIOR_FIRST]:
                if not self._history.taken(point):
                    return point
        starts = self._history.untaken(
            feasible_starts(self.space, self.hints, self._history.trials)
        )
        if starts:
            return self._prices.cheapest_first(starts)[0]
        while self._unvisited and start is not None:
            large = largest_fit(self.space, self.hints, start, self._unvisited.pop(0))
            if large is not None and not self._history.taken(large):
                return large
        if start is None or self._weight is None or not self._wide:
            return None
        weight = np.where(self._prices.cheap_knobs(), self._weight, 0.0)
        point = from_the_baseline(self.space, start, weight, known, self.seed)
        point = self._prices.with_cheap_changes(point)
        return point if self.space.feasible(point) and not self._history.taken(point) else None

    def _spread(self, rows: np.ndarray, known: int) -> int:
        """Place of the next of the configurations that are spread over the space."""
        lean = np.array([self.hints.monotonic.get(k.name, 0) for k in self.space.knobs])
        return spread_out(rows, self.space.ordered_columns, lean, known, self.seed)

    def _near(
        self, best: Configuration, scores: Scores, seconds: np.ndarray, otherwise: int
    ) -> int:
        """Place of the largest expected gain a second around the best, where anything is there."""
        assert self._candidates is not None
        gain, optimistic = scores.gain / seconds, scores.optimistic_gain / seconds
        places = self._candidates.around(best)
        return max(places, key=lambda i: (gain[i], optimistic[i]), default=otherwise)

    def _enough(self) -> int:
        """Measured trials from which on the model may be trusted when it expects no gain."""
        return self._initial + 2 * len(self.space.knobs)

    def _settled(self) -> bool:
        """Whether enough was seen to trust the model when it expects no gain."""
        if self._noise > _UNEXPLAINED:
            return False
        return len(self._history.measured()) >= self._enough() and not self._history.outstanding

    def _scores(self, points: Sequence[dict[str, Value]], rows: np.ndarray, share: float) -> Scores:
        """Each configuration's, with ``share`` of what a prior search found believed."""
        from perfsearch.strategies._acquisition import Acquisition

        acquisition = Acquisition(self.space, self.hints, self._history, self._belief, share)
        scores = acquisition.scores(
            points, rows, alpha=self.options.alpha, xi=self.options.xi, weight=self._weight
        )
        self._noise = scores.noise
        return scores


# -----------------------------------------------------------------------------
# Whether a model that expects no further gain is believed yet.

_BY_OWN_DOUBT = 2
"""Trials in a row where the model itself is least sure: a few early trials may have misled it."""

_BY_FOREST = 4
"""Trials that a second model may take where it sees a gain, with those that the first one left."""


class FinalExploration:
    """Trials before the end, taken one by one until the model is believed.

    First come those where the cost could be lowest by the model's own doubt; when none are left,
    or after two, those by a second model of another kind, which sees what the first is blind to.
    A better trial than the best so far starts them anew.

    Args:
        least: gain, relative, that is worth a trial.

    """

    def __init__(self, least: float) -> None:
        self._least = least
        self._count = 0
        self._best = math.inf

    def note(self, best: float, expected_gain: float) -> None:
        """Note the best cost so far and the gain that the model expects."""
        if best < self._best or expected_gain >= self._least:
            self._count = 0
        self._best = best

    def next(self, scores: Scores, seconds: np.ndarray) -> int | None:
        """Index of the configuration to try; ``None`` when it is time to end.

        Args:
            scores: of the configurations.
            seconds: that a trial of each takes.

        """
        if self._count < _BY_OWN_DOUBT and scores.optimistic_gain.max() >= self._least:
            self._count += 1
            return self._cheapest(scores.optimistic_gain, seconds)
        if self._count >= _BY_OWN_DOUBT + _BY_FOREST or scores.by_forest is None:
            return None
        gain = scores.by_forest()
        if gain.max() < self._least:
            return None
        self._count += 1
        return self._cheapest(gain, seconds)

    def _cheapest(self, gain: np.ndarray, seconds: np.ndarray) -> int:
        """Index of the most gain a second, of what is worth a trial."""
        return int(np.argmax(np.where(gain >= self._least, gain, 0.0) / seconds))
