"""From ``runner.knobs.NAME`` as the user wrote it to the knob that is searched."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from perfsearch.core.errors import BadInputError, nearest
from perfsearch.core.knob import Kind, Knob, Numerics, Value, same_value

SEARCH = "search"
"""The value of a knob that is searched over its built-in values or range."""

SEARCH_ON_GPU = "search_on_gpu"
"""The value of a knob that is searched so on GPUs alone, and left as it is on a CPU."""

AUTO = "auto"
"""``runner.knobs`` as a whole: the baseline's timings say which knobs are searched, and when."""

_RANGE_KEYS = ("min", "max", "log", "step")

_MOST_IN_RANGE = 100_000
"""Values that a range with a step may have: strategies list them."""


class KnobError(BadInputError):
    """A ``runner.knobs`` entry that cannot be honoured; the message names key, value and remedy."""


def is_auto(options: Mapping[str, Any]) -> bool:
    """Whether the ``runner.*`` keys leave the choice of knobs to the diagnosis."""
    knobs = options.get("knobs")
    return isinstance(knobs, str) and knobs == AUTO


def expanded(options: Mapping[str, Any], searched: Mapping[str, Any]) -> dict[str, Any]:
    """The ``runner.*`` keys, with ``runner.knobs=auto`` put as what it lets be searched."""
    return {**options, "knobs": dict(searched)} if is_auto(options) else dict(options)


def on_device(
    settings: Mapping[str, Any], defaults: Mapping[str, Value], on_gpu: bool
) -> dict[str, Any]:
    """What is searched on GPUs alone, put as what it is on this device.

    Args:
        settings: ``runner.knobs``.
        defaults: what knobs are where they are not searched.
        on_gpu: whether the job trains on GPUs.

    """
    return {
        name: (SEARCH if on_gpu else defaults.get(name)) if setting == SEARCH_ON_GPU else setting
        for name, setting in settings.items()
    }


def narrow(
    declared: Sequence[Knob], settings: Mapping[str, Any], allowed: Numerics
) -> tuple[list[Knob], dict[str, Value]]:
    """Split the declared knobs into those searched and those pinned.

    Args:
        declared: every knob of the runner.
        settings: ``runner.knobs``: ``"search"`` (built-in values), a scalar (pinned), a list
            (choices), a mapping with min, max, log, step (range), ``None`` (the library's own
            default, pinned). A declared knob without an entry is dropped, that is, pinned to
            its default.
        allowed: the most that a searched knob may do to the computation.

    Returns:
        The searched knobs, and every other knob's fixed value.

    Raises:
        KnobError: unknown name, wrong type, value out of range, or numerics not allowed.

    """
    by_name = {knob.name: knob for knob in declared}
    for name in settings:
        if name not in by_name:
            raise KnobError(f"runner.knobs.{name}: no such knob. {nearest(name, by_name)}")
    searched: list[Knob] = []
    pinned: dict[str, Value] = {}
    for knob in declared:
        setting = settings.get(knob.name, knob.default)
        if isinstance(setting, str) and setting == SEARCH:
            searched.append(knob)
        elif isinstance(setting, Sequence) and not isinstance(setting, str):
            searched.append(_from_list(knob, list(setting)))
        elif isinstance(setting, Mapping):
            searched.append(_from_range(knob, setting))
        else:
            pinned[knob.name] = checked(knob, setting)
    for knob in searched:
        if knob.numerics.rank > allowed.rank:
            raise too_much_error(knob, allowed)
    searched_names = {k.name for k in searched}
    kept = [_without_fixed_parents(k, searched_names, pinned) for k in searched]
    for knob, now in zip(searched, kept, strict=True):
        if now is None:
            pinned[knob.name] = knob.default
    return [k for k in kept if k is not None], pinned


def too_much_error(knob: Knob, allowed: Numerics) -> KnobError:
    """What to raise where a knob is to be searched that changes more than is allowed."""
    return KnobError(
        f"runner.knobs.{knob.name}: it is {knob.numerics} and numerics={allowed}. "
        f"Set numerics={knob.numerics} to search it, or pin it to one value."
    )


def _without_fixed_parents(
    knob: Knob, searched: set[str], pinned: Mapping[str, Value]
) -> Knob | None:
    """Drop conditions on pinned knobs that hold; ``None`` where one can never hold."""
    when = {}
    for other, values in knob.when.items():
        if other in searched:
            when[other] = values
        elif other in pinned and pinned[other] not in values:
            return None
    return replace(knob, when=when)


def checked(knob: Knob, value: Any) -> Value:
    """The value, where the knob can be set to it; an ordinal one between two others counts, too.

    Raises:
        KnobError: it cannot.

    """
    if value is None or isinstance(value, bool | int | float | str):
        possible = knob.contains(value) or value in knob.on_request
        if possible or same_value(value, knob.default) or value is None:
            return value
        if knob.kind is Kind.ORDINAL and _inside(knob, value):
            return value
    raise KnobError(f"runner.knobs.{knob.name}={_written(value)}: {_allowed(knob)}")


def _inside(knob: Knob, value: Value) -> bool:
    numbers = knob.numbers
    if isinstance(value, bool | str) or value is None or len(numbers) != len(knob.values):
        return False
    whole = all(isinstance(v, int) for v in numbers)
    return min(numbers) <= value <= max(numbers) and (not whole or float(value).is_integer())


def _from_list(knob: Knob, values: list[Any]) -> Knob:
    if not values:
        raise KnobError(f"runner.knobs.{knob.name}=[]: a list needs at least one choice.")
    choices = [checked(knob, value) for value in values]
    if knob.kind in (Kind.BOOLEAN, Kind.CATEGORICAL):
        return replace(knob, values=tuple(choices))
    numbers = [v for v in choices if v is not None]
    ordered = tuple(sorted(numbers, key=lambda v: float(v)))
    if None in choices:
        return replace(
            knob, kind=Kind.CATEGORICAL, values=(None, *ordered), low=None, high=None, step=None
        )
    return replace(knob, kind=Kind.ORDINAL, values=ordered, low=None, high=None, step=None)


def _from_range(knob: Knob, setting: Mapping[str, Any]) -> Knob:
    for key in setting:
        if key not in _RANGE_KEYS:
            raise KnobError(f"runner.knobs.{knob.name}.{key}: unknown. {nearest(key, _RANGE_KEYS)}")
    written = ", ".join(f"{key}: {_written(value)}" for key, value in setting.items())
    asked = f"runner.knobs.{knob.name}={{{written}}}"
    if not knob.is_range and knob.kind is not Kind.ORDINAL:
        raise KnobError(f"{asked}: it has no range. {_allowed(knob)}")
    for key in ("min", "max", "step"):
        if key in setting and not _is_number(setting[key]):
            raise KnobError(f"{asked}: {key} is no number. {_allowed(knob)}")
    if knob.kind is Kind.ORDINAL:
        return _between(knob, asked, setting)
    low, high = setting.get("min", knob.low), setting.get("max", knob.high)
    for bound in (low, high):
        checked(knob, bound)
    if low > high:
        raise KnobError(f"{asked}: min is above max. {_allowed(knob)}")
    _check_scale(knob, asked, setting)
    try:
        made = replace(
            knob,
            low=low,
            high=high,
            log=setting.get("log", knob.log),
            step=setting.get("step", knob.step),
        )
    except ValueError as error:
        reason = str(error).removeprefix(f"knob {knob.name}: ")
        raise KnobError(f"{asked}: {reason}. {_allowed(knob)}") from error
    if made.step is not None and (made.count or 0) > _MOST_IN_RANGE:
        raise KnobError(
            f"{asked}: these are more than {_MOST_IN_RANGE:,} values. Give a larger step, or none."
        )
    return made


def _between(knob: Knob, asked: str, setting: Mapping[str, Any]) -> Knob:
    """Those of the listed values that lie in a range."""
    useless = next((key for key in ("log", "step") if key in setting), None)
    if useless:
        raise KnobError(
            f"{asked}: {useless} has no effect, as only listed values are tried. Give min and max, "
            f"or a list. {_allowed(knob)}"
        )
    numbers = knob.numbers
    low, high = setting.get("min", min(numbers)), setting.get("max", max(numbers))
    if low > high:
        raise KnobError(f"{asked}: min is above max. {_allowed(knob)}")
    inside = tuple(v for v in numbers if low <= v <= high)
    if not inside:
        raise KnobError(f"{asked}: no value lies between {low} and {high}. {_allowed(knob)}")
    return replace(knob, values=inside)


def _check_scale(knob: Knob, asked: str, setting: Mapping[str, Any]) -> None:
    """Refuse a step or a scale that a range cannot have."""
    log, step = setting.get("log", knob.log), setting.get("step", 1)
    if not isinstance(log, bool):
        raise KnobError(f"{asked}: log is true or false. {_allowed(knob)}")
    if step <= 0:
        raise KnobError(f"{asked}: step is not above 0. {_allowed(knob)}")
    if knob.kind is Kind.INTEGER and not float(step).is_integer():
        raise KnobError(f"{asked}: step is no whole number. {_allowed(knob)}")


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -sys.float_info.max <= value <= sys.float_info.max  # a whole number may be larger


def require_possible(knob: Knob, value: Any, key: str) -> None:
    """Refuse a value that a knob has in no job; a found one may lie beyond the bounds of this one.

    Args:
        knob: as it is declared for all jobs.
        value: a single one, to be put into force.
        key: how it was named.

    Raises:
        KnobError: the message has key, value and what is allowed.

    """
    plain = isinstance(value, bool | int | float | str)
    if value is None or (plain and (knob.contains(value) or value in knob.on_request)):
        return
    if not knob.is_ordered or not (knob.is_range or knob.numbers):
        raise KnobError(f"{key}={_written(value)}: {_allowed(knob, a_list=False)}")
    numbers = [knob.low or 0.0] if knob.is_range else knob.numbers
    whole = knob.kind is not Kind.REAL and all(isinstance(v, int) for v in numbers)
    least = min(numbers)
    fits = _is_number(value) and (value > 0 or value >= least)
    if not fits or (whole and not float(value).is_integer()):
        what = "a whole number" if whole else "a number"
        bound = "above 0" if least > 0 else f"of {least:g} or more"
        unit = f" {knob.unit}" if knob.unit else ""
        raise KnobError(f"{key}={_written(value)}: allowed is {what} {bound}{unit}.")


def _allowed(knob: Knob, a_list: bool = True) -> str:
    values = values_in_words(knob)
    if knob.is_range:
        return f"allowed is {values}, a list, or a range {{min, max, log, step}}."
    return f"allowed: {values}{', or a list of these' * a_list}."


def values_in_words(knob: Knob) -> str:
    """The values that a knob can take, with their unit: ``1, 8, 25 MiB``, ``0 to 16``."""
    unit = f" {knob.unit}" if knob.unit else ""
    if knob.is_range:
        return f"{knob.low:g} to {knob.high:g}{unit}"
    return ", ".join(_written(v) for v in (*knob.values, *knob.on_request)) + unit


def _written(value: object) -> str:
    """A value as it is written on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
