"""Any strategy on one group of knobs after another, those with the most to gain first.

This is what ``runner.knobs=auto`` makes of the strategy that is named: the baseline's timings
bound what each group can give (``perfsearch.metrics.bounds``), and a group that cannot give
anything worth a trial is left at today's values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from perfsearch.core.hints import Hints, PriorSearch
from perfsearch.core.knob import Configuration, Knob, Value, same_value
from perfsearch.core.space import Constraint, Space
from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.metrics.bounds import affected_parts, upper_bounds
from perfsearch.strategies._candidates import Projection, feasible_starts
from perfsearch.strategies._history import History, best_of
from perfsearch.strategies.base import Strategy

_LEAST_SHARE = 0.005
"""Share of the step below which a group is not searched."""

_PATIENCE_PER_KNOB = 3
_LEAST_PATIENCE = 6


@dataclass(frozen=True)
class Group:
    """Knobs that are searched together.

    Attributes:
        part: of the step that they can make shorter; empty where nothing is known of the step.
        share: the most of it that they can save.
        knobs: their names.

    """

    part: str
    share: float
    knobs: tuple[str, ...]


class Staged(Strategy):
    """Searches group by group, the others held at the best that is known.

    A group is left when its strategy is done, or after some proposals in a row without a new best.

    Args:
        space: of all groups.
        hints: of all groups.
        seed: each group's strategy gets the same.
        make: builds a group's strategy from its space and hints.

    """

    def __init__(
        self, space: Space, hints: Hints, seed: int, make: Callable[[Space, Hints], Strategy]
    ) -> None:
        super().__init__(space, hints, seed)
        self._make = make
        self._trials: list[Trial] = []
        self._groups: list[Group] | None = None
        self._present: Group | None = None
        self._inner: Strategy | None = None
        self._fixed: dict[str, Value] = dict(hints.baseline)
        self._without_best = 0

    def ask(self) -> dict[str, Value] | None:
        """What the present group's strategy proposes, the other knobs at the best known values."""
        if self._groups is None:
            self._groups = self._ordered()
        while True:
            if self._inner is None and not self._next_group():
                self.expected_gain = None
                self.stop_reason = "every group of knobs with something to gain was searched"
                return None
            assert self._inner is not None and self._present is not None
            patience = max(_LEAST_PATIENCE, _PATIENCE_PER_KNOB * len(self._present.knobs))
            proposal = self._inner.ask() if self._without_best < patience else None
            if proposal is not None:
                self.expected_gain = self._inner.expected_gain
                return self.space.canonical({**self._fixed, **proposal})
            self._inner = None

    def tell(self, trial: Trial) -> None:
        """Take note, and pass it on where it lies in the present group."""
        best = self._best()
        self._trials.append(trial)
        if trial.purpose is Purpose.SEARCH:
            better = self._best() is not best
            self._without_best = 0 if better else self._without_best + 1
        self._pass_on(trial)

    def describe(self) -> str:
        """The groups in their order, and what the first one's strategy says."""
        if self._groups is None:
            self._groups = self._ordered()
        words = [f"{g.part or 'all'} ({', '.join(g.knobs)})" for g in self._groups]
        return "group by group: " + ", then ".join(words) if words else "no group is worth a trial"

    def _ordered(self) -> list[Group]:
        baseline = next((t for t in self._trials if t.purpose is Purpose.BASELINE), None)
        measured = None if baseline is None else baseline.measurement
        found = [] if measured is None else upper_bounds(measured)
        knobs = list(self.space.knobs)
        if not found:
            return [Group("", 1.0, tuple(knob.name for knob in knobs))]
        groups = []
        for bound in found:
            mine = [knob.name for knob in knobs if bound.part in affected_parts(knob)]
            knobs = [knob for knob in knobs if knob.name not in mine]
            if mine and bound.share >= _LEAST_SHARE:
                groups.append(Group(bound.part, bound.share, tuple(mine)))
        return groups

    def _best(self, trials: Sequence[Trial] | None = None) -> Trial | None:
        among = self._trials if trials is None else trials
        return best_of([t for t in among if t.status is Status.OK and t.cost is not None])

    def _center(self) -> dict[str, Value]:
        """The best configuration that may be proposed, or the nearest such to today's."""
        feasible = [t for t in self._trials if self.space.feasible(t.configuration)]
        best = self._best(feasible)
        point = dict(self.hints.baseline if best is None else best.configuration)
        if self.space.feasible(point):
            return point
        nearest = Projection(self.space, History(self.space, self.seed)).nearest_untried(point)
        return point if nearest is None else nearest

    def _next_group(self) -> bool:
        while self._groups:
            self._present = self._groups.pop(0)
            self._fixed = self._center()
            space = part_of(self.space, self._present.knobs, self._fixed)
            if space.knobs:
                self._inner = self._make(space, self._narrowed(space))
                self._without_best = 0
                for trial in self._trials:
                    self._pass_on(trial)
                return True
        return False

    def _narrowed(self, space: Space) -> Hints:
        names, hints, fixed = space.by_name, self.hints, dict(self._fixed)
        narrowed = replace(
            hints,
            baseline={name: fixed[name] for name in names},
            effect_order=tuple(n for n in hints.effect_order if n in names),
            monotonic={n: sign for n, sign in hints.monotonic.items() if n in names},
            stage_knob=hints.stage_knob if hints.stage_knob in names else None,
            predict=lambda configuration: hints.predict({**fixed, **configuration}),
            neighbours={
                n: tuple(o for o in others if o in names)
                for n, others in hints.neighbours.items()
                if n in names
            },
            prior_search=_of_part(hints.prior_search, space, fixed),
        )
        # the baseline's trial is none of a later group, and what is advised comes of it
        starts = feasible_starts(space, narrowed, self._trials)
        return replace(narrowed, starts=tuple(starts))

    def _pass_on(self, trial: Trial) -> None:
        """Tell the inner strategy, in its own knobs, of a trial that differs in no other."""
        if self._inner is None:
            return
        names = self._inner.space.by_name
        others = [n for n in self._fixed if n not in names]
        whole = trial.configuration
        inside = self.space.canonical({**self._fixed, **{n: whole[n] for n in names}})
        if all(same_value(whole[n], inside[n]) for n in others):
            mine = {name: whole[name] for name in names}
            self._inner.tell(replace(trial, configuration=mine))


def _of_part(prior: PriorSearch | None, space: Space, fixed: Configuration) -> PriorSearch | None:
    """What a prior search found with the other knobs as they are held now."""
    if prior is None:
        return None
    names = space.by_name
    others = [name for name in fixed if name not in names]
    costs = tuple(
        ({name: point[name] for name in names}, log)
        for point, log in prior.costs
        if all(name in point and same_value(point[name], fixed[name]) for name in others)
    )
    return PriorSearch(prior.source, costs)


def part_of(space: Space, names: tuple[str, ...], fixed: Configuration) -> Space:
    """The space of some knobs, the others fixed.

    A knob whose condition the fixed values do not meet, and one with a single value, is left out.
    """
    kept = [knob for knob in space.knobs if knob.name in names and knob.count != 1]
    inside = {knob.name for knob in kept}
    knobs = [k for knob in kept if (k := _without_met(knob, inside, fixed)) is not None]

    def whole(configuration: Configuration) -> Mapping[str, Value]:
        return space.canonical({**fixed, **configuration})

    return Space(knobs, [Constraint("space", lambda c: space.feasible(whole(c)))])


def _without_met(knob: Knob, inside: set[str], fixed: Configuration) -> Knob | None:
    when = {}
    for other, values in knob.when.items():
        if other in inside:
            when[other] = values
        elif not any(same_value(fixed[other], value) for value in values):
            return None
    return replace(knob, when=when)
