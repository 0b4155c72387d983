"""The one thread that writes to MLflow: in order, again after failures, in nobody's way."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from perfsearch.core.trial import Trial
from perfsearch.tracking.mirror import Mirror

FIRST_RETRY_S = 2.0
LONGEST_RETRY_S = 60.0
CLOSING_RETRY_S = 1.0
GIVE_UP_S = 5.0
"""How long the end of a search waits for a store that is down all the while."""

ATTEMPTS = 3
"""How often a record is tried that the store refuses although it answers."""

_log = logging.getLogger(__name__)


@dataclass
class Item:
    """A record to be written, and the trial that belongs to it."""

    record: dict[str, Any]
    trial: Trial | None = None
    attempts: int = field(default=0, compare=False)


class Writer:
    """Writes items to a mirror in the order in which they came.

    A store that is down keeps the order and is tried again, ever more rarely. An item that the
    store refuses although it answers is set aside, so that it holds up nothing.

    Args:
        mirror: what is written to.
        first: called in the thread before anything else.
        failed: called in the thread with the reason whenever a write fails.

    """

    def __init__(
        self, mirror: Mirror, first: Callable[[], None], failed: Callable[[str], None]
    ) -> None:
        self._mirror = mirror
        self._first = first
        self._failed = failed
        self._queue: queue.Queue[Item | None] = queue.Queue()
        self._idle = threading.Condition()
        self._pending = 0
        self._aside: list[Item] = []
        self._busy_since: float | None = None
        self._deadline = float("inf")
        self._thread = threading.Thread(target=self._run, name="mlflow-writer", daemon=True)

    def start(self) -> None:
        """Begin; the thread ends with the process at the latest."""
        self._thread.start()

    def put(self, item: Item) -> None:
        """Hand over an item; returns at once."""
        with self._idle:
            self._pending += 1
        self._queue.put(item)

    @property
    def silent_s(self) -> float:
        """Seconds for which the store has not answered the present call."""
        busy = self._busy_since
        return 0.0 if busy is None else time.monotonic() - busy

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything so far is written; ``False`` when the time is over before."""
        with self._idle:
            return self._idle.wait_for(lambda: self._pending == 0, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Write what is left, for a bounded time, and end; whether everything was written."""
        self._deadline = time.monotonic() + timeout_s
        self._queue.put(None)
        down_since: float | None = None
        while self._thread.is_alive() and time.monotonic() < self._deadline:
            self._thread.join(min(CLOSING_RETRY_S, max(0.0, self._deadline - time.monotonic())))
            # A call under way when its server died goes on for minutes by itself.
            down_since = None if self._is_reachable() else down_since or time.monotonic()
            if down_since is not None and time.monotonic() - down_since >= GIVE_UP_S:
                break
        return not self._thread.is_alive() and self._pending == 0 and not self._aside

    def _is_reachable(self) -> bool:
        try:
            self._mirror.check_reachable()
        except ConnectionError:
            return False
        return True

    def _run(self) -> None:
        self._first()
        backlog: deque[Item] = deque()
        delay, retry_at = FIRST_RETRY_S, 0.0
        while True:
            wait_s = max(0.0, retry_at - time.monotonic()) if backlog else None
            if self._take(backlog, wait_s):
                break
            if backlog and time.monotonic() >= retry_at:
                if self._write(backlog):
                    delay = FIRST_RETRY_S
                else:
                    retry_at = time.monotonic() + delay
                    delay = min(2 * delay, LONGEST_RETRY_S)
        self._write_the_rest(backlog)

    def _write_the_rest(self, backlog: deque[Item]) -> None:
        down_since: float | None = None
        while backlog and time.monotonic() < self._deadline:
            left = len(backlog)
            if self._write(backlog):
                return
            now = time.monotonic()
            if down_since is None or len(backlog) < left:
                down_since = now
            if now - down_since >= GIVE_UP_S:
                return
            time.sleep(max(0.0, min(CLOSING_RETRY_S, self._deadline - now)))

    def _take(self, backlog: deque[Item], wait_s: float | None) -> bool:
        """Move what came into the backlog; ``True`` when the end was asked for."""
        try:
            item = self._queue.get(timeout=wait_s)
            while item is not None:
                backlog.append(item)
                item = self._queue.get_nowait()
        except queue.Empty:
            return False
        return True

    def _write(self, backlog: deque[Item]) -> bool:
        """Write the backlog in order; ``False`` when the store failed."""
        while backlog:
            item = backlog[0]
            self._busy_since = time.monotonic()
            try:
                self._mirror.check_reachable()
                self._mirror.apply(item.record, item.trial)
            except Exception as error:  # the search must not end because its view does
                self._mirror.forget()
                lines = str(error).splitlines()
                self._failed(f"{type(error).__name__}: {lines[0] if lines else ''}")
                _log.debug("writing %s failed", item.record["kind"], exc_info=True)
                if not self._mirror.alive():
                    return False
                item.attempts += 1
                if item.attempts < ATTEMPTS or item.record["kind"] == "open":
                    return False
                self._aside.append(item)
            finally:
                self._busy_since = None
            backlog.popleft()
            with self._idle:
                self._pending -= 1
                self._idle.notify_all()
        return True
