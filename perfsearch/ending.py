"""Let gloo's threads finish before Python ends."""

from __future__ import annotations

import atexit
import functools
import os
import time

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
