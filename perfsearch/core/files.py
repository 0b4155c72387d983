"""Files that are either whole or not there: the one atomic write of the project."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Replace a file in one move; its directory is made where there is none.

    Args:
        path: the file.
        text: its content, written as UTF-8 with line ends as they are.
        durable: whether it is on disk when this returns. Without, a crash of the machine may lose
            it; one of the process never does.

    Raises:
        OSError: it cannot be written; the old file is then unchanged.

    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside the file, as a move between file systems is a copy; its name ends otherwise, so that
    # no pattern for the finished files finds it.
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
            if durable:
                file.flush()
                # Before the move: some file systems put the new name on disk before the content.
                os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    if durable:
        _sync_directory(path.parent)


def write_json(path: Path, value: Any, *, durable: bool = False) -> None:
    """The same with indented JSON; numbers that JSON lacks become null.

    Raises:
        OSError: it cannot be written.
        TypeError: the value holds something that is no plain value.

    """
    text = json.dumps(_plain(value), indent=2, allow_nan=False) + "\n"
    write_text(path, text, durable=durable)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
