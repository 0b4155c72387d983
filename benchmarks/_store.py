"""Records, a line each, of a benchmark that is run in pieces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Store:
    """Records found again by ``part`` and ``key``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.records: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def has(self, part: str, key: str) -> bool:
        """Whether it was recorded."""
        return any(r["part"] == part and r["key"] == key for r in self.records)

    def of(self, part: str) -> list[dict[str, Any]]:
        """The records of a part."""
        return [r for r in self.records if r["part"] == part]

    def add(self, part: str, key: str, **values: Any) -> None:
        """Record something at once."""
        record = {"part": part, "key": key, **values}
        self.records.append(record)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
