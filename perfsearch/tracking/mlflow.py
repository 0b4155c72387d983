"""The live view of a search in MLflow: never in the search's way."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from perfsearch.core.journal import Event, Journal
from perfsearch.core.secrets import Redactor
from perfsearch.tracking.location import (
    cause_of,
    how_to_open,
    is_elsewhere,
    locate,
    without_credentials,
)
from perfsearch.tracking.store import SHOWN, Store, shown

SLOW_S = 60.0
"""A call that the store does not answer for so long is worth a warning."""

FIRST_RETRY_S = 2.0
LONGEST_RETRY_S = 60.0
CLOSING_RETRY_S = 1.0
GIVE_UP_S = 5.0
"""How long the end of a search waits for a store that is down all the while."""

ATTEMPTS = 3
"""How often an event is tried that the store refuses although it answers."""

_log = logging.getLogger(__name__)


class Tracker:
    """Shows a search in MLflow as its journal grows, from one writer thread.

    No method waits for the store, and none raises because of it: a store that is down or slow leads
    to one warning, and what was missed is written later from the journal, by the resumed search or
    by ``perfsearch-sync``. ``close`` waits for the rest, up to its time limit. There is one writer
    at a time, since a search and an upload both hold the lock of the run directory.

    Args:
        uri: the store; ``None`` takes ``MLFLOW_TRACKING_URI``, then SQLite in ``directory``.
        experiment: its name; several searches may share it.
        run_dir: the search's directory.
        search_id: names the search, the same when it is resumed.
        directory: base of the default store and of relative URIs; the current directory.

    Raises:
        TrackingError: the URI names a store that MLflow does not take.

    """

    def __init__(
        self,
        uri: str | None,
        experiment: str,
        run_dir: Path,
        search_id: str,
        *,
        directory: Path | None = None,
    ) -> None:
        self.location = locate(uri, directory)
        self.run_dir = Path(run_dir).resolve()
        self.complete = True
        self._store = Store(self.location, experiment, search_id, self.run_dir)
        self._redact = Redactor()
        self._writer: Writer | None = None
        self._before: list[Event] = []
        self._opened = False
        self._warned = False
        self._why = ""

    @property
    def destination(self) -> Mapping[str, str]:
        """The store's address without credentials, and the experiment."""
        uri = without_credentials(self.location.uri)
        return {"uri": uri, "experiment": self._store.experiment}

    @property
    def run_id(self) -> str | None:
        """The search's run, once the store has it."""
        return self._store.parent if self._store.has_run else None

    def open(self, journal: Journal) -> None:
        """Show the search from its event ``opened`` on.

        After a resume, what an earlier process recorded and did not show is shown first.
        """
        self.complete = False
        self._before = list(journal.events)
        self._writer = Writer(self._store, self._warn)
        self._writer.start()
        journal.followers.append(self._follow)

    def close(self, status: str = "FINISHED", timeout_s: float = 60.0) -> None:
        """End the search's run, wait for what is not written yet, and stop.

        Afterwards ``complete`` tells whether everything was written.

        Args:
            status: ``FINISHED``, ``FAILED`` or ``KILLED``.
            timeout_s: how long to wait at most.

        """
        if self._writer is None:
            return
        if self._opened:
            self._put(Item("the end", lambda: self._store.finish(status)))
        uri = self.location.uri
        self.complete = self._writer.close(timeout_s)
        self._writer = None
        if not self.complete:
            _log.warning(
                "MLflow does not have all of this search yet%s; nothing is lost. "
                "Upload the rest with: perfsearch-sync %s%s",
                f" ({self._why})" if self._why else "",
                self.run_dir,
                f" --uri {without_credentials(uri)}" if is_elsewhere(uri) else "",
            )

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything so far is written; ``False`` when the time is over before."""
        return self._writer is None or self._writer.flush(timeout_s)

    def how_to_open(self) -> str:
        """The command that opens MLflow's UI on the store, or the address of a server.

        Empty where the store took nothing of the search, or is gone: there is nothing to look at.
        """
        if not self._store.has_run or self.location.is_gone:
            return ""
        return how_to_open(self.location, self._store.experiment_id)

    def _follow(self, event: Event) -> None:
        if event.name == "opened" and not self._opened:
            self._opened = True
            for known in shown([*self._before, event]):
                self._put_event(known)
            self._before = []
        elif self._opened and event.name in SHOWN:
            self._put_event(event)

    def _put_event(self, event: Event) -> None:
        self._put(Item(event.name, lambda: self._store.show(event)))

    def _put(self, item: Item) -> None:
        if self._writer is None:
            return
        self._writer.put(item)
        silent_s = self._writer.silent_s
        if silent_s > SLOW_S:
            self._warn(f"it has not answered for {silent_s:.0f} s")

    def _warn(self, why: str) -> None:
        self._why = self._redact.text(why)
        if not self._warned:
            self._warned = True
            _log.warning(
                "the MLflow store %s is not available (%s). The search goes on; results are kept "
                "in %s and uploaded later",
                without_credentials(self.location.uri),
                self._why,
                self.run_dir,
            )


@dataclass
class Item:
    """A call that writes to the store, and what it writes."""

    what: str
    write: Callable[[], None]
    attempts: int = 0


class Writer:
    """The one thread that writes to a store: in order, again after failures, in nobody's way.

    A store that is down keeps the order and is tried again, ever more rarely. An item that the
    store refuses although it answers is set aside, so that it holds up nothing.

    Args:
        store: what is written to.
        failed: called in the thread with the reason whenever a write fails.

    """

    def __init__(self, store: Store, failed: Callable[[str], None]) -> None:
        self._store = store
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
            self._store.check_reachable()
        except ConnectionError as error:
            self._failed(str(error))
            return False
        return True

    def _run(self) -> None:
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
                self._store.check_reachable()
                item.write()
            except Exception as error:  # the search must not end because its view does
                self._store.forget()
                kind = "" if isinstance(error, ConnectionError) else f"{type(error).__name__}: "
                self._failed(f"{kind}{cause_of(error)}")
                _log.debug("writing %s failed", item.what, exc_info=True)
                if not self._store.alive():
                    return False
                item.attempts += 1
                if item.attempts < ATTEMPTS or item.what == "opened":
                    return False
                self._aside.append(item)
            finally:
                self._busy_since = None
            backlog.popleft()
            with self._idle:
                self._pending -= 1
                self._idle.notify_all()
        return True
