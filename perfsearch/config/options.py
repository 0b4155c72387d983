"""From plain mappings to frozen dataclasses of options, with errors that name key and remedy.

The dataclass is the schema, with the ranges of ``perfsearch.core.option``. Nothing here imports
torch or Hydra.

Weighed against pydantic, which takes as long to import and to build a validator of all settings as
``perfsearch --help`` takes whole, and ranks that tune while they train read options too. Its lax
mode takes ``true`` for a number and leaves out keys that it does not know; its strict mode takes no
mapping for a dataclass. Our messages would have to be made of its errors, one a member of a union.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, StrEnum
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Any, Literal, TypeVar

from perfsearch.core.errors import BadInputError, nearest

T = TypeVar("T")

_BOUNDS = {"low": (">=", ge), "above": (">", gt), "high": ("<=", le), "below": ("<", lt)}
"""What ``option`` calls a bound, its sign, and how a value is held against it."""

REPLACED = {
    "confirm.precision": "a confirmation ends once its question is decided. "
    "confirm.sharpness=0.5 has it go on until half of a gain is sure",
}
"""Keys that there were, and what to do instead."""


class ConfigError(BadInputError):
    """A setting that cannot be honoured; the message names key, value, what is allowed.

    Attributes:
        key: the full dotted key that is to blame.

    """

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def build_options(cls: type[T], mapping: Mapping[str, Any], prefix: str) -> T:
    """Build the options dataclass ``cls`` from what the user wrote under the key ``prefix``.

    Args:
        cls: a dataclass; fields without a default are required.
        mapping: plain values, as from YAML.
        prefix: the key that ``mapping`` stands under; empty for the top level.

    Returns:
        An instance of ``cls``, nested dataclasses included.

    Raises:
        ConfigError: an unknown key, a wrong type, a value out of range, a missing key, or a
            ``ValueError`` from the dataclass's own ``__post_init__``.

    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(prefix, f"{prefix}={show(mapping)}: a group of keys is needed here.")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for name in mapping:
        if name not in fields:
            key = join(prefix, name)
            what = nearest(str(name), fields, prefix) if fields else f"{prefix} has no options."
            what = f"{REPLACED[key]}." if key in REPLACED else what
            any_more = " any more:" if key in REPLACED else "."
            raise ConfigError(key, f"{key}: no such key{any_more} {what}")
    values: dict[str, Any] = {}
    for name, spec in fields.items():
        key = join(prefix, name)
        if name in mapping:
            values[name] = _convert(mapping[name], hints[name], key, spec.metadata)
        elif spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
            raise ConfigError(key, f"{key}: missing, and it has no default. Set {key}=VALUE.")
    try:
        return cls(**values)
    except ConfigError:
        raise
    except ValueError as error:
        named = not prefix or str(error).startswith(prefix)
        raise ConfigError(prefix, str(error) if named else f"{prefix}: {error}") from error


def _convert(value: Any, annotation: Any, key: str, limits: Mapping[str, Any]) -> Any:
    try:
        converted = _cast(value, annotation, key, limits)
    except _MismatchError:
        hint = ""
        choices = [str(c) for c in _all_choices(annotation)]
        if isinstance(value, str) and choices:
            words = nearest(value, choices)
            hint = words.partition("Allowed")[0]
        allowed = describe_type(annotation, limits)
        raise ConfigError(key, f"{key}={show(value)}: {hint}Allowed: {allowed}.") from None
    return converted


class _MismatchError(Exception):
    """The value is not of the type that was tried; another of a union may fit."""


def _all_choices(annotation: Any) -> list[Any]:
    if _is_union(typing.get_origin(annotation)):
        return [c for a in typing.get_args(annotation) for c in _all_choices(a)]
    return list(_choices(annotation))


def _cast(value: Any, annotation: Any, key: str, limits: Mapping[str, Any]) -> Any:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any or annotation is object:
        return value
    if _is_union(origin):
        return _cast_union(value, arguments, key, limits)
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return value if isinstance(value, annotation) else build_options(annotation, value, key)
    if choices := _choices(annotation):
        if any(value == c and isinstance(value, bool) == isinstance(c, bool) for c in choices):
            return annotation(value) if isinstance(annotation, type) else value
        raise _MismatchError
    if origin in (tuple, list, Sequence):
        return _cast_sequence(value, annotation, key, limits)
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise _MismatchError
        item = arguments[1] if len(arguments) == 2 else Any
        return {str(k): _convert(v, item, join(key, k), limits) for k, v in value.items()}
    return _cast_plain(value, annotation, limits)


def _cast_union(value: Any, members: Sequence[Any], key: str, limits: Mapping[str, Any]) -> Any:
    if value is None and type(None) in members:
        return None
    # A whole number stays whole where both int and float are allowed.
    for member in sorted(members, key=lambda m: (m is str, m is float)):
        try:
            return _cast(value, member, key, limits)
        except _MismatchError:
            continue
    raise _MismatchError


def _cast_sequence(value: Any, annotation: Any, key: str, limits: Mapping[str, Any]) -> Any:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _MismatchError
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple and Ellipsis not in arguments and arguments:
        if len(value) != len(arguments):
            raise _MismatchError
        inner = list(arguments)
    else:
        inner = [arguments[0] if arguments else Any] * len(value)
    items = [
        _convert(v, a, f"{key}.{i}", limits)
        for i, (v, a) in enumerate(zip(value, inner, strict=True))
    ]
    return items if origin is list else tuple(items)


def _cast_plain(value: Any, annotation: Any, limits: Mapping[str, Any]) -> Any:
    if annotation is type(None):
        if value is not None:
            raise _MismatchError
        return None
    if annotation is Path and isinstance(value, str | Path):
        return Path(value)
    if annotation is float and isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value) if abs(value) <= sys.float_info.max else math.inf
    elif annotation is int and isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif annotation in (bool, str) and isinstance(value, annotation):
        return value
    else:
        raise _MismatchError
    within = (holds(number, limits[name]) for name, (_, holds) in _BOUNDS.items() if name in limits)
    if not -sys.float_info.max <= number <= sys.float_info.max or not all(within):
        raise _MismatchError
    return number


def _is_union(origin: Any) -> bool:
    return origin is typing.Union or origin is types.UnionType


def _choices(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) is Literal:
        return typing.get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return tuple(member.value for member in annotation)
    return ()


# -----------------------------------------------------------------------------
# How keys, values and types are written.


def plain_value(value: Any) -> Any:
    """The value in dicts, lists and scalars, as YAML and JSON can hold it."""
    if isinstance(value, Mapping):
        return {str(k): plain_value(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(v) for v in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def join(prefix: str, name: object) -> str:
    """The dotted key of ``name`` under ``prefix``."""
    return f"{prefix}.{name}" if prefix else str(name)


def leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything below ``node`` that has no keys of its own."""
    if isinstance(node, Mapping) and node:
        for name, value in node.items():
            yield from leaves(value, join(key, name))
    else:
        yield key, node


def show(value: object) -> str:
    """``value`` as a person would write it on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {show(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(show(v) for v in value) + "]"
    return str(value)


def describe_type(annotation: Any, limits: Mapping[str, float] | None = None) -> str:
    """What a field accepts, in words: ``whole number >= 1 or null``."""
    text = _type_words(annotation)
    limits = limits or {}
    bounds = [
        f"{sign} {limits[name]:.12g}" for name, (sign, _) in _BOUNDS.items() if name in limits
    ]
    if not bounds:
        return text
    head, joint, tail = text.partition(" or ")
    return f"{head} {' and '.join(bounds)}{joint}{tail}"


def _type_words(annotation: Any) -> str:
    if choices := _choices(annotation):
        return " or ".join(show(choice) for choice in choices)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if _is_union(origin):
        return " or ".join(_type_words(a) for a in arguments)
    if annotation in _WORDS:
        return _WORDS[annotation]
    if origin in (tuple, list, Sequence):
        inner = [a for a in arguments if a is not Ellipsis]
        if origin is tuple and Ellipsis not in arguments:
            return f"list of {len(inner)}: {', '.join(_type_words(a) for a in inner)}"
        return f"list, each a {_type_words(inner[0])}" if inner else "list"
    if dataclasses.is_dataclass(annotation) or origin in (dict, Mapping):
        return "group of keys"
    return "value"


_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    Path: "path",
    type(None): "null",
}
