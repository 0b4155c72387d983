"""Files of settings from whoever wrote them: bounded, and refused in one line."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

from perfsearch.core.files import read_at_most

MOST_READ = 16 * 2**20
"""Bytes that a file of settings may have: what is read of one is held in memory."""

_MOST_VALUES = 100_000
_MOST_BRACKETS = 200
"""Brackets that may be open at once: YAML's reader slows down with each."""


def read_settings(path: Path) -> dict[str, Any]:
    """The mapping that a JSON file (``.json``) or a YAML file (any other) holds.

    Raises:
        ValueError: it cannot be read, or is none; the message says so in one line, to stand after
            the file's name.

    """
    try:
        raw = read_at_most(path, MOST_READ)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    try:
        text = raw.decode()
        content = json.loads(text) if path.suffix == ".json" else _yaml(text)
    except RecursionError:
        raise ValueError("is not valid: its values are nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is not valid: {error}") from error
    if not isinstance(content, dict):
        raise ValueError("holds no keys")
    _require_countable(content)
    return content


def _require_countable(content: Any) -> None:
    """Refuse what anchors and aliases of YAML multiply without end.

    Raises:
        ValueError: there are too many values.

    """
    left, found = [content], 0
    while left:
        node = left.pop()
        inner = list(node.values()) if isinstance(node, dict) else node
        if isinstance(inner, list):
            found += len(inner)
            if found > _MOST_VALUES:
                raise ValueError(f"holds more than {_MOST_VALUES:,} values")
            left += inner


def _yaml(text: str) -> Any:
    import yaml  # type: ignore[import-untyped]

    opened = accumulate((c in "[{") - (c in "]}") for c in text if c in "[]{}")
    if max(opened, default=0) > _MOST_BRACKETS:
        raise RecursionError
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        if mark is None:
            raise ValueError(" ".join(str(error).split())) from error
        place = f"line {mark.line + 1}, column {mark.column + 1}"
        raise ValueError(f"{place}: {' '.join(str(error.problem).split())}") from error
    except (TypeError, AttributeError) as error:  # a key that cannot be one
        raise ValueError(str(error)) from error
