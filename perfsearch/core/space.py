"""The set of configurations that a search may propose."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perfsearch.core.knob import Configuration, Knob, Value, same_value

if TYPE_CHECKING:
    import numpy as np

ENUMERATION_LIMIT = 200_000
"""Spaces with more combinations than this are sampled, never listed."""

_SAMPLE_TRIES = 2_000


@dataclass(frozen=True)
class Constraint:
    """A rule that a configuration must satisfy before anything is started.

    Attributes:
        name: short name, shown when it is the reason for a refusal.
        holds: pure function of the configuration.
        explain: what to tell the user; defaults to the name.

    """

    name: str
    holds: Callable[[Configuration], bool]
    explain: str = ""


class Space:
    """Knobs and constraints, or an explicit list of points; only feasible configurations leave it.

    Args:
        knobs: the searched knobs.
        constraints: rules that every configuration satisfies.
        points: when given, the space is exactly these (a recorded table, say), in this order.

    Raises:
        ValueError: two knobs share a name, or a ``when`` names an unknown knob.

    """

    def __init__(
        self,
        knobs: Sequence[Knob],
        constraints: Sequence[Constraint] = (),
        points: Sequence[Configuration] | None = None,
    ) -> None:
        self.knobs: tuple[Knob, ...] = tuple(knobs)
        self.constraints: tuple[Constraint, ...] = tuple(constraints)
        self.by_name: dict[str, Knob] = {knob.name: knob for knob in self.knobs}
        if len(self.by_name) != len(self.knobs):
            raise ValueError("two knobs share a name")
        for knob in self.knobs:
            for other in knob.when:
                if other not in self.by_name:
                    raise ValueError(f"knob {knob.name} depends on {other}, which is not searched")
        self._listed: list[dict[str, Value]] | None = None
        self._index: dict[str, int] | None = None
        if points is not None:
            known = _distinct([self.canonical(point) for point in points])
            self._listed = [p for p in known if all(c.holds(p) for c in self.constraints)]
            self._index = {key_of(p): i for i, p in enumerate(self._listed)}
        self._explicit = points is not None

    def within(self, constraints: Sequence[Constraint]) -> Space:
        """The part of it that keeps further rules."""
        points = self._listed if self._explicit else None
        return Space(self.knobs, [*self.constraints, *constraints], points)

    def canonical(self, configuration: Configuration) -> dict[str, Value]:
        """The same configuration, knobs in order, those that do not matter at their default."""
        values: dict[str, Value] = {k.name: configuration[k.name] for k in self.knobs}
        for knob in self.knobs:
            for other, allowed in knob.when.items():
                if not any(same_value(values[other], a) for a in allowed):
                    values[knob.name] = knob.default
        return values

    def violations(self, configuration: Configuration) -> list[str]:
        """Why ``configuration`` is not in the space, one line a reason; empty when it is."""
        missing = [k.name for k in self.knobs if k.name not in configuration]
        if missing:
            return [f"{name} is missing" for name in missing]
        values = self.canonical(configuration)
        reasons = [
            f"{k.name}={values[k.name]!r} is not one of its values"
            for k in self.knobs
            if not k.contains(values[k.name])
            and not (k.when and same_value(values[k.name], k.default))
        ]
        if reasons:
            return reasons
        reasons = self.broken(values)
        if self._explicit and not reasons:
            assert self._index is not None
            return [] if key_of(values) in self._index else ["it is not in the table"]
        return reasons

    def broken(self, configuration: Configuration) -> list[str]:
        """The rules that a configuration with a value for each knob breaks, a line each."""
        values = self.canonical(configuration)
        return [c.explain or c.name for c in self.constraints if not c.holds(values)]

    def is_empty(self) -> bool:
        """Whether nothing keeps its constraints, as far as a bounded search can tell."""
        import numpy as np

        try:
            self.sample(np.random.default_rng(0))
        except LookupError:
            return True
        return False

    def feasible(self, configuration: Configuration) -> bool:
        """Whether ``configuration`` may be proposed."""
        return not self.violations(configuration)

    def _satisfies(self, canonical: dict[str, Value]) -> bool:
        """Whether a configuration whose values are the knobs' own may be proposed."""
        if self._index is not None and self._explicit:
            return key_of(canonical) in self._index
        return all(c.holds(canonical) for c in self.constraints)

    @property
    def combinations(self) -> int | None:
        """Number of value combinations before constraints; ``None`` without end."""
        total = 1
        for knob in self.knobs:
            if knob.count is None:
                return None
            total *= knob.count
        return total

    @property
    def size(self) -> int | None:
        """Number of feasible configurations, or ``None`` where they are too many to list."""
        listed = self.listed()
        return None if listed is None else len(listed)

    def listed(self) -> list[dict[str, Value]] | None:
        """Every feasible configuration in a fixed order, or ``None`` where they are too many."""
        if self._listed is None:
            combinations = self.combinations
            if combinations is None or combinations > ENUMERATION_LIMIT:
                return None
            self._listed = list(self._enumerate())
        return self._listed

    def _enumerate(self) -> Iterator[dict[str, Value]]:
        names = [k.name for k in self.knobs]
        seen: set[str] = set()
        for values in itertools.product(*(k.choices() or () for k in self.knobs)):
            point = self.canonical(dict(zip(names, values, strict=True)))
            key = key_of(point)
            if key in seen or not all(c.holds(point) for c in self.constraints):
                continue
            seen.add(key)
            yield point

    def sample(self, generator: np.random.Generator) -> dict[str, Value]:
        """Draw a feasible configuration, uniformly where the space can be listed.

        Raises:
            LookupError: the space is empty, or so thin that none was found in a bounded search.

        """
        listed = self.listed()
        if listed is not None:
            if not listed:
                raise LookupError("no configuration satisfies the constraints")
            return dict(listed[int(generator.integers(len(listed)))])
        for _ in range(_SAMPLE_TRIES):
            point = self.canonical({k.name: k.draw(generator) for k in self.knobs})
            if all(c.holds(point) for c in self.constraints):
                return point
        raise LookupError(
            f"none of {_SAMPLE_TRIES} random configurations satisfied the constraints"
        )

    def neighbours(self, configuration: Configuration) -> list[dict[str, Value]]:
        """Feasible configurations that differ in one knob: the next values of an ordered knob,
        any other value of an unordered one.
        """
        here = self.canonical(configuration)
        found: list[dict[str, Value]] = []
        for knob in self.knobs:
            for value in _next_values(knob, here[knob.name]):
                candidate = self.canonical({**here, knob.name: value})
                if candidate != here and self._satisfies(candidate):
                    found.append(candidate)
        return _distinct(found)

    def encode(self, configurations: Sequence[Configuration]) -> np.ndarray:
        """Numbers for a model: shape (configurations, knobs), each column in [0, 1].

        Ordered knobs go by ``Knob.unit_position``; unordered ones by the index of their choice
        over the number of choices, to be compared for equality only (see ``ordered_columns``).
        """
        import numpy as np

        rows = np.zeros((len(configurations), len(self.knobs)))
        for column, knob in enumerate(self.knobs):
            numbers: dict[tuple[bool, Value], float] = {}
            for row, configuration in enumerate(configurations):
                value = configuration[knob.name]
                key = (isinstance(value, bool), value)
                if key not in numbers:
                    numbers[key] = _number_of(knob, value)
                rows[row, column] = numbers[key]
        return rows

    @property
    def ordered_columns(self) -> np.ndarray:
        """Boolean mask over the columns of ``encode``: which may be compared by distance."""
        import numpy as np

        return np.array([k.is_ordered for k in self.knobs], dtype=bool)


def key_of(configuration: Configuration) -> str:
    """A string that two configurations share exactly when they are the same."""
    # ``1`` and ``1.0`` are the same value, ``1`` and ``True`` are not; called very often.
    return "\n".join(
        f"{name}={float(value) if value.__class__ is int else value!r}"
        for name, value in sorted(configuration.items())
    )


def _distinct(points: Sequence[Mapping[str, Value]]) -> list[dict[str, Value]]:
    return list({key_of(point): dict(point) for point in points}.values())


def _number_of(knob: Knob, value: Value) -> float:
    if knob.is_ordered:
        return knob.unit_position(value)
    place = [same_value(value, v) for v in knob.values]
    return place.index(True) / len(knob.values) if True in place else 1.0


def _next_values(knob: Knob, value: Value) -> list[Value]:
    if not knob.is_ordered:
        return [v for v in knob.values if not same_value(v, value)]
    choices = knob.choices() if knob.count is not None and knob.count <= 64 else None
    if choices is not None:
        nearest = knob.unit_position(value)
        place = min(
            range(len(choices)), key=lambda i: abs(knob.unit_position(choices[i]) - nearest)
        )
        return [choices[i] for i in (place - 1, place + 1) if 0 <= i < len(choices)]
    position = knob.unit_position(value)
    return [knob.from_unit(position + delta) for delta in (-0.1, -0.02, 0.02, 0.1)]
