"""Which process owns a run, and whether it is still alive."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping

HOST = "perfsearch.host"
PID = "perfsearch.controller_pid"
START = "perfsearch.controller_start"

_SLACK_S = 2.0
"""Start times have the resolution of a tick and shift with the wall clock's corrections."""


def owner_tags() -> dict[str, str]:
    """Tags that name this process: host, process id, and start time, as ids are used again."""
    import psutil

    start = psutil.Process().create_time()
    return {HOST: platform.node(), PID: str(os.getpid()), START: f"{start:.2f}"}


def is_dead(tags: Mapping[str, str]) -> bool:
    """Whether the process named by a run's tags is known to have ended.

    A process of another host, or one that is not named, is never called dead: no clock decides.
    """
    import psutil

    if tags.get(HOST) != platform.node() or PID not in tags or START not in tags:
        return False
    try:
        started: float = psutil.Process(int(tags[PID])).create_time()
        return abs(started - float(tags[START])) > _SLACK_S
    except psutil.NoSuchProcess:
        return True
    except (psutil.AccessDenied, ValueError):
        return False
