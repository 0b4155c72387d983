"""Records of a benchmark, a line each, so that a part that was cut short goes on where it ended."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def commit() -> str:
    """The code's commit, ``unknown`` where this is no repository."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


class Store:
    """Records, found again by ``part`` and ``key``; what is added is printed, too.

    Args:
        path: of the file.
        hardware: what every record is stamped with.

    """

    def __init__(self, path: Path, hardware: str) -> None:
        self._path = path
        self._stamp = {"commit": commit(), "hardware": hardware, "date": time.strftime("%Y-%m-%d")}
        lines = path.read_text().splitlines() if path.exists() else []
        self.records: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def has(self, part: str, key: str) -> bool:
        """Whether it was recorded."""
        return any(r["part"] == part and r["key"] == key for r in self.records)

    def of(self, part: str) -> list[dict[str, Any]]:
        """The records of a part, the latest of each key only."""
        latest = {r["key"]: r for r in self.records if r["part"] == part}
        return list(latest.values())

    def add(self, part: str, key: str, **values: Any) -> None:
        """Record something at once."""
        record = {"part": part, "key": key, **self._stamp, **values}
        self.records.append(record)
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        shown = ", ".join(f"{k}={_short(v)}" for k, v in values.items())
        print(f"{part} {key}: {shown}", flush=True)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:300]
