"""Declares the range of an option beside its type and default.

Every group of options is a frozen dataclass: its annotations are the types, its defaults the
defaults, what its docstring says of an attribute is the help, and ``option`` adds the range.
``perfsearch.config.options`` checks what the user wrote against it, and the help and the reference
pages are rendered from it.
"""

from __future__ import annotations

import dataclasses
from typing import Any


def option(
    default: Any = dataclasses.MISSING,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """A dataclass field with a range: ``low <= value <= high``, ``above < value < below``.

    For a sequence or a mapping the range holds for each of its items.
    """
    limits = {"low": low, "above": above, "high": high, "below": below}
    metadata = {k: v for k, v in limits.items() if v is not None}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
