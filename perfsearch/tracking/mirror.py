"""Writes records of a search into an MLflow store, such that writing one twice changes nothing."""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfsearch.core.journal import JOURNAL
from perfsearch.core.trial import Trial
from perfsearch.tracking import names, owner, recorded, spool
from perfsearch.tracking.client import Client, connect
from perfsearch.tracking.redact import Redactor
from perfsearch.tracking.uri import StoreLocation, is_reachable

SEARCH_ID = "perfsearch.search_id"
ROLE = "perfsearch.role"
TRIAL = "perfsearch.trial"
DIGEST = "perfsearch.digest"
BEST = "perfsearch.best"
BEST_TRIAL = "perfsearch.best_trial"
NOTE = "mlflow.note.content"

LARGEST_FILE = 64 * 1024**2
"""Bytes of a file that is still uploaded; a rank's log may grow without end."""

_log = logging.getLogger(__name__)


@dataclass
class Child:
    """A trial's run, as the store has it."""

    run_id: str
    status: str
    digest: str


@dataclass
class Mirror:
    """The MLflow view of one search.

    Every method may raise whatever MLflow, its database or the network raises; the call may then be
    repeated, as runs are found again by their tags.

    Attributes:
        location: the store.
        experiment: name of the experiment.
        search_id: names the search; the same after a resume.
        run_dir: base of the artifacts' paths.

    """

    location: StoreLocation
    experiment: str
    search_id: str
    run_dir: Path
    experiment_id: str | None = None
    _client: Client | None = None
    _parent: str | None = None
    _children: dict[int, Child] | None = None
    _nulls: dict[str, int | str] = field(default_factory=dict)
    _seen: dict[str, list[Any]] = field(default_factory=dict)
    _redact: Redactor = field(default_factory=Redactor)

    def apply(self, record: Mapping[str, Any], trial: Trial | None = None) -> None:
        """Write one record; ``trial`` goes with a record of kind ``trial``.

        Raises:
            ValueError: the record's kind is unknown.

        """
        kind = record["kind"]
        if kind == "open":
            self.open(record)
        elif kind == "trial":
            assert trial is not None
            self.trial(trial, record["knobs"], record["time_ms"])
        elif kind == "catch_up":
            self.catch_up()
        elif kind == "summary":
            self.summary(record["metrics"], record["tags"], record["note"], record["time_ms"])
        elif kind == "series":
            key, point = names.clean_key(record["name"]), (record["step"], record["value"])
            self._metrics(self.parent, {key: [point]}, record["time_ms"])
        elif kind == "artifacts":
            self.artifacts([self.run_dir / path for path in record["paths"]])
        elif kind == "close":
            self.client.finish(self.parent, record["status"], record["time_ms"])
        else:
            raise ValueError(f"a tracking record of unknown kind {kind!r}")

    def alive(self) -> bool:
        """Whether the store answers, found out without MLflow's long retries."""
        try:
            self.check_reachable()
            self.client.ping()
        except Exception as error:  # any failure here means the same: not now
            _log.debug("the store does not answer: %s", error)
            return False
        return True

    def check_reachable(self) -> None:
        """Fail at once where MLflow itself would try again for minutes.

        Raises:
            ConnectionError: nothing listens at the server's address.

        """
        if self.location.is_server and not is_reachable(self.location.uri):
            raise ConnectionError("nothing answers at its address")

    @property
    def client(self) -> Client:
        """The store's client; the first use imports MLflow and migrates the database."""
        if self._client is None:
            self._client = connect(self.location)
        return self._client

    @property
    def parent(self) -> str:
        """Run of the search.

        Raises:
            LookupError: the search was never opened.

        """
        if self._parent is None:
            raise LookupError("no record of kind 'open' came before")
        return self._parent

    @property
    def has_run(self) -> bool:
        """Whether the store has a run of the search."""
        return self._parent is not None

    def forget(self) -> None:
        """Look runs up anew: after a failure the store may have more than was answered."""
        self._children = None

    def open(self, record: Mapping[str, Any]) -> None:
        """Begin the search's run, or go on with the one that is there."""
        self.experiment_id = self.client.experiment(self.experiment, self.location)
        self.sweep()
        self._nulls.update(record.get("nulls", {}))
        tags = {**record["tags"], **record["owner"], SEARCH_ID: self.search_id, ROLE: "search"}
        found = self._find("search")
        if found:
            self._parent = found[0].info.run_id
            have: Mapping[str, str] = found[0].data.params
            self.client.reopen(self._parent)
        else:
            have = {}
            self._parent = self.client.create(
                self.experiment_id, record["name"], record["time_ms"], self._tags(tags)
            )
        params, long = self._params(names.flat(record["parameters"]))
        tags, long_tags = self._cut_tags(tags)
        new = {k: v for k, v in params.items() if k not in have}
        self.client.log(self._parent, {}, new, tags, 0)
        self._texts(self._parent, {**long, **long_tags})

    def trial(self, trial: Trial, knobs: Sequence[str], time_ms: int) -> None:
        """Write a trial's run; one that is there already is completed, or left as it is."""
        digest, status = names.digest(trial), names.mlflow_status(trial.status)
        child = self._known_children().get(trial.number)
        if child is not None and (child.digest, child.status) == (digest, status):
            return
        if child is None:
            tags = {
                SEARCH_ID: self.search_id,
                ROLE: "trial",
                TRIAL: str(trial.number),
                "mlflow.parentRunId": self.parent,
                **owner.owner_tags(),
            }
            begin = time_ms - round(trial.seconds * 1e3)
            assert self.experiment_id is not None
            run = self.client.create(
                self.experiment_id, names.run_name(trial.number), begin, self._tags(tags)
            )
            child = self._known_children()[trial.number] = Child(run, "RUNNING", "")
        metrics = {k: [(0, v)] for k, v in names.trial_metrics(trial).items()}
        metrics.update({k: v for k, v in names.trial_series(trial).items() if v})
        for knob, value in trial.configuration.items():
            if value is not None:
                self._seen.setdefault(knob, []).append(value)
        nulls = {k: names.null_of(v) for k, v in self._seen.items()} | self._nulls
        params, long = self._params(names.knob_params(trial.configuration, knobs, nulls))
        tags, long_tags = self._cut_tags(names.trial_tags(trial))
        if child.digest:
            # The trial was run again under its number: params cannot change, the rest can.
            params = {}
        self.client.log(child.run_id, metrics, params, {**tags, DIGEST: digest}, time_ms)
        self._texts(child.run_id, {**long, **long_tags})
        self.client.finish(child.run_id, status, time_ms)
        child.digest, child.status = digest, status

    def catch_up(self) -> None:
        """Write the trials that an earlier process of this search recorded and did not show.

        Raises:
            SyncError: the journal cannot be read.

        """
        if not (self.run_dir / JOURNAL).exists():
            return  # nothing was recorded
        records = recorded.read_records(self.run_dir)
        for record, trial in recorded.with_moments(recorded.read_trials(self.run_dir), records):
            self.trial(trial, record["knobs"], record["time_ms"])

    def summary(
        self, metrics: Mapping[str, float], tags: Mapping[str, str], note: str, time_ms: int
    ) -> None:
        """Metrics, tags and the note of the search's run; ``perfsearch.best_trial`` marks it."""
        values = {k: [(0, v)] for k, v in names.finite(metrics).items()}
        cut, long = self._cut_tags({**tags, **({NOTE: note} if note else {})})
        self.client.log(self.parent, values, {}, cut, time_ms)
        self._texts(self.parent, long)
        if BEST_TRIAL in tags and (best := self._known_children().get(int(tags[BEST_TRIAL]))):
            self.client.log(best.run_id, {}, {}, {BEST: "true"}, time_ms)

    def artifacts(self, paths: Sequence[Path]) -> None:
        """Upload files under their paths in the run directory, secrets masked."""
        for path in paths:
            if path.is_dir():
                files = (p for p in path.rglob("*") if p.is_file() and not p.is_symlink())
                self.artifacts(sorted(p for p in files if p.name != spool.FILE_NAME))
                continue
            if not path.exists():
                _log.info("%s is gone and is not uploaded", path)
                continue
            if path.stat().st_size > LARGEST_FILE:
                _log.warning("%s is too large to upload; it stays where it is", path)
                continue
            inside = path.resolve().is_relative_to(self.run_dir.resolve())
            folder = path.resolve().parent.relative_to(self.run_dir.resolve()) if inside else Path()
            self._upload(self.parent, path.name, path.read_bytes(), folder.as_posix())

    def sweep(self) -> None:
        """End the runs of searches whose process is gone: nothing else will."""
        for run in self.client.running(self.experiment_id, self.location):
            if SEARCH_ID in run.data.tags and owner.is_dead(run.data.tags):
                self.client.finish(run.info.run_id, "KILLED", None)

    def end_if_running(self, status: str) -> None:
        """Give the search's run an end if it has none."""
        if self.client.status(self.parent) == "RUNNING":
            self.client.finish(self.parent, status, None)

    def _find(self, role: str) -> list[Any]:
        assert self.experiment_id is not None
        rule = f"tags.`{SEARCH_ID}` = '{self.search_id}' and tags.`{ROLE}` = '{role}'"
        return self.client.search(self.experiment_id, rule)

    def _known_children(self) -> dict[int, Child]:
        if self._children is None:
            self._children = {}
            for run in self._find("trial"):
                tags = run.data.tags
                child = Child(run.info.run_id, run.info.status, tags.get(DIGEST, ""))
                self._children.setdefault(int(tags[TRIAL]), child)
        return self._children

    def _metrics(
        self, run_id: str, series: Mapping[str, list[tuple[int, float]]], time_ms: int
    ) -> None:
        points = {k: [(s, v) for s, v in p if names.finite({k: v})] for k, p in series.items()}
        self.client.log(run_id, points, {}, {}, time_ms)

    def _tags(self, tags: Mapping[str, str]) -> dict[str, str]:
        return self._cut_tags(tags)[0]

    def _params(self, params: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
        """Params as MLflow takes them, and the full text of those that were cut."""
        masked = {k: self._redact.text(v) for k, v in params.items()}
        long = {k: v for k, v in masked.items() if len(v) > names.PARAM_LIMIT}
        return {k: _cut(v, names.PARAM_LIMIT) for k, v in masked.items()}, long

    def _cut_tags(self, tags: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
        masked = {names.clean_key(k): self._redact.text(str(v)) for k, v in tags.items()}
        long = {k: v for k, v in masked.items() if len(v) > names.TAG_LIMIT}
        return {k: _cut(v, names.TAG_LIMIT) for k, v in masked.items()}, long

    def _texts(self, run_id: str, texts: Mapping[str, str]) -> None:
        for key, value in texts.items():
            self._upload(run_id, re.sub(r"[^\w.-]", "_", key) + ".txt", value.encode(), "long")

    def _upload(self, run_id: str, name: str, content: bytes, folder: str) -> None:
        with tempfile.TemporaryDirectory(prefix="perfsearch-") as directory:
            copy = Path(directory) / name
            copy.write_bytes(self._redact.data(content))
            self.client.upload(run_id, copy, None if folder in ("", ".") else folder)


def _cut(value: str, limit: int) -> str:
    return value if len(value) <= limit else value[: limit - 3] + "..."
