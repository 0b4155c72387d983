"""Records of a benchmark, a line each, so that a part that was cut short goes on where it ended."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import _store

ROOT = Path(__file__).parents[1]


def commit() -> str:
    """The code's commit, ``unknown`` where this is no repository."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


class Store(_store.Store):
    """Records, found again by ``part`` and ``key``; what is added is printed, too.

    Args:
        path: of the file.
        hardware: what every record is stamped with.

    """

    def __init__(self, path: Path, hardware: str) -> None:
        super().__init__(path)
        self._stamp = {"commit": commit(), "hardware": hardware, "date": time.strftime("%Y-%m-%d")}

    def of(self, part: str) -> list[dict[str, Any]]:
        """The records of a part, the latest of each key only."""
        return list({r["key"]: r for r in super().of(part)}.values())

    def add(self, part: str, key: str, **values: Any) -> None:
        """Record something at once."""
        super().add(part, key, **{**self._stamp, **values})
        shown = ", ".join(f"{k}={_short(v)}" for k, v in values.items())
        print(f"{part} {key}: {shown}", flush=True)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:300]
