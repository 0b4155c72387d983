"""Locks between processes by open files, and file systems that have none."""

from __future__ import annotations

import errno
import fcntl

_NO_LOCKS = frozenset(
    {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF, errno.EIO}
)
"""What Lustre and NFS answer where they are mounted without locks; NFS has none on directories."""


def lock(descriptor: int, *, wait: bool = True) -> bool:
    """Lock an open file; whoever has opened it otherwise is kept out until it is closed.

    Args:
        descriptor: of the file.
        wait: whether to wait for another that holds it.

    Returns:
        Whether it is locked; ``False`` where the file system has no locks.

    Raises:
        BlockingIOError: another holds it, and ``wait`` is false.

    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True


def unlock(descriptor: int) -> None:
    """Let others have it, though a fork may still have it open."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
