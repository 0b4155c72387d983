"""How processes end: exit codes, the two ways in which a person ends a command early, threads."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from types import FrameType

_ENDING = b"\nEnding: processes are ended, and the record is finished.\n"
_STILL_ENDING = b"\nEnding: the record is being finished. Once more to end at once.\n"


class ExitCode(IntEnum):
    """Exit codes of the commands; the larger of two is the worse."""

    DONE = 0
    NO_TRIAL_SUCCEEDED = 1
    BAD_INPUT = 2
    CIRCUIT_BREAKER = 3
    NO_DIFFERENCE = 4
    SLOWER = 5
    OTHER_COMPUTATION = 6
    SIGHUP = 129
    SIGINT = 130
    SIGTERM = 143


VERDICTS = (
    ExitCode.DONE,
    ExitCode.NO_DIFFERENCE,
    ExitCode.SLOWER,
    ExitCode.OTHER_COMPUTATION,
)
"""Exit codes of searches and comparisons that came to an answer, whichever it is."""


class Interrupted(BaseException):
    """SIGHUP, SIGINT or SIGTERM reached the command; raised once, in the main thread.

    It is no ``Exception``, so that nothing that catches a failing trial catches it.

    Attributes:
        exit_code: 129, 130 or 143.

    """

    def __init__(self, exit_code: ExitCode) -> None:
        super().__init__(exit_code.name)
        self.exit_code = exit_code


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn SIGHUP, SIGINT and SIGTERM into ``Interrupted`` while the block runs.

    The first signal raises, at the end of a ``deferred`` block where it comes inside one, so
    that the record is finished and processes are ended; that is said at once. The second
    is only answered, as that is still under way. The third ends the process at once; its
    workers see their control channel close.
    """
    received = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        code = ExitCode(128 + number)
        if received <= 2:
            with suppress(OSError):  # after a hang-up the terminal takes no more words
                words = _ENDING if received == 1 else _STILL_ENDING
                os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, words)
        if received == 1:
            if _deferral.depth:
                _deferral.pending = code
                return
            raise Interrupted(code)
        if received > 2:
            os._exit(code)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)  # not under nohup
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Deferral:
    """Blocks that may not be broken off, and the signal that came inside of one."""

    depth: int = 0
    pending: ExitCode | None = None


_deferral = _Deferral()


@contextmanager
def deferred() -> Iterator[None]:
    """Let a signal of ``interruptible`` wait for the end of a short block of the main thread.

    For what must not stop half-way: taking a trial into the record, ending processes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are only ever raised in the main thread
        return
    _deferral.depth += 1
    try:
        yield
    finally:
        _deferral.depth -= 1
        pending = _deferral.pending
        if pending is not None and not _deferral.depth:
            _deferral.pending = None
            raise Interrupted(pending)


_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def ends_with_parent() -> Callable[[], None]:
    """What a process that is being started runs first, so that it gets SIGINT, as by Ctrl-C, when
    the process that started it ends, however that is; on Linux.

    It runs between fork and exec, where nothing may be loaded. The kernel looks at the thread that
    forked, which must be the main one.
    """
    if sys.platform != "linux":
        return lambda: None
    import ctypes

    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)


PAUSE_S = 0.1


@functools.cache
def pause_at_end() -> None:
    """Have this process, where it is one of several ranks, wait a moment when it ends.

    A thread of gloo drops the tensors of the last collective some time after the collective has
    returned. Where Python has begun to end by then, torch aborts the whole process, and a job
    that had done all its work exits with SIGABRT (pytorch#190489; in one of ten runs on a busy
    machine, with ``destroy_process_group`` too). What is registered with ``atexit`` runs before
    that, last come first served, so this is best called early. torch has no call that says when
    those threads are done, and leaving by ``os._exit`` would lose what a script has not flushed.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        atexit.register(time.sleep, PAUSE_S)
