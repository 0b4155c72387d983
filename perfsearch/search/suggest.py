"""Near misses for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, allowed: Iterable[str]) -> str:
    """Say what was probably meant, and what is allowed."""
    options = sorted(set(allowed))
    close = difflib.get_close_matches(word, options, n=1, cutoff=0.5)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return f"{hint}Allowed: {', '.join(options)}."
