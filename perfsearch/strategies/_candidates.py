"""Which configurations a model-based strategy scores before each proposal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.stats import qmc

from perfsearch.core.hints import Hints
from perfsearch.core.knob import Configuration, Value, same_value
from perfsearch.core.space import Space, key_of
from perfsearch.core.trial import Purpose, Trial
from perfsearch.metrics.advice import proposals
from perfsearch.metrics.bounds import NO_HEADROOM, headroom_of, upper_bounds
from perfsearch.metrics.diagnosis import CAUSES
from perfsearch.strategies._history import History

SCORED_WHOLE = 8_000
"""Spaces up to this size are scored whole; of larger ones a sample and the neighbourhood."""

_SAMPLE = 1_000
_CHANGED = 800

_FEW_CHANGES, _SOME_CHANGES = 0.5, 2.0
"""Mean number of knobs that are changed beyond the first, one or the other at random."""

_SPREAD = 3
"""Knobs of the largest expected effect that the first trials in a wide space spread out."""

_STRAY = 0.2
"""Chance that one of the other knobs changes in them."""

_NULL_APART = 0.5
"""Distance of ``null`` from the least value of an ordered knob, in units of the knob's range."""

_CROSSED = 0.3
"""Share of changed configurations that first take half of their values from another centre."""

_SMALL_RING = 64
"""Neighbours of a configuration up to which the neighbours of each of them are looked at, too."""

_DECAY, _LEAST_EFFECT = 0.75, 0.1
"""Expected variance of a knob's own effect over that of the knob expected to matter more, and
the least of it relative to the first: the order may be wrong."""

NO_EFFECT = 1e-3
"""The same of a knob that can gain next to nothing."""


class Candidates:
    """Untried feasible configurations with their encoding, cheap to list again and again.

    A space of up to ``SCORED_WHOLE`` configurations is listed whole. Of a larger one there are a
    fixed sample, the neighbours of the best, and the best and the baseline with a few knobs
    changed: in a wide space, what differs from them in most knobs teaches little.

    Args:
        space: where they come from.
        history: what was tried.
        weight: how likely each knob is changed, relative to the others; ``None``: all alike.

    """

    def __init__(self, space: Space, history: History, weight: np.ndarray | None = None) -> None:
        self.space = space
        self._history = history
        chances = np.ones(len(space.knobs)) if weight is None else weight
        self._chances = chances / chances.sum()
        listed = space.listed()
        self._whole = listed if listed is not None and len(listed) <= SCORED_WHOLE else None
        self._keys = [key_of(point) for point in self._whole or ()]
        self._rows = None if self._whole is None else space.encode(self._whole)
        self._places: dict[str, int] = {}
        self._pool: tuple[dict[str, dict[str, Value]], np.ndarray] | None = None

    def around(self, center: Configuration) -> Sequence[int]:
        """Places, in what ``list`` returned last, of those one or two steps from ``center``."""
        ring = self.space.neighbours(center)
        inner = ring if len(ring) <= _SMALL_RING else ring[:: len(ring) // 8]
        points = [*ring, *(second for point in inner for second in self.space.neighbours(point))]
        return sorted({self._places[k] for p in points if (k := key_of(p)) in self._places})

    def place_of(self, point: Configuration) -> int | None:
        """Place of a configuration in what ``list`` returned last, where it is there."""
        return self._places.get(key_of(self.space.canonical(point)))

    def list(
        self,
        generator: np.random.Generator,
        near: Sequence[Configuration] = (),
        baseline: Configuration | None = None,
    ) -> tuple[list[dict[str, Value]], np.ndarray]:
        """Untried configurations and their rows; in a large space those around ``near`` too."""
        if self._whole is not None and self._rows is not None:
            free = [i for i, key in enumerate(self._keys) if not self._history.taken_key(key)]
            self._places = {self._keys[i]: place for place, i in enumerate(free)}
            return [self._whole[i] for i in free], self._rows[free]
        if self._pool is None:
            self._pool = self._draw(generator)
        found, pool_rows = dict(self._pool[0]), self._pool[1]
        pooled = len(found)
        for center in near:
            ring = self.space.neighbours(center)
            for point in ring:
                found.setdefault(key_of(point), point)
            for point in ring[:: max(1, len(ring) // 8)]:
                for second in self.space.neighbours(point):
                    found.setdefault(key_of(second), second)
        centers = [*([baseline] if baseline is not None else []), *near]
        for _ in range(_CHANGED if centers else 0):
            point = self._changed(generator, centers)
            key = key_of(point)
            if key not in found and self.space.feasible(point):
                found[key] = point
        points = list(found.values())
        rows = np.vstack([pool_rows, self.space.encode(points[pooled:])])
        keys = list(found)
        free = [i for i, key in enumerate(keys) if not self._history.taken_key(key)]
        self._places = {keys[i]: place for place, i in enumerate(free)}
        return [points[i] for i in free], rows[free]

    def _changed(
        self, generator: np.random.Generator, centers: Sequence[Configuration]
    ) -> dict[str, Value]:
        """One of ``centers`` with a few values drawn anew."""
        point = dict(centers[int(generator.integers(len(centers)))])
        if generator.random() < _CROSSED:
            other = centers[int(generator.integers(len(centers)))]
            mixed = generator.random(len(self.space.knobs)) < 0.5
            point.update(
                {k.name: other[k.name] for k, m in zip(self.space.knobs, mixed, strict=True) if m}
            )
        mean = _FEW_CHANGES if generator.random() < 0.5 else _SOME_CHANGES
        count = min(1 + int(generator.poisson(mean)), len(self.space.knobs))
        places = generator.choice(len(self._chances), count, replace=False, p=self._chances)
        for place in places:
            knob = self.space.knobs[place]
            point[knob.name] = knob.draw(generator)
        return self.space.canonical(point)

    def _draw(
        self, generator: np.random.Generator
    ) -> tuple[dict[str, dict[str, Value]], np.ndarray]:
        """A sample of a large space and its rows, drawn once: it takes most of an ask's time."""
        pool: dict[str, dict[str, Value]] = {}
        for _ in range(_SAMPLE):
            try:
                point = self.space.sample(generator)
            except LookupError:
                break
            pool.setdefault(key_of(point), point)
        return pool, self.space.encode(list(pool.values()))


def spread_out(
    rows: np.ndarray,
    ordered: np.ndarray,
    lean: np.ndarray,
    position: int,
    seed: int,
) -> int:
    """Index of the row nearest to the ``position``-th point of a scrambled Sobol sequence.

    Args:
        rows: encoded candidates.
        ordered: which columns may be compared by distance.
        lean: per column, +1 or -1 to draw more from the upper or lower end, 0 for neither.
        position: how many points of the sequence went before.
        seed: seed of the scrambling.

    """
    columns = rows.shape[1]
    point = _sobol_point(columns, position, seed)
    point = np.where(lean > 0, 1.0 - (1.0 - point) ** 2, np.where(lean < 0, point**2, point))
    distance = np.zeros(len(rows))
    for column in range(columns):
        values = np.unique(rows[:, column])
        if ordered[column]:
            distance += (rows[:, column] - point[column]) ** 2
        else:
            chosen = values[min(int(point[column] * len(values)), len(values) - 1)]
            distance += np.abs(rows[:, column] - chosen) > 1e-9
    return int(np.argmin(distance))


def from_the_baseline(
    space: Space,
    baseline: Configuration,
    weight: np.ndarray,
    position: int,
    seed: int,
) -> dict[str, Value]:
    """The baseline with the knobs of the largest expected effect spread out.

    Those few follow a scrambled Sobol sequence over their other values; each of the rest changes
    with a small chance. Where most knobs matter little and some values of them are bad, what
    changes all of them at once tells of none.

    Args:
        space: where the configuration comes from.
        baseline: a configuration of it.
        weight: expected effect of each knob, relative to the others.
        position: how many points of the sequence went before.
        seed: seed of the scrambling and of the small chances.

    """
    few = min(_SPREAD, len(space.knobs))
    draws = _sobol_point(few, position, seed)
    generator = np.random.default_rng([seed % 2**63, position])
    point = dict(baseline)
    for rank, place in enumerate(np.argsort(-weight, kind="stable")):
        knob = space.knobs[place]
        if rank >= few:
            if generator.random() < _STRAY:
                point[knob.name] = knob.draw(generator)
        elif knob.is_ordered and knob.is_range:
            point[knob.name] = knob.from_unit(float(draws[rank]))
        else:
            others = [v for v in knob.values if not same_value(v, baseline[knob.name])]
            others = others or [baseline[knob.name]]
            point[knob.name] = others[min(int(draws[rank] * len(others)), len(others) - 1)]
    return space.canonical(point)


def _sobol_point(dimensions: int, position: int, seed: int) -> np.ndarray:
    """The ``position``-th point of a scrambled Sobol sequence, counted from 0."""
    sequence = qmc.Sobol(dimensions, scramble=True, rng=np.random.default_rng(seed % 2**63))
    if position:
        sequence.fast_forward(position)
    return np.asarray(sequence.random(1)[0])


def with_nulls_apart(space: Space, rows: np.ndarray) -> np.ndarray:
    """Rows with ``null`` of an ordered knob moved away: it is a default, not a neighbour of the
    least value.
    """
    moved = np.array(rows)
    for column, knob in enumerate(space.knobs):
        if knob.is_ordered and knob.values and knob.values[0] is None:
            moved[moved[:, column] < 1e-9, column] = -_NULL_APART
    return moved


def baseline_in(space: Space, hints: Hints) -> dict[str, Value]:
    """The baseline in the knobs of this space; it may be infeasible there."""
    return space.canonical({k.name: hints.baseline.get(k.name, k.default) for k in space.knobs})


def feasible_starts(
    space: Space, hints: Hints, trials: Sequence[Trial] = ()
) -> list[dict[str, Value]]:
    """What somebody who knows the field would try first, as far as it is feasible: what is advised
    on what the trials say of the baseline, then what the runner knows.
    """
    points = [space.canonical(point) for point in hints.starts]
    return [
        *advised(space, hints, trials, baseline_in(space, hints)),
        *(point for point in points if space.feasible(point)),
    ]


def advised(
    space: Space, hints: Hints, trials: Sequence[Trial], around: dict[str, Value]
) -> list[dict[str, Value]]:
    """Configurations around one as is advised on what holds the baseline back, if that is known.

    Knobs that memory bounds are left alone: who turns those looks for the largest that fits.

    Args:
        space: where they come from.
        hints: which knobs those are.
        trials: the baseline's among them.
        around: what they differ from.

    """
    found = causes_in(trials)
    if not found or not space.feasible(around):
        return []
    return proposals(found, space, around, {*hints.monotonic, hints.stage_knob or ""})


def causes_in(trials: Sequence[Trial]) -> dict[str, list[str]]:
    """What was found to hold the baseline back, each with its causes; empty where it is unknown."""
    baseline = next((t for t in trials if t.purpose is Purpose.BASELINE), None)
    measured = None if baseline is None else baseline.measurement
    return {} if measured is None else measured.environment.get(CAUSES, {})


def expected_effects(space: Space, hints: Hints, trials: Sequence[Trial] = ()) -> np.ndarray | None:
    """How much each knob is expected to matter, relative to the others: by the runner's order, and
    next to nothing where the baseline's timings leave it next to nothing to gain.
    """
    order = [name for name in hints.effect_order if name in space.by_name]
    useless = without_headroom(space, trials)
    if len(order) < 3 and not useless:
        return None
    rank = {name: place for place, name in enumerate(order)}
    effects = [_DECAY ** rank.get(k.name, len(order)) for k in space.knobs]
    known = np.maximum(effects, _LEAST_EFFECT) if len(order) >= 3 else np.ones(len(space.knobs))
    return np.where([k.name in useless for k in space.knobs], NO_EFFECT, known)


def without_headroom(space: Space, trials: Sequence[Trial]) -> set[str]:
    """Knobs that can gain next to nothing by what the baseline's step spends where they work."""
    baseline = next((t for t in trials if t.purpose is Purpose.BASELINE), None)
    if baseline is None or baseline.measurement is None:
        return set()
    bounds = upper_bounds(baseline.measurement)
    gains = {knob.name: headroom_of(bounds, [knob]) for knob in space.knobs}
    return {name for name, gain in gains.items() if gain is not None and gain < NO_HEADROOM}


class Projection:
    """Finds the untried feasible configuration nearest to what an optimizer proposes."""

    def __init__(self, space: Space, history: History) -> None:
        self.space = space
        self._history = history
        self._candidates: Candidates | None = None

    def nearest_feasible(self, proposal: Configuration) -> dict[str, Value] | None:
        """The proposal itself where it is feasible, else ``nearest_untried``."""
        point = self.space.canonical(proposal)
        return point if self.space.feasible(point) else self.nearest_untried(proposal)

    def nearest_untried(self, proposal: Configuration) -> dict[str, Value] | None:
        """The untried configuration at the least distance; ``None`` when all were tried.

        Ordered knobs count by squared distance on their scale, others 1 where they differ.
        """
        point = self.space.canonical(proposal)
        if self.space.feasible(point) and not self._history.taken(point):
            return point
        if self._candidates is None:
            self._candidates = Candidates(self.space, self._history)
        near = [point] if self.space.feasible(point) else []
        points, rows = self._candidates.list(self._history.generator(salt=1), near)
        if not points:
            return None
        gap = rows - self.space.encode([point])[0]
        ordered = self.space.ordered_columns
        distance = np.where(ordered, gap**2, np.abs(gap) > 1e-9).sum(axis=1)
        return dict(points[int(np.argmin(distance))])
