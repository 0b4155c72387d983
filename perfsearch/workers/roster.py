"""The ranks of a group as each told of itself: where it runs, on which device, as which process."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from perfsearch.workers import processes
from perfsearch.workers.failures import ProcessEnd


class Roster:
    """Ranks that have reported.

    Args:
        ranks: of each, ``host``, ``device``, ``pid`` and ``started``.

    """

    def __init__(self, ranks: Sequence[Mapping[str, Any]] = ()) -> None:
        self._ranks = ranks

    def shared_device(self) -> tuple[str, int] | None:
        """What is wrong where two ranks are on one device, and the second of them."""
        places = [(r["host"], r["device"]) for r in self._ranks]
        for rank, place in enumerate(places):
            if place in places[:rank]:
                first = places.index(place)
                return f"ranks {first} and {rank} are on the same device {place[1]}", rank
        return None

    def ended(self) -> list[ProcessEnd]:
        """Ranks on this host whose processes are gone, though the launcher still runs.

        The launcher looks away from one that ended with 0, and sees another only when the last of
        the processes that it started has ended, too.
        """
        ended = []
        for rank, process in enumerate(self._ranks):
            place = process["pid"], process["started"]
            if process["host"] == os.uname().nodename and not processes.is_alive(*place):
                # Had its launcher taken note of another code, it would have ended the group.
                code = processes.exit_code(*place)
                ended.append(ProcessEnd(rank, 0 if code is None else code, time.time()))
        return ended

    def some_run(self) -> bool:
        """Whether another rank still runs, so that the launcher will not end soon."""
        return len(self.ended()) < len(self._ranks)
