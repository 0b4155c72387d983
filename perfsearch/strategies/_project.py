"""From what a general-purpose optimizer proposes to a configuration that may be measured."""

from __future__ import annotations

import numpy as np

from perfsearch.core.knob import Configuration, Value
from perfsearch.core.space import Space
from perfsearch.strategies._candidates import Candidates
from perfsearch.strategies._record import Record


class Projection:
    """Finds the untried feasible configuration nearest to a proposal."""

    def __init__(self, space: Space, record: Record) -> None:
        self.space = space
        self._record = record
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
        if self.space.feasible(point) and not self._record.taken(point):
            return point
        if self._candidates is None:
            self._candidates = Candidates(self.space, self._record)
        near = [point] if self.space.feasible(point) else []
        points, rows = self._candidates.list(self._record.generator(salt=1), near)
        if not points:
            return None
        gap = rows - self.space.encode([point])[0]
        ordered = self.space.ordered_columns
        distance = np.where(ordered, gap**2, np.abs(gap) > 1e-9).sum(axis=1)
        return dict(points[int(np.argmin(distance))])
