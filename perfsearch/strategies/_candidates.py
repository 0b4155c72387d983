"""Which configurations a model-based strategy scores before each proposal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.stats import qmc

from perfsearch.search.knob import Configuration, Value
from perfsearch.search.space import Space, key_of
from perfsearch.strategies._record import Record

SCORED_WHOLE = 5_000
"""Spaces up to this size are scored whole; of larger ones a sample and the neighbourhood."""

_SAMPLE = 1_500


class Candidates:
    """Untried feasible configurations with their encoding, cheap to list again and again."""

    def __init__(self, space: Space, record: Record) -> None:
        self.space = space
        self._record = record
        listed = space.listed()
        self._whole = listed if listed is not None and len(listed) <= SCORED_WHOLE else None
        self._rows = None if self._whole is None else space.encode(self._whole)
        self._pool: tuple[dict[str, dict[str, Value]], np.ndarray] | None = None

    def list(
        self, generator: np.random.Generator, near: Sequence[Configuration] = ()
    ) -> tuple[list[dict[str, Value]], np.ndarray]:
        """Untried configurations and their rows; in a large space those around ``near`` too."""
        if self._whole is not None and self._rows is not None:
            free = [i for i, point in enumerate(self._whole) if not self._record.taken(point)]
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
        points = list(found.values())
        rows = np.vstack([pool_rows, self.space.encode(points[pooled:])])
        free = [i for i, point in enumerate(points) if not self._record.taken(point)]
        return [points[i] for i in free], rows[free]

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
    sequence = qmc.Sobol(columns, scramble=True, rng=np.random.default_rng(seed % 2**63))
    if position:
        sequence.fast_forward(position)
    point = sequence.random(1)[0]
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
