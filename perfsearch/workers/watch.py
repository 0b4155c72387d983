"""End this process when the controller is gone."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

from perfsearch.workers import processes
from perfsearch.workers.messages import Startup

EXIT_ORPHANED = 113
"""Exit code of a process that ended because its controller did."""

_INTERVAL_S = 0.5


def watch_controller(startup: Startup, directory: Path) -> None:
    """Start a thread that ends the whole group once the controller no longer runs.

    It polls the process table: a closed connection alone proves nothing, since a fork of the
    controller may hold its end open.

    Args:
        startup: whose controller.
        directory: the group's own, removed then.

    """

    def loop() -> None:
        while processes.is_alive(startup.controller_pid, startup.controller_started):
            time.sleep(_INTERVAL_S)
        shutil.rmtree(directory, ignore_errors=True)
        processes.end_all(startup.token, grace_s=0.0, exclude=[os.getpid()])
        os._exit(EXIT_ORPHANED)

    threading.Thread(target=loop, name="watch-controller", daemon=True).start()
