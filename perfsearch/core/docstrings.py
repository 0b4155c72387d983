"""Reads what docstrings say, so that help and documentation pages repeat nothing by hand."""

from __future__ import annotations

import inspect
import re

_ENTRY = re.compile(r"^ {4}(\w+): (.*)$")
_SECTION = re.compile(r"^(Args|Attributes):\s*$")


def summary(item: object) -> str:
    """The first paragraph of a docstring, on one line."""
    text = inspect.getdoc(item) or ""
    return " ".join(text.partition("\n\n")[0].split())


def attribute_help(item: object) -> dict[str, str]:
    """What the sections ``Attributes`` and ``Args`` of a docstring say of each name.

    Of a class also what those of its bases say.
    """
    found: dict[str, str] = {}
    for base in reversed(inspect.getmro(item)) if isinstance(item, type) else (item,):
        found |= _sections(inspect.getdoc(base) or "")
    return found


def _sections(doc: str) -> dict[str, str]:
    found: dict[str, str] = {}
    inside, name = False, ""
    for line in doc.splitlines():
        if _SECTION.match(line):
            inside = True
        elif inside and (match := _ENTRY.match(line)):
            name = match.group(1)
            found[name] = match.group(2).strip()
        elif inside and name and line.startswith(" " * 8):
            found[name] += " " + line.strip()
        elif line and not line.startswith(" "):
            inside, name = False, ""
    return found
