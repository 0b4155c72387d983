"""What a strategy has been told and what it still waits for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from perfsearch.core.knob import Configuration, Value, same_value
from perfsearch.core.space import Space, key_of
from perfsearch.core.trial import Status, Trial

EXHAUSTED = "space exhausted"
"""``stop_reason`` when every configuration was tried."""

_TRIES = 200


class History:
    """Trials told, in order, and proposals whose trials have not ended.

    Args:
        space: where the proposals come from.
        seed: seed of ``generator``.

    Attributes:
        trials: all that were told.
        of_space: those whose configurations are of this space.
        outstanding: proposals whose trials have not ended, by key.
        was_asked: whether anything was proposed since a trial was last told.

    """

    def __init__(self, space: Space, seed: int) -> None:
        self.space = space
        self.seed = seed
        self.trials: list[Trial] = []
        self.outstanding: dict[str, dict[str, Value]] = {}
        self.was_asked = False
        self._told: set[str] = set()
        self.of_space: list[Trial] = []

    def propose(self, configuration: Configuration) -> dict[str, Value]:
        """Note ``configuration`` as outstanding and return a copy of it."""
        values = self.space.canonical(configuration)
        self.outstanding[key_of(values)] = values
        self.was_asked = True
        return dict(values)

    def tell(self, trial: Trial) -> None:
        """Note a trial that ended."""
        self.trials.append(trial)
        self.was_asked = False
        key = self.key(trial.configuration)
        if key is not None:
            self.outstanding.pop(key, None)
            self._told.add(key)
            self.of_space.append(trial)

    def key(self, configuration: Configuration) -> str | None:
        """Key of a configuration of this space; ``None`` where a knob is missing or out of it."""
        for knob in self.space.knobs:
            if knob.name not in configuration:
                return None
        values = self.space.canonical(configuration)
        for knob in self.space.knobs:
            value = values[knob.name]
            if not knob.contains(value) and not (knob.when and same_value(value, knob.default)):
                return None
        return key_of(values)

    def taken(self, configuration: Configuration) -> bool:
        """Whether it was told or is outstanding; ``configuration`` is canonical."""
        return self.taken_key(key_of(configuration))

    def taken_key(self, key: str) -> bool:
        """Whether the configuration of that key was told or is outstanding."""
        return key in self._told or key in self.outstanding

    def is_exhausted(self) -> bool:
        """Whether a space that can be listed has nothing left to propose."""
        listed = self.space.listed()
        if listed is None or len(listed) > len(self._told | set(self.outstanding)):
            return False
        return all(self.taken(point) for point in listed)

    def generator(self, salt: int = 0) -> np.random.Generator:
        """A generator that depends on the seed, the numbers told and outstanding, and ``salt``."""
        return np.random.default_rng(
            [self.seed % 2**63, len(self.trials), len(self.outstanding), salt]
        )

    def measured(self) -> list[Trial]:
        """Trials of this space with a cost, without those stopped early; repeats stay apart."""
        return [t for t in self.of_space if t.status is Status.OK and _has_cost(t)]

    def bounded(self) -> list[Trial]:
        """Trials of this space that were stopped early: their cost is a lower bound."""
        return [t for t in self.of_space if t.status is Status.PRUNED and _has_cost(t)]

    def failed(self) -> list[Trial]:
        """Trials of this space whose configuration is to blame for the failure."""
        return [t for t in self.of_space if t.status.is_failure and t.status is not Status.OK]

    def best(self) -> Trial | None:
        """The measured trial of least cost, the earliest of equals."""
        return best_of(self.measured())

    def log_loss(self, trial: Trial) -> float | None:
        """What an optimizer is told of a trial: the logarithm of its cost, the penalty for a
        failure; ``None`` where neither is known.
        """
        if trial.status.is_failure:
            return self.penalty()
        return None if trial.cost is None else math.log(trial.cost)

    def penalty(self) -> float:
        """A logarithm that is worse than every measured cost's by a factor of e."""
        costs = [cost_of(t) for t in self.measured()]
        return math.log(max(costs)) + 1.0 if costs else 1.0

    def untaken(self, points: Sequence[Configuration]) -> list[dict[str, Value]]:
        """The points that were neither told nor are outstanding."""
        return [dict(point) for point in points if not self.taken(point)]

    def draw(self, generator: np.random.Generator) -> dict[str, Value] | None:
        """A random feasible configuration that is not taken.

        ``None`` when none is left, or, in a space that cannot be listed, when a bounded search
        found none.
        """
        listed = self.space.listed()
        if listed is not None and len(listed) <= 4 * (len(self._told) + len(self.outstanding)):
            free = self.untaken(listed)
            return free[int(generator.integers(len(free)))] if free else None
        for _ in range(_TRIES):
            try:
                point = self.space.sample(generator)
            except LookupError:
                return None
            if not self.taken(point):
                return point
        if listed is not None and (free := self.untaken(listed)):
            return free[int(generator.integers(len(free)))]
        return None

    def why_none(self) -> str:
        """``stop_reason`` after ``draw`` found nothing."""
        if self.space.listed() is not None:
            return EXHAUSTED
        return "no untried configuration satisfies the constraints in a bounded search"


def cost_of(trial: Trial) -> float:
    """The cost of a trial that has one."""
    assert trial.cost is not None
    return trial.cost


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """The trial of least cost, the earliest of equals; ``None`` without any."""
    return min(trials, key=cost_of, default=None)


def log_costs(trials: Sequence[Trial]) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of the trials' costs and their standard errors, 0 where these are not known."""
    logs = np.array([math.log(cost_of(t)) for t in trials])
    return logs, np.array([t.cost_error or 0.0 for t in trials])


def _has_cost(trial: Trial) -> bool:
    return trial.cost is not None and 0 < trial.cost < float("inf")
