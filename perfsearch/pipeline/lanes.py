"""Trials at the same time: each on a lane of its own, that is, a share of the runner's devices."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Self

from perfsearch.core.signals import deferred
from perfsearch.core.trial import Outcome, Trial
from perfsearch.pipeline.session import Running, Session, measure_guarded
from perfsearch.runners.base import MeasuresBeside

_ENDING_S = 10.0
"""How long threads have to come back from what was broken off, beside the grace time."""


class Lanes:
    """Measures up to one trial a lane at a time.

    Only measuring goes on in threads. Journal, strategy and view belong to the thread that calls
    ``start`` and ``wait``. With a single lane that thread measures, too. ``concurrent.futures`` has
    pools of threads, but they wait at the end of the process for what hangs, and know of no lanes.

    Leaving it by an exception breaks off what is measured, and records it as interrupted.

    Args:
        session: of the search.
        lanes: which of them; only lane 0 for a runner that is no ``MeasuresBeside``.

    """

    def __init__(self, session: Session, lanes: Sequence[int]) -> None:
        self._session = session
        self._free = list(lanes)
        self._alone = len(lanes) == 1
        self._running: list[Running] = []
        self._threads: list[threading.Thread] = []
        self._ended: SimpleQueue[tuple[Running, Outcome | BaseException]] = SimpleQueue()
        self._broken_off = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._running:
            return
        runner, session = self._session.runner, self._session
        self._broken_off = True
        with deferred():
            try:
                for running in self._running:
                    session.break_off(running)
            finally:
                if self._threads and isinstance(runner, MeasuresBeside):
                    runner.break_off()
                deadline = time.monotonic() + session.settings.limits.grace_s + _ENDING_S
                for thread in self._threads:
                    thread.join(max(0.0, deadline - time.monotonic()))

    @property
    def count(self) -> int:
        """How many trials are under way."""
        return len(self._running)

    @property
    def free(self) -> bool:
        """Whether one more can be started."""
        return bool(self._free)

    def start(self, running: Running) -> None:
        """Begin a trial on a free lane."""
        running.lane = self._free.pop(0)
        self._running.append(running)
        self._session.begin(running)
        self._measure(running)

    def wait(self) -> Trial:
        """Wait until a trial has ended; it is then on record, and its lane is free."""
        while True:
            running, outcome = self._next()
            if not self._session.begins_again(running, outcome):
                break
            self._measure(running)
        self._running.remove(running)
        self._free = sorted([*self._free, running.lane])
        return self._session.end(running, outcome)

    def _measure(self, running: Running) -> None:
        if self._alone:
            return  # when it is waited for
        thread = threading.Thread(target=self._in_thread, args=(running,), daemon=True)
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        thread.start()

    def _in_thread(self, running: Running) -> None:
        if self._broken_off:
            return
        try:
            outcome = measure_guarded(self._session.runner, running.configuration, running.plan)
        except BaseException as error:
            self._ended.put((running, error))
        else:
            self._ended.put((running, outcome))

    def _next(self) -> tuple[Running, Outcome]:
        """The attempt that ends next."""
        if not self._alone:
            ended, came = self._ended.get()
            if isinstance(came, BaseException):
                raise came
            return ended, came
        (running,) = self._running
        return running, measure_guarded(self._session.runner, running.configuration, running.plan)
