"""How far a rank has come, a line each in its log, so that one sees where a start's time goes."""

from __future__ import annotations

import time

_begun = time.monotonic()


def begin() -> None:
    """Count from here: a rank begins."""
    global _begun
    _begun = time.monotonic()


def note(what: str) -> None:
    """Say what has been done, and how long after ``begin``."""
    print(f"[{time.monotonic() - _begun:.2f} s] {what}", flush=True)
