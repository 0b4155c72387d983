"""Files that are either whole or not there, and directories that go with their process."""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from perfsearch.core.locks import lock


def why_not_writable(directory: Path) -> str:
    """Why no file can be made in a directory, or the directory itself; empty where one can.

    It is tried; afterwards nothing has changed.
    """
    existing = directory.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            return ""
    except OSError as error:
        return f"{existing} cannot be written ({error.strerror})"


def write_text(path: Path, text: str, *, durable: bool = False, make: bool = True) -> None:
    """Replace a file in one move.

    Others of the machine cannot read it.

    Args:
        path: the file.
        text: its content, written as UTF-8 with line ends as they are. Bytes of a path that are no
            UTF-8 are written as they are.
        durable: whether it is on disk when this returns. Without, a crash of the machine may lose
            it; one of the process never does.
        make: whether its directory is made where there is none.

    Raises:
        OSError: it cannot be written; the old file is then unchanged.

    """
    if make:
        path.parent.mkdir(parents=True, exist_ok=True)
    # Beside the file, as a move between file systems is a copy; its name ends otherwise, so that
    # no pattern for the finished files finds it.
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(
            draft, "w", encoding="utf-8", errors="surrogateescape", newline="", opener=private
        ) as file:
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


_PIECE = 2**20


def read_at_most(path: Path, most: int) -> bytes:
    """The content of a file that somebody else may have written.

    Raises:
        OSError: it cannot be read.
        ValueError: it has more than ``most`` bytes, which are not read.

    """
    pieces: list[bytes] = []
    left = most
    with path.open("rb") as file:
        # By pieces: Python sets aside as much as may be read at once, and memory may be limited.
        while piece := file.read(min(_PIECE, left + 1)):
            left -= len(piece)
            if left < 0:
                raise ValueError(f"is larger than {most // 2**20} MiB")
            pieces.append(piece)
    return b"".join(pieces)


def private(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file, for ``open``; where it is made, others of the machine cannot read it."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def make_private(directory: Path) -> None:
    """Make a directory that only the user may enter, where there is none."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)


def write_json(path: Path, value: Any, *, durable: bool = False) -> None:
    """The same with indented JSON; numbers that JSON lacks become null.

    Raises:
        OSError: it cannot be written.
        TypeError: the value holds something that is no plain value.

    """
    write_text(path, json_text(value, indent=2) + "\n", durable=durable)


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON that every reader takes: numbers that it lacks become null.

    Raises:
        TypeError: the value holds something that is no plain value.

    """
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


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


# -----------------------------------------------------------------------------
# Temporary directories, whose owner holds a lock in each: what a killed process leaves can be told.

_PREFIX = "perfsearch-"
_OWNER = "owner.lock"
_owned: dict[Path, int] = {}


def make_temporary_directory(base: str | None = None) -> Path:
    """A new directory of this user's own, until ``remove_temporary_directory``.

    Args:
        base: where; by default among the temporary files.

    """
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    draft = directory / f".{_OWNER}"
    try:
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:  # the disk is full, or there are no descriptors
        directory.rmdir()
        raise
    if lock(descriptor):
        draft.rename(directory / _OWNER)  # under this name it is never seen unlocked
        _owned[directory] = descriptor
    else:
        os.close(descriptor)
        draft.unlink()
    return directory


def remove_temporary_directory(directory: Path) -> None:
    """Remove it with all that is in it.

    What cannot be removed now, as without descriptors, is when this process ends.
    """
    shutil.rmtree(directory, ignore_errors=True)
    if directory in _owned and directory.exists():
        atexit.register(_let_go, directory)
    else:
        _let_go(directory)


def _let_go(directory: Path) -> None:
    """Remove what is left of it, and give its lock back."""
    shutil.rmtree(directory, ignore_errors=True)
    descriptor = _owned.pop(directory, None)
    if descriptor is not None:
        os.close(descriptor)


@contextmanager
def temporary_directory() -> Iterator[Path]:
    """A directory for as long as the context lasts."""
    directory = make_temporary_directory()
    try:
        yield directory
    finally:
        remove_temporary_directory(directory)


def remove_left_directories() -> int:
    """Remove those of processes that were killed; return how many there were."""
    removed = 0
    for base in {tempfile.gettempdir(), "/tmp"}:
        for owner in Path(base).glob(f"{_PREFIX}*/{_OWNER}"):
            if owner.parent in _owned:
                continue
            with suppress(OSError):  # another user's, or held
                descriptor = os.open(owner, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    if lock(descriptor, wait=False):
                        shutil.rmtree(owner.parent, ignore_errors=True)
                        removed += 1
                finally:
                    os.close(descriptor)
    return removed
