"""The one kind of error that is the user's to mend, and what its message says of near misses."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class BadInputError(ValueError):
    """Something that was asked for cannot be done.

    The message is for people and complete: the key, its value, what is allowed, the next step.
    Commands print it alone and end with exit code 2; every other exception is a bug of ours.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class NodesGoneError(Exception):
    """A node that a search needs did not come, or did not come back; the message is for people."""


class NoStartError(Exception):
    """A script that has run does not start now, which is no fault of its own; for people, too."""


_UNPRINTABLE = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u200b-\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]"
)
"""What steers a terminal, or changes the order in which text is shown."""


FORMULAS = ("=", "+", "-", "@", "\t", "\r")
"""How what a spreadsheet would compute begins; a quote before it makes it text."""


def printable(text: str) -> str:
    """A text of any origin as a terminal may show it: control characters are spelled out."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def nearest(word: str, allowed: Iterable[str], prefix: str = "") -> str:
    """Say what was probably meant, and what is allowed.

    Args:
        word: what was written.
        allowed: what could have been.
        prefix: the key above all of them, which is shown but says nothing of how near they are.

    """
    options = sorted(set(allowed))
    close = difflib.get_close_matches(word, options, n=1, cutoff=0.5)
    above = f"{prefix}." if prefix else ""
    hint = f"Did you mean {above + close[0]!r}? " if close else ""
    return f"{hint}Allowed: {', '.join(above + option for option in options)}."
