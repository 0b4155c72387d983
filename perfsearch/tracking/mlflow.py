"""The live view of a search in MLflow: never in the search's way."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perfsearch.search.knob import Knob
from perfsearch.search.trial import Trial
from perfsearch.tracking import names, owner
from perfsearch.tracking.mirror import Mirror
from perfsearch.tracking.redact import Redactor
from perfsearch.tracking.spool import Spool
from perfsearch.tracking.uri import how_to_open, locate, without_credentials

FIRST_RETRY_S = 2.0
LONGEST_RETRY_S = 60.0
CLOSING_RETRY_S = 1.0
GIVE_UP_S = 5.0
"""How long the end of a search waits for a store that is down all the while."""

ATTEMPTS = 3
"""How often a record is tried that the store refuses although it answers."""

SLOW_S = 60.0
"""A record that waits longer than this for the store is worth a warning."""

_log = logging.getLogger(__name__)


@dataclass
class _Item:
    record: dict[str, Any]
    trial: Trial | None = None
    attempts: int = 0
    since: float = 0.0


class Tracker:
    """Mirrors a search into MLflow from one writer thread.

    No method waits for the store, and none raises because of it: a store that is down or slow leads
    to one warning, and what was missed is written later, at the latest by ``perfsearch-sync``.
    ``close`` waits for the rest, up to its time limit.

    Args:
        uri: the store; ``None`` takes ``MLFLOW_TRACKING_URI``, then SQLite in ``directory``.
        experiment: its name; several searches may share it.
        run_dir: the search's directory.
        search_id: names the search, the same when it is resumed.
        name: name of the search's run; by default that of the run directory.
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
        name: str = "",
        directory: Path | None = None,
    ) -> None:
        self.location = locate(uri, directory)
        self.run_dir = Path(run_dir).resolve()
        self.name = name or self.run_dir.name
        self._mirror = Mirror(self.location, experiment, search_id, self.run_dir)
        self._redact = Redactor()
        self._knob_names: tuple[str, ...] = ()
        self.complete = True
        self._queue: queue.Queue[_Item | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._idle = threading.Condition()
        self._pending = 0
        self._aside: list[_Item] = []
        self._warned = False
        self._spool_failed = False
        self._busy_since: float | None = None
        self._deadline = float("inf")
        self._spool: Spool | None = None

    def open(
        self,
        parameters: Mapping[str, Any],
        tags: Mapping[str, str] | None = None,
        knobs: Sequence[Knob] = (),
    ) -> None:
        """Begin the search's run, or go on with it after a resume.

        Args:
            parameters: the configuration, may be nested; secrets of the environment are masked.
            tags: tags of the search's run.
            knobs: the searched knobs, whose kinds decide what stands for ``null``.

        """
        self._knob_names = tuple(knob.name for knob in knobs)
        self.complete = False
        try:
            self._spool = Spool(self.run_dir)
        except OSError as error:
            self._spool_broke(error)
        self._thread = threading.Thread(target=self._run, name="mlflow-writer", daemon=True)
        self._thread.start()
        self._put(
            {
                "kind": "open",
                "name": self.name,
                "uri": without_credentials(self.location.uri),
                "artifact_location": self.location.artifact_location,
                "experiment": self._mirror.experiment,
                "search_id": self._mirror.search_id,
                "parameters": {k: self._redact.text(v) for k, v in names.flat(parameters).items()},
                "tags": {k: self._redact.text(str(v)) for k, v in (tags or {}).items()},
                "nulls": {k.name: names.null_value(k) for k in knobs},
                "owner": owner.owner_tags(),
            }
        )

    def trial(self, trial: Trial, knob_names: Sequence[str] = ()) -> None:
        """Show a trial that ended; one that was shown already is left as it is.

        Args:
            trial: not to be changed afterwards.
            knob_names: the searched knobs, the same in every trial; by default those given to
                ``open``, and without any those of the trial's configuration.

        """
        knobs = list(knob_names or self._knob_names or trial.configuration)
        record = {"kind": "trial", "number": trial.number, "knobs": knobs}
        self._put(record, replace(trial, configuration=dict(trial.configuration)))

    def summary(
        self, metrics: Mapping[str, float], tags: Mapping[str, str] | None = None, note: str = ""
    ) -> None:
        """Metrics and tags of the search's run, which the experiment page compares.

        The tag ``perfsearch.best_trial`` with a trial's number marks that trial's run.
        """
        self._put(
            {
                "kind": "summary",
                "metrics": names.finite(metrics),
                "tags": {k: self._redact.text(str(v)) for k, v in (tags or {}).items()},
                "note": self._redact.text(note),
            }
        )

    def series(self, name: str, step: int, value: float) -> None:
        """One point of a series of the search's run."""
        if names.finite({name: value}):
            self._put({"kind": "series", "name": name, "step": step, "value": value})

    def artifacts(self, paths: Path | Sequence[Path]) -> None:
        """Files or directories to upload as they are when their turn comes."""
        listed = [paths] if isinstance(paths, Path) else paths
        self._put({"kind": "artifacts", "paths": [str(Path(p).resolve()) for p in listed]})

    def close(self, status: str = "FINISHED", timeout_s: float = 60.0) -> None:
        """End the search's run, wait for what is not written yet, and stop.

        Afterwards ``complete`` tells whether everything was written.

        Args:
            status: ``FINISHED``, ``FAILED`` or ``KILLED``.
            timeout_s: how long to wait at most.

        """
        if self._thread is None:
            return
        self._put({"kind": "close", "status": status})
        self._deadline = time.monotonic() + timeout_s
        self._queue.put(None)
        self._thread.join(timeout_s)
        self.complete = not self._thread.is_alive() and self._pending == 0 and not self._aside
        self._thread = None
        if not self.complete:
            _log.warning(
                "MLflow does not have all of this search yet; nothing is lost. "
                "Upload the rest with: perfsearch-sync %s",
                self.run_dir,
            )
        if self._spool is not None:
            self._spool.close()
            self._spool = None

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything so far is written; ``False`` when the time is over before."""
        with self._idle:
            return self._idle.wait_for(lambda: self._pending == 0, timeout_s)

    def how_to_open(self) -> str:
        """The command that opens MLflow's UI on the store, or the address of a server."""
        return how_to_open(self.location, self._mirror.experiment_id)

    def _put(self, record: dict[str, Any], trial: Trial | None = None) -> None:
        if self._thread is None:
            raise RuntimeError("the tracker is not open")
        record["time_ms"] = round(time.time() * 1e3)
        if self._spool is not None:
            try:
                self._spool.append(record)
            except OSError as error:
                self._spool_broke(error)
        with self._idle:
            self._pending += 1
        self._queue.put(_Item(record, trial, since=time.monotonic()))
        busy = self._busy_since
        if busy is not None and time.monotonic() - busy > SLOW_S:
            self._warn(f"it has not answered for {time.monotonic() - busy:.0f} s")

    def _spool_broke(self, error: OSError) -> None:
        if not self._spool_failed:
            self._spool_failed = True
            _log.warning(
                "cannot write %s (%s): should MLflow miss something, "
                "perfsearch-sync can upload trials but not the summary",
                self.run_dir / "tracking.jsonl",
                error,
            )

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "the MLflow store %s is not available (%s). The search goes on; results are kept "
                "in %s and uploaded later",
                without_credentials(self.location.uri),
                self._redact.text(why),
                self.run_dir,
            )

    def _run(self) -> None:
        backlog: deque[_Item] = deque()
        delay, retry_at, closing = FIRST_RETRY_S, 0.0, False
        down_since: float | None = None
        if self._spool is not None and not self._spool.lock():
            self._spool.lock(wait=True)  # an upload of an earlier run of this search ends first
        while True:
            if not closing:
                wait = max(0.0, retry_at - time.monotonic()) if backlog else None
                closing = self._take(backlog, wait)
                if closing:
                    delay, retry_at, down_since = CLOSING_RETRY_S, 0.0, None
            elif backlog:
                time.sleep(max(0.0, min(retry_at, self._deadline) - time.monotonic()))
            if backlog and time.monotonic() >= retry_at:
                left = len(backlog)
                if self._write(backlog):
                    delay = FIRST_RETRY_S
                else:
                    now = time.monotonic()
                    down_since = now if down_since is None or len(backlog) < left else down_since
                    retry_at = now + delay
                    delay = min(2 * delay, CLOSING_RETRY_S if closing else LONGEST_RETRY_S)
            if closing:
                now = time.monotonic()
                gone = down_since is not None and now - down_since >= GIVE_UP_S
                if not backlog or gone or now >= self._deadline:
                    return

    def _take(self, backlog: deque[_Item], wait_s: float | None) -> bool:
        """Move what came into the backlog; ``True`` when the end was asked for."""
        try:
            item = self._queue.get(timeout=wait_s)
            while item is not None:
                backlog.append(item)
                item = self._queue.get_nowait()
        except queue.Empty:
            return False
        return True

    def _write(self, backlog: deque[_Item]) -> bool:
        """Write the backlog in order; ``False`` when the store failed."""
        while backlog:
            item = backlog[0]
            self._busy_since = time.monotonic()
            try:
                self._mirror.check_reachable()
                self._mirror.apply(item.record, item.trial)
            except Exception as error:  # the search must not end because its view does
                self._mirror.forget()
                self._warn(f"{type(error).__name__}: {str(error).splitlines()[0:1]}")
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
