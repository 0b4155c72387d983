"""What a machine can have no more of, and what to do then: that is no bug of anybody's.

Files, memory, room on a disk, processes, and nodes of a search over several.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from perfsearch.core.errors import BadInputError, NodesGoneError, NoStartError
from perfsearch.core.journal import JournalWriteError

_FREE_SPACE = "Free some space"
_MEMORY = "There is no memory left: end other processes, or raise the limit (ulimit -v)"
_OF_JOURNAL: dict[int | None, str] = dict.fromkeys(
    (errno.ENOENT, errno.ENOTDIR), "Put the directory back where it was, if it is not gone"
)
_REMEDIES: dict[int | None, str] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO), _FREE_SPACE),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "Raise the limit of open files (ulimit -n)"),
    errno.ENOMEM: _MEMORY,
    errno.EAGAIN: "End other processes, or raise the limit of processes (ulimit -u)",
}
_NO_TEMPORARY = "No usable temporary directory"
"""So says Python where it cannot write a file in any, for want of whatever."""
_TOLD = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Those whose words say the same in any error: of an import, of torch, of a database."""


def remedy(error: BaseException) -> str:
    """What to do where an error comes from the machine having no more of something, else empty."""
    return _found(error)[1]


def told(error: BaseException) -> str:
    """The same after what is lacking, in one line; only for an error that has a ``remedy``."""
    cause, found = _found(error)
    words = " ".join(str(cause).split()) or type(cause).__name__
    return f"{words}. {found}"


def _found(error: BaseException) -> tuple[BaseException, str]:
    """The error, or what it was raised from, that tells what is lacking, and the remedy."""
    refused = isinstance(error, BadInputError)
    for one in _causes(error):
        if refused and isinstance(one, OSError) and one.errno not in _TOLD:
            continue  # the error says what else is wrong with what was asked for
        if found := _remedy(one):
            return one, found
    return error, ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it was raised from."""
    seen: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and not any(one is known for known in seen):
        yield one
        seen.append(one)
        one = one.__cause__


def _remedy(error: BaseException) -> str:
    if isinstance(error, JournalWriteError):
        return _OF_JOURNAL.get(error.errno, _FREE_SPACE)
    if isinstance(error, NodesGoneError):
        return "Have every node there"
    if isinstance(error, NoStartError):
        return "Mend that"
    if isinstance(error, MemoryError):
        return _MEMORY
    if isinstance(error, OSError):
        if _NO_TEMPORARY in str(error):
            return f"{_FREE_SPACE} in one of them, or raise the limit of open files (ulimit -n)"
        return _REMEDIES.get(error.errno, "")
    if isinstance(error, BadInputError):
        return ""
    text = str(error)
    if isinstance(error, RuntimeError) and "can't start new thread" in text:
        return _REMEDIES[errno.EAGAIN]
    return next((_REMEDIES[number] for number in _TOLD if os.strerror(number) in text), "")
