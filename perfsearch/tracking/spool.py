"""What the search said to its view, kept in the run directory so that the view can be rebuilt.

Trials are in the journal; here are only the moments at which they ended, and what is in no other
file: parameters, tags, summaries, series, and which files are artifacts.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE_NAME = "tracking.jsonl"
SCHEMA = 1


class Spool:
    """Appends records to ``tracking.jsonl`` and holds the file's lock while it is open.

    The lock ends with the process, however that ends; it tells a live search from a dead one.

    Raises:
        OSError: the file cannot be opened.

    """

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / FILE_NAME
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self._repair()

    def lock(self, wait: bool = False) -> bool:
        """Become the only writer of this search's view; ``False`` when another one is alive."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True

    def append(self, record: dict[str, Any]) -> None:
        """Write one record in one call, so that a kill leaves at most one torn line."""
        line = json.dumps({"schema": SCHEMA, **record}, default=str) + "\n"
        os.write(self._file, line.encode())

    def close(self) -> None:
        """Give up the lock."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _repair(self) -> None:
        """End a line that a kill tore, so that the next record starts on its own."""
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")


def read(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Records in order; torn lines are left out.

    Raises:
        ValueError: a record has a schema version that this version does not know.

    """
    path = run_dir / FILE_NAME
    if not path.exists():
        return
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if not isinstance(record, dict):
            continue
        if record.get("schema") != SCHEMA:
            raise ValueError(
                f"{path}, line {number}: schema version {record.get('schema')!r}, but this "
                f"version of perfsearch reads version {SCHEMA}. Use the version that wrote it."
            )
        yield record
