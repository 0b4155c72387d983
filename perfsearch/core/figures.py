"""Values, rates and durations as a person would write them."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

_DIGITS = 3
"""Digits that count of a knob's value: nobody writes more into a job."""

_PLAIN_BELOW = 1e7
"""Rates from here on are written with an exponent."""


def show_value(value: object) -> str:
    """A knob's value as on the command line, real numbers to three digits."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    if value.is_integer() and abs(value) < _PLAIN_BELOW:
        return str(int(value))
    if 10**_DIGITS <= abs(value) < _PLAIN_BELOW:
        return f"{value:.0f}"
    return f"{value:.{_DIGITS}g}"


def show_changes(names: Sequence[str], most: int = 0) -> str:
    """``name=value`` words in one text: all of them, or the first few and how many more there are.

    Args:
        names: the words.
        most: so many at most are written out; 0: all.

    """
    more = len(names) - most
    if not most or more <= 1:
        return " ".join(names)
    return f"{' '.join(names[:most])} and {more} more of {len(names)}"


def decimals(value: float | None) -> int | None:
    """How many decimals give ``value`` four digits; ``None``: it is written with an exponent.

    Numbers below one another are written with as many as the first of them.
    """
    if value is None or not math.isfinite(value) or value <= 0:
        return 1
    if value >= _PLAIN_BELOW or value < 1e-3:
        return None
    return max(0, 3 - math.floor(math.log10(value)))


def show_number(value: float | None, places: int | None) -> str:
    """A number with so many decimals, and thousands apart; empty where there is none."""
    if value is None:
        return ""
    return f"{value:.4g}" if places is None else f"{value:,.{places}f}"


def show_seconds(seconds: float) -> str:
    """A duration as ``1:02:03`` or ``2:03``."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    clock = f"{minutes}:{whole % 60:02d}"
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else clock


def show_path(path: Path) -> str:
    """A path as it is shortest to type: from the current directory, where it is below that."""
    try:
        path, here = path.absolute(), Path(os.getcwd())
    except OSError:  # the current directory was removed meanwhile
        return str(path)
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
