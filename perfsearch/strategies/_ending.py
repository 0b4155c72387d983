"""Whether a model that promises no further gain is believed yet."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from perfsearch.strategies._promise import Scores

_OWN_LOOKS = 2
"""Looks in a row where the model itself is least sure: a few early trials may have misled it."""

_OTHER_LOOKS = 4
"""Looks that a second model may take where it sees a gain, with those that the first one left."""


class LastLooks:
    """Trials before the end, taken one by one until the model is believed.

    First come those where the cost could be lowest by the model's own doubt; when none are left,
    or after two, those by a second model of another kind, which sees what the first is blind to.
    A better trial than the best so far starts them anew.

    Args:
        least: gain, relative, that is worth a trial.

    """

    def __init__(self, least: float) -> None:
        self._least = least
        self._taken = 0
        self._best = math.inf

    def note(self, best: float, promised: float) -> None:
        """Note the best cost so far and the gain that the model promises."""
        if best < self._best or promised >= self._least:
            self._taken = 0
        self._best = best

    def next(self, scores: Scores) -> int | None:
        """Index of the configuration to look at; ``None`` when it is time to end."""
        if self._taken < _OWN_LOOKS and scores.hope.max() >= self._least:
            self._taken += 1
            return int(np.argmax(scores.hope))
        if self._taken >= _OWN_LOOKS + _OTHER_LOOKS or scores.second is None:
            return None
        gain = scores.second()
        if gain.max() < self._least:
            return None
        self._taken += 1
        return int(np.argmax(gain))
