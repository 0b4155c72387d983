"""Locks that keep two searches off the same devices and out of the same run directory."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from perfsearch.core.errors import BadInputError


class LockError(BadInputError):
    """A lock that cannot be had; the message names its holder."""


@contextmanager
def run_directory_lock(run_dir: Path) -> Iterator[None]:
    """Hold ``run_dir`` for as long as the context lasts.

    Raises:
        LockError: another process works in it.

    """
    with _locked(run_dir / ".lock", None) as holder:
        if holder:
            raise LockError(
                f"run_dir={run_dir}: process {holder} is running this search. Wait for it, or set "
                "run_dir to another directory."
            )
        yield


@contextmanager
def device_lock(device_set: str, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Hold every device of ``device_set`` (names apart by commas), waiting for its turn.

    Args:
        device_set: empty for nothing to hold.
        on_wait: called once for each device with a line to show, before waiting for it.

    """
    devices = sorted({name for name in device_set.split(",") if name})
    if not devices:
        yield
        return
    # Sorted order, so that two searches over overlapping sets cannot wait for each other.
    first, rest = devices[0], ",".join(devices[1:])
    with (
        _locked(_lock_file(first), lambda pid: on_wait(_waiting(first, pid))),
        device_lock(rest, on_wait),
    ):
        yield


def _waiting(device: str, pid: str) -> str:
    return f"waiting for {device}: the search of process {pid} is using it"


def _lock_file(device: str) -> Path:
    directory = Path(tempfile.gettempdir()) / f"perfsearch-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.lstat().st_uid != os.getuid():  # nor a link that another user laid
        raise LockError(f"{directory} belongs to another user; set TMPDIR to a directory of yours.")
    return directory / f"{hashlib.sha256(device.encode()).hexdigest()[:16]}.lock"


@contextmanager
def _locked(path: Path, wait: Callable[[str], None] | None) -> Iterator[str]:
    """Hold ``path``; without ``wait`` yield the holder's pid instead of waiting for it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    holder = ""
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode().strip() or "another"
            if wait is not None:
                wait(holder)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                holder = ""
        if not holder:
            os.ftruncate(descriptor, 0)
            try:
                os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            except OSError as error:
                raise LockError(f"{path}: cannot be written: {error.strerror}.") from error
        yield holder
    finally:
        os.close(descriptor)
