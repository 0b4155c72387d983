"""One tunable setting of a training job."""

from __future__ import annotations

import bisect
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

Value = bool | int | float | str | None
"""What a knob can be set to. ``None`` leaves the library's own default."""

Configuration = Mapping[str, Value]
"""Knob name to value, one entry for each knob of the space."""


class Kind(StrEnum):
    """How the values of a knob relate to each other."""

    BOOLEAN = "boolean"
    INTEGER = "integer"
    REAL = "real"
    ORDINAL = "ordinal"
    CATEGORICAL = "categorical"


class Scope(StrEnum):
    """What must restart to change a knob: the model's wrapper, its process group, or processes."""

    STEP = "step"
    GROUP = "group"
    PROCESS = "process"


class Numerics(StrEnum):
    """What a knob does to the computation: nothing, the order of a sum, or its result."""

    EXACT = "exact"
    REORDERED = "reordered"
    ALTERING = "altering"

    @property
    def rank(self) -> int:
        """Position in the order exact < reordered < altering."""
        return list(Numerics).index(self)


class Part(StrEnum):
    """A part of a training step; together they are all of it."""

    LOADING = "loading"
    COMMUNICATION = "communication"
    OPTIMIZER = "optimizer"
    COMPUTING = "computing"
    REST = "rest"
    """What no phase covers."""


@dataclass(frozen=True)
class Knob:
    """One tunable setting: its values, and the two facts that decide how it may be searched.

    Attributes:
        name: the name in configurations, journals and MLflow.
        kind: how its values relate; ``ORDINAL`` and ``CATEGORICAL`` list them in ``values``.
        default: the value in the configuration that the user has today.
        values: the choices of a boolean, ordinal or categorical knob, ordinals in order.
        low: smallest value of an integer or real knob, in ``unit``.
        high: largest value of an integer or real knob, in ``unit``.
        log: whether equal ratios, not equal differences, matter.
        step: grid of an integer or real knob; without one a real knob has no finite size.
        unit: unit of its values, as in ``MiB``; empty for a pure number.
        scope: what must restart to change it.
        numerics: what it does to the computation.
        when: other knobs' values under which it matters; elsewhere it is held at its default.
        help: one line for people.
        shortens: parts of a step that it can make shorter; empty: it may do anything.
        redraws: whether a job that draws random numbers in its forward pass (dropout) draws others
            with another value, by the nature of the knob.
        on_request: values that it can take too, and that are searched only where they are named.

    """

    name: str
    kind: Kind
    default: Value
    values: tuple[Value, ...] = ()
    low: float | None = None
    high: float | None = None
    log: bool = False
    step: float | None = None
    unit: str = ""
    scope: Scope = Scope.STEP
    numerics: Numerics = Numerics.EXACT
    when: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    help: str = ""
    shortens: tuple[Part, ...] = ()
    redraws: bool = False
    on_request: tuple[Value, ...] = ()

    def __post_init__(self) -> None:
        if self.kind is Kind.BOOLEAN and not self.values:
            object.__setattr__(self, "values", (False, True))
        object.__setattr__(self, "values", _distinct(self.values))
        if self.is_range:
            if self.low is None or self.high is None:
                raise ValueError(f"knob {self.name}: a range needs both low and high")
            if self.low > self.high:
                raise ValueError(f"knob {self.name}: low {self.low} is above high {self.high}")
            if self.log and self.low <= 0:
                raise ValueError(f"knob {self.name}: a log scale needs low > 0, not {self.low}")
            if self.step is not None and not self.step > 0:
                raise ValueError(f"knob {self.name}: step {self.step} is not above 0")
        elif not self.values:
            raise ValueError(f"knob {self.name}: no values to choose from")

    @property
    def is_range(self) -> bool:
        """Whether it is given by its bounds rather than by a list of choices."""
        return self.kind in (Kind.INTEGER, Kind.REAL)

    @property
    def is_ordered(self) -> bool:
        """Whether neighbouring values may be expected to behave alike."""
        return self.kind in (Kind.INTEGER, Kind.REAL, Kind.ORDINAL)

    def draw(self, generator: np.random.Generator) -> Value:
        """A value drawn uniformly, on a range by its position (``from_unit``)."""
        if self.is_ordered and self.is_range:
            return self.from_unit(float(generator.random()))
        return self.values[int(generator.integers(len(self.values)))]

    def choices(self) -> tuple[Value, ...] | None:
        """Every value in order, or ``None`` where there is no end to them."""
        return self._choices

    @property
    def count(self) -> int | None:
        """Number of values, or ``None`` without end; long ranges are not listed for it."""
        if not self.is_range:
            return len(self.values)
        assert self.low is not None and self.high is not None
        if self.kind is Kind.REAL and self.step is None and self.low != self.high:
            return None
        if self._is_geometric:
            assert self.step is not None
            return math.floor(math.log(self.high / self.low) / math.log(self.step) + 1e-9) + 1
        return math.floor((self.high - self.low) / (self.step or 1) + 1e-9) + 1

    @property
    def _is_geometric(self) -> bool:
        return self.log and self.step is not None and self.step > 1

    @cached_property
    def _choices(self) -> tuple[Value, ...] | None:
        count = self.count
        if not self.is_range or count is None:
            return None if count is None else self.values
        return tuple(self._at(place) for place in range(count))

    @cached_property
    def numbers(self) -> list[int | float]:
        """Those of its values that are numbers: what the user has set may be null or a word."""
        return [v for v in self.values if isinstance(v, int | float) and not isinstance(v, bool)]

    @cached_property
    def _places(self) -> dict[tuple[bool, Value], int]:
        """Where each value stands, as ``same_value`` tells them apart; a table may have many."""
        places: dict[tuple[bool, Value], int] = {}
        for place, value in enumerate(self.values):
            places.setdefault((isinstance(value, bool), value), place)
        return places

    @cached_property
    def _is_positive(self) -> bool:
        """Whether its values are positive numbers in order."""
        numbers = self.numbers
        return len(numbers) == len(self.values) and numbers == sorted(numbers) and numbers[0] > 0

    def contains(self, value: Value) -> bool:
        """Whether ``value`` is one that this knob can take, type included."""
        if not self.is_range:
            return isinstance(value, Hashable) and (isinstance(value, bool), value) in self._places
        if value is None or isinstance(value, bool | str):
            return False
        assert self.low is not None and self.high is not None
        if not self.low <= value <= self.high:
            return False
        return self.kind is not Kind.INTEGER or float(value).is_integer()

    def own(self, value: Value) -> Value:
        """A value that it can take as it writes it: ``64`` where that is one of its values, and
        ``64.0`` was given.
        """
        if not self.is_range:
            return self.values[self._places[isinstance(value, bool), value]]
        assert isinstance(value, int | float)
        return int(value) if self.kind is Kind.INTEGER else float(value)

    def unit_position(self, value: Value) -> float:
        """Map an ordered value to [0, 1]: log ranges by logarithm, ordinals by their values.

        Ordinals whose values are all positive numbers go by logarithm, others by their place.
        """
        if self.is_range:
            assert self.low is not None and self.high is not None
            return _position(float(value or 0), self.low, self.high, self.log)
        place = self._places.get((isinstance(value, bool), value), 0)
        if len(self.values) < 2:
            return 0.0
        numbers = self.numbers
        if self.kind is Kind.ORDINAL and self._is_positive:
            return _position(numbers[place], numbers[0], numbers[-1], log=True)
        return place / (len(self.values) - 1)

    def from_unit(self, position: float) -> Value:
        """The value of an ordered knob nearest to ``position`` in [0, 1]."""
        position = min(1.0, max(0.0, position))
        choices = self.choices() if self.count is not None and self.count <= 4096 else None
        if choices is not None:
            places = self._positions
            above = min(bisect.bisect_left(places, position), len(places) - 1)
            below = max(above - 1, 0)
            nearer_below = position - places[below] <= abs(places[above] - position)
            return choices[below if nearer_below else above]
        assert self.low is not None and self.high is not None
        if self.log:
            return self._on_grid(self.low * (self.high / self.low) ** position)
        return self._on_grid(self.low + (self.high - self.low) * position)

    @cached_property
    def _positions(self) -> list[float]:
        """The unit positions of the choices, ascending."""
        return [self.unit_position(choice) for choice in self.choices() or ()]

    def _on_grid(self, number: float) -> Value:
        """The value of a range nearest to a number inside of it."""
        if self.step is None or self.count is None:
            return self._cast(number)
        assert self.low is not None
        if self._is_geometric:
            place = math.log(number / self.low) / math.log(self.step)
        else:
            place = (number - self.low) / self.step
        return self._at(min(round(place), self.count - 1))

    def _at(self, place: int) -> Value:
        """The value at a place of a range that has a grid."""
        assert self.low is not None
        if self._is_geometric:
            assert self.step is not None
            return self._cast(self.low * self.step**place)
        return self._cast(self.low + (self.step or 1) * place)

    def to_plain(self) -> dict[str, Any]:
        """What it is, as plain values for programs: its values, or the bounds of its range."""
        values: dict[str, Any] = {"values": list(self.values)}
        if self.is_range:
            values = {"low": self.low, "high": self.high, "log": self.log, "step": self.step}
        return {
            "name": self.name,
            "kind": str(self.kind),
            **values,
            "unit": self.unit,
            "help": self.help,
            "scope": str(self.scope),
            "numerics": str(self.numerics),
            "shortens": [str(part) for part in self.shortens],
            "when": {other: list(allowed) for other, allowed in self.when.items()},
        }

    def _cast(self, number: float) -> Value:
        assert self.low is not None and self.high is not None
        number = min(max(number, self.low), self.high)  # rounding may lead out of the range
        return round(number) if self.kind is Kind.INTEGER else float(number)


def _distinct(values: tuple[Value, ...]) -> tuple[Value, ...]:
    """Each value once, at its first place: what stands twice would be drawn twice as often."""
    kept: dict[tuple[bool, Value], Value] = {}
    for value in values:
        kept.setdefault((isinstance(value, bool), value), value)
    return tuple(kept.values())


def same_value(left: Value, right: Value) -> bool:
    """Equality that tells ``True`` from ``1``, but not ``1`` from ``1.0``."""
    if isinstance(left, bool) != isinstance(right, bool):
        return False
    return left == right


def _position(value: float, low: float, high: float, log: bool) -> float:
    if high <= low:
        return 0.0
    if log:
        return math.log(value / low) / math.log(high / low)
    return (value - low) / (high - low)
