"""The live view of a search in MLflow: never in the search's way."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from perfsearch.core.knob import Knob
from perfsearch.core.trial import Trial
from perfsearch.tracking import names, owner, spool
from perfsearch.tracking.mirror import Mirror
from perfsearch.tracking.redact import Redactor
from perfsearch.tracking.spool import Spool
from perfsearch.tracking.uri import how_to_open, locate, without_credentials
from perfsearch.tracking.writer import Item, Writer

SLOW_S = 60.0
"""A call that the store does not answer for so long is worth a warning."""

_log = logging.getLogger(__name__)


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
        self._writer: Writer | None = None
        self._warned = False
        self._spool_failed = False
        self._spool: Spool | None = None

    def open(
        self,
        parameters: Mapping[str, Any],
        tags: Mapping[str, str] | None = None,
        knobs: Sequence[Knob] = (),
    ) -> None:
        """Begin the search's run, or go on with it after a resume.

        After a resume, what an earlier process recorded and did not show is shown first.

        Args:
            parameters: the configuration, may be nested; secrets of the environment are masked.
            tags: tags of the search's run.
            knobs: the searched knobs, whose kinds decide what stands for ``null``.

        """
        self._knob_names = tuple(knob.name for knob in knobs)
        self.complete = False
        told = self.run_dir / spool.FILE_NAME
        resumed = told.exists() and told.stat().st_size > 0
        try:
            self._spool = Spool(self.run_dir)
        except OSError as error:
            self._spool_broke(error)
        self._writer = Writer(self._mirror, self._become_the_only_writer, self._warn)
        self._writer.start()
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
        if resumed:
            self._writer.put(Item({"kind": "catch_up"}))

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
        if self._writer is None:
            return
        self._put({"kind": "close", "status": status})
        self.complete = self._writer.close(timeout_s)
        self._writer = None
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
        return self._writer is None or self._writer.flush(timeout_s)

    def how_to_open(self) -> str:
        """The command that opens MLflow's UI on the store, or the address of a server.

        Empty where the store took nothing of the search, so that there is nothing to look at.
        """
        if not self._mirror.has_run:
            return ""
        return how_to_open(self.location, self._mirror.experiment_id)

    def _put(self, record: dict[str, Any], trial: Trial | None = None) -> None:
        if self._writer is None:
            raise RuntimeError("the tracker is not open")
        record["time_ms"] = round(time.time() * 1e3)
        if self._spool is not None:
            try:
                self._spool.append(record)
            except OSError as error:
                self._spool_broke(error)
        self._writer.put(Item(record, trial))
        silent_s = self._writer.silent_s
        if silent_s > SLOW_S:
            self._warn(f"it has not answered for {silent_s:.0f} s")

    def _become_the_only_writer(self) -> None:
        if self._spool is not None and not self._spool.lock():
            self._spool.lock(wait=True)  # an upload of an earlier run of this search ends first

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
