"""Whether what somebody proposes is made of a space's knobs and their values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perfsearch.core.errors import nearest
from perfsearch.core.knob import Configuration, Knob, Value, same_value
from perfsearch.core.narrow import values_in_words
from perfsearch.core.space import Space


class OutsideError(ValueError):
    """A proposed value that the space does not have.

    Attributes:
        name: of the knob, as it was given; there may be no such knob.
        value: as it was given.
        why: what is wrong, with what is allowed.

    """

    def __init__(self, name: str, value: Any, why: str) -> None:
        super().__init__(f"{name}={value!r}; {why}")
        self.name, self.value, self.why = name, value, why


def own_values(space: Space, baseline: Configuration, given: Mapping[Any, Any]) -> dict[str, Value]:
    """The given values as the knobs write them; rules are not looked at, nor what is missing.

    Args:
        space: that it is to be a part of.
        baseline: whose values may always be proposed.
        given: values by the names of knobs, of any origin.

    Raises:
        OutsideError: an unknown knob, or a value that it cannot take.

    """
    found: dict[str, Value] = {}
    for name, value in given.items():
        knob = space.by_name.get(name) if isinstance(name, str) else None
        if knob is None:
            known = nearest(str(name), space.by_name)
            raise OutsideError(str(name), value, f"no such knob. {known}")
        found[knob.name] = _own_value(knob, baseline, value)
    return found


def _own_value(knob: Knob, baseline: Configuration, value: Any) -> Value:
    if isinstance(value, bool | int | float | str) or value is None:
        if knob.contains(value):
            return knob.own(value)
        if knob.when and same_value(knob.default, value):
            return knob.default
        if knob.name in baseline and same_value(baseline[knob.name], value):
            return baseline[knob.name]
    raise OutsideError(knob.name, value, f"allowed: {values_in_words(knob)}")
