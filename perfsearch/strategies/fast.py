"""A heuristic search that uses what is known of the knobs, after DeepSpeed's fast mode."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from perfsearch.core.hints import Hints
from perfsearch.core.knob import Configuration, Knob, Value, same_value
from perfsearch.core.option import option
from perfsearch.core.space import Space, key_of
from perfsearch.core.trial import Trial
from perfsearch.strategies._candidates import advised, baseline_in, feasible_starts
from perfsearch.strategies._history import History, best_of, cost_of
from perfsearch.strategies._prices import Prices
from perfsearch.strategies.base import Strategy

_DOUBT = 1.1
"""What is predicted to exceed the limit by less than this factor is tried once the rest fits."""


class Fast(Strategy):
    """Stage by stage, the largest micro-batch that fits and a few below it; then single moves.

    The first part needs a knob of which more is faster until memory ends
    (``Hints.monotonic``): for each value of ``Hints.stage_knob``, cheapest first, its largest
    value that fits is found from the runner's prediction, then by bisection, and a short list
    below it is measured. Growth ends early where it stops paying. The next stage starts from the
    best of all knobs so far and from where the last stage ended, and is never skipped on the
    ground that an earlier one was better. Then comes what is advised on what holds the baseline
    back (docs/advice.md). Without such a knob, that and what the runner would try come first. The
    second part moves one knob at a time from the best
    configuration until nothing improves any more: first what a running job can change, then what
    takes a new start (``_prices.Prices``), and of these knobs of the largest expected effect first.
    Knobs whose change costs more than that of others are first moved together.

    The metric, and its direction, is that of ``objective.metric``.
    """

    @dataclass(frozen=True)
    class Options:
        """Options of ``strategy=fast``, with the meanings and defaults of DeepSpeed's autotuner.

        Attributes:
            early_stopping: trials in a row without a new best, in the second part, after which it
                goes on to moves that cost more, and ends where there are none
                (``tuner_early_stopping``).
            num_trials: proposals after which it ends (``tuner_num_trials``).
            num_micro_batches: entries of the short list (``num_tuning_micro_batch_sizes``).
            plateau: growth of the micro-batch ends when a step gains less than this share.

        """

        early_stopping: int = option(5, low=1)
        num_trials: int = option(50, low=1)
        num_micro_batches: int = option(3, low=1)
        plateau: float = option(0.05, low=0, below=1)

    def __init__(self, space: Space, hints: Hints, seed: int, options: Any = None) -> None:
        super().__init__(space, hints, seed, options)
        self._history = History(space, seed)
        self._asked = 0
        self._part = ""
        self._stage_keys: set[str] = set()
        self._moved: dict[str, bool] = {}
        self._prices = Prices(space, self._history)

    def ask(self) -> dict[str, Value] | None:
        """Return the next configuration in order, ``None`` when it is done."""
        if self._asked >= self.options.num_trials:
            self.stop_reason = f"strategy.num_trials={self.options.num_trials} spent"
            return None
        tired = False
        for point in self._proposals():
            if self._history.taken(point):
                continue
            if self._part in ("moves", "rest"):
                dear = self._is_dear(point)
                if self._since_best(dear) >= self.options.early_stopping:
                    tired = True
                    if self._part == "rest":
                        break
                    continue
                self._moved[key_of(point)] = dear
            self._asked += 1
            return self._history.propose(point)
        self.stop_reason = self._history.why_none()
        if tired:
            self.stop_reason = (
                f"no new best in {self.options.early_stopping} trials (strategy.early_stopping="
                f"{self.options.early_stopping})"
            )
        return None

    def tell(self, trial: Trial) -> None:
        """Note a trial that ended."""
        self._history.tell(trial)

    def describe(self) -> str:
        """One line for people."""
        if self._part in ("moves", "rest"):
            return "fast: one knob at a time from the best configuration"
        knob = memory_limited_knob(self.space, self.hints)
        if knob is None:
            return "fast: first what the runner expects to be fast, then one knob at a time"
        most = "largest" if self.hints.monotonic[knob.name] > 0 else "smallest"
        if self._part:
            return f"fast: the {most} {knob.name} that fits, {self._part}"
        stage = self.hints.stage_knob
        each = f" with each {stage}" if stage in self.space.by_name else ""
        return f"fast: first the {most} {knob.name} that fits{each}, then one knob at a time"

    def _proposals(self) -> Iterator[dict[str, Value]]:
        """All of them in order, as far as the history decides it; ``ask`` skips what was tried."""
        start = baseline_in(self.space, self.hints)
        if self.space.feasible(start):
            yield start
        self._stage_keys = {key_of(start)}
        limited = memory_limited_knob(self.space, self.hints)
        if limited is None:
            starts = feasible_starts(self.space, self.hints, self._history.trials)
            yield from self._prices.cheapest_first(starts)
        else:
            fitted = 0
            for stage in stage_values(self.space, self.hints):
                self._part = f"stage {stage}" if stage is not None else "the only stage"
                base = self._best_of_stages(start)
                if stage is not None and self.hints.stage_knob is not None:
                    base = {**base, self.hints.stage_knob: stage}
                fitted = yield from self._largest_fit(limited, base, fitted)
            base = self._best_of_stages(start)
            yield from advised(self.space, self.hints, self._history.trials, base)
        self._part = "moves"
        yield from self._moves(start)
        # Whatever single moves cannot reach, so that only the options end it.
        self._part = "rest"
        generator = self._history.generator()
        while (point := self._history.draw(generator)) is not None:
            yield point

    def _largest_fit(
        self, knob: Knob, base: dict[str, Value], fitted: int
    ) -> Generator[dict[str, Value], None, int]:
        """Measure up to the largest value that runs, then the short list; return its place."""
        sweep = sweep_of(self.space, self.hints, knob, base)
        if not sweep:
            return fitted
        top = largest_predicted_fit(self.hints, sweep)
        low, high = -1, len(sweep)
        place = min(max(fitted, 0), len(sweep) - 1) if top is None else top
        gained = 1.0
        while low + 1 < high:
            self._stage_keys.add(key_of(sweep[place]))
            yield sweep[place]
            cost, before = self._cost(sweep[place]), self._cost(sweep[low]) if low >= 0 else None
            if cost is None:
                high = place
            else:
                gained = 1.0 if before is None else 1.0 - cost / before
                low = place
                if gained < self.options.plateau:
                    break
            if low + 1 >= high:
                break
            if top is not None and low == top and high == len(sweep):
                if not self._may_fit(sweep[top + 1]):
                    break
                place = top + 1
            elif low < 0 and high == top:  # the prediction was too bold, most likely by one
                place = high - 1
            elif high == len(sweep):
                place = min(len(sweep) - 1, max(low + 1, (low + len(sweep)) // 2))
            else:
                place = (low + high) // 2 if low >= 0 else high // 2
        if low >= 0:
            for point in self._short_list(sweep, low):
                self._stage_keys.add(key_of(point))
                yield point
        return max(low, 0)

    def _short_list(self, sweep: list[dict[str, Value]], top: int) -> list[dict[str, Value]]:
        """Up to ``num_micro_batches`` places from ``top`` down to about half of it."""
        bottom = max(0, top - max(self.options.num_micro_batches, (top + 1) // 2))
        count = min(self.options.num_micro_batches, top - bottom)
        return [sweep[top - round(i * (top - bottom) / count)] for i in range(1, count + 1)]

    def _may_fit(self, point: dict[str, Value]) -> bool:
        peak, limit = self.hints.predict(point).peak_gib, self.hints.memory_limit_gib
        return peak is None or limit is None or peak <= limit * _DOUBT

    def _moves(self, start: dict[str, Value]) -> Iterator[dict[str, Value]]:
        """Single moves from the best configuration, then from the next best, and so on."""
        expanded: set[str] = set()
        while True:
            order = sorted(self._history.measured(), key=cost_of)
            points = [self.space.canonical(t.configuration) for t in order]
            fresh = [p for p in points or [start] if key_of(p) not in expanded]
            if not fresh:
                return
            center = fresh[0]
            expanded.add(key_of(center))
            yield from self._neighbours(center)

    def _neighbours(self, center: dict[str, Value]) -> list[dict[str, Value]]:
        """Feasible single moves, cheap ones first, by the expected effect of their knobs; all the
        others are first moved together.
        """
        ranked = [n for n in self.hints.effect_order if n in self.space.by_name]
        names = [*ranked, *(k.name for k in self.space.knobs if k.name not in ranked)]
        moves = self.space.neighbours(center)
        moves.sort(key=lambda move: names.index(_changed(center, move, names)))
        dear = self._dear()
        cheap = [move for move in moves if _changed(center, move, names) not in dear]
        others = [move for move in moves if _changed(center, move, names) in dear]
        joint = dict(center)
        for move in reversed(others):  # the first move of each knob
            name = _changed(center, move, names)
            joint[name] = move[name]
        joint = self.space.canonical(joint)
        together = [joint] if len(others) > 1 and self.space.feasible(joint) else []
        return [*cheap, *together, *others]

    def _dear(self) -> set[str]:
        """Names of the knobs whose change costs more than that of others."""
        cheap = self._prices.cheap_knobs()
        return {k.name for k, is_cheap in zip(self.space.knobs, cheap, strict=True) if not is_cheap}

    def _is_dear(self, point: dict[str, Value]) -> bool:
        """Whether such a knob differs from the best so far."""
        best = self._history.best()
        center = baseline_in(self.space, self.hints) if best is None else best.configuration
        return any(not same_value(point[name], center[name]) for name in self._dear())

    def _best_of_stages(self, start: dict[str, Value]) -> dict[str, Value]:
        """The best of the stages so far; what the second part finds does not restart the first."""
        tried = [
            t
            for t in self._history.measured()
            if self._history.key(t.configuration) in self._stage_keys
        ]
        best = best_of(tried)
        return start if best is None else self.space.canonical(best.configuration)

    def _cost(self, point: dict[str, Value]) -> float | None:
        key = key_of(point)
        ran = [*self._history.measured(), *self._history.bounded()]  # what was cut short fits too
        costs = [t.cost for t in ran if self._history.key(t.configuration) == key]
        return min((c for c in costs if c is not None), default=None)

    def _since_best(self, dear: bool) -> int:
        """Trials of the second part told since the best one, dear or cheap ones."""
        best = self._history.best()
        if best is None:
            return 0
        later = self._history.trials[self._history.trials.index(best) + 1 :]
        keys = [self._history.key(t.configuration) for t in later]
        return sum(key is not None and self._moved.get(key) is dear for key in keys)


def _changed(center: dict[str, Value], move: dict[str, Value], names: list[str]) -> str:
    return next((n for n in names if not same_value(center[n], move[n])), names[-1])


# -----------------------------------------------------------------------------
# The largest configuration that is predicted to fit (also where ``bayes`` begins).


def memory_limited_knob(space: Space, hints: Hints) -> Knob | None:
    """The first ordered knob of which more (or less) is faster until memory ends."""
    knobs = [space.by_name[name] for name in hints.monotonic if name in space.by_name]
    usable = [k for k in knobs if k.is_ordered and k.count is not None and k.count > 1]
    return usable[0] if usable else None


def stage_values(space: Space, hints: Hints) -> list[Value]:
    """Values of the stage knob, cheapest first; a single ``None`` where there is no such knob."""
    knob = space.by_name.get(hints.stage_knob or "")
    return [None] if knob is None else list(knob.choices() or (None,))


def sweep_of(space: Space, hints: Hints, knob: Knob, base: Configuration) -> list[dict[str, Value]]:
    """Feasible configurations that differ from ``base`` in ``knob`` only, the slowest first."""
    values = list(knob.choices() or ())
    if hints.monotonic[knob.name] < 0:
        values.reverse()
    points = [space.canonical({**base, knob.name: v}) for v in values]
    return [point for point in points if space.feasible(point)]


def largest_predicted_fit(hints: Hints, sweep: list[dict[str, Value]]) -> int | None:
    """Place of the largest that is predicted to fit, 0 where none is; ``None`` where any cannot
    be predicted.
    """
    limit = hints.memory_limit_gib
    peaks = [hints.predict(point).peak_gib for point in sweep]
    if limit is None or any(peak is None for peak in peaks):
        return None
    fits = [i for i, peak in enumerate(peaks) if peak is not None and peak <= limit]
    return fits[-1] if fits else 0


def largest_fit(
    space: Space, hints: Hints, base: Configuration, stage: Value
) -> dict[str, Value] | None:
    """``base`` at a stage, with as much of the memory-limited knob as is predicted to fit.

    ``None`` without such a knob, without predictions, or where not even the least fits.
    """
    knob = memory_limited_knob(space, hints)
    if knob is None:
        return None
    if stage is not None and hints.stage_knob is not None:
        base = {**base, hints.stage_knob: stage}
    sweep = sweep_of(space, hints, knob, base)
    top = largest_predicted_fit(hints, sweep) if sweep else None
    if top is None:
        return None
    peak, limit = hints.predict(sweep[top]).peak_gib, hints.memory_limit_gib
    return sweep[top] if peak is not None and limit is not None and peak <= limit else None
