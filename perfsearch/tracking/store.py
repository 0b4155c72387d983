"""The view of a search in an MLflow store, such that writing twice changes nothing."""

from __future__ import annotations

import json
import logging
import os
import platform
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from perfsearch.core.files import (
    temporary_directory,
)
from perfsearch.core.journal import Event
from perfsearch.core.knob import Configuration
from perfsearch.core.secrets import Redactor
from perfsearch.core.trial import Trial
from perfsearch.tracking import names
from perfsearch.tracking.best_so_far import BestSoFar
from perfsearch.tracking.client import Client, connect
from perfsearch.tracking.export import SYSTEM_SERIES
from perfsearch.tracking.location import StoreLocation, why_unreachable

SEARCH_ID = "perfsearch.search_id"

ROLE = "perfsearch.role"

TRIAL = "perfsearch.trial"

DIGEST = "perfsearch.digest"

BEST = "perfsearch.best"

BEST_TRIAL = "perfsearch.best_trial"

NOTE = "mlflow.note.content"

VERDICT = "perfsearch.verdict"

SHOWN = ("opened", "finished", "simulated", "summarised", "ended")
"""The journal's events that a view has a place for."""

LARGEST_FILE = 64 * 1024**2
"""Bytes of a file that is still uploaded; a rank's log may grow without end."""


_log = logging.getLogger(__name__)


@dataclass
class Store:
    """The MLflow view of one search, written from the events of its journal.

    What is there already is known from MLflow itself: runs are found again by their tags, a trial
    carries a digest of its record, and MLflow keeps a point once that is written twice under the
    same key, step and time. So every event may be shown again, in whole or after a failure in its
    midst. Every method may raise whatever MLflow, its database or the network raises.

    Attributes:
        location: the store.
        experiment: name of the experiment.
        search_id: names the search; the same after a resume.
        run_dir: its directory, whose name its run has.

    """

    location: StoreLocation
    experiment: str
    search_id: str
    run_dir: Path
    experiment_id: str | None = None
    _client: Client | None = None
    _parent: str | None = None
    _children: dict[int, Child] | None = None
    _knobs: tuple[str, ...] = ()
    _nulls: dict[str, int | str] = field(default_factory=dict)
    _baseline: Mapping[str, Any] = field(default_factory=dict)
    _configurations: dict[int, Configuration] = field(default_factory=dict)
    _best: BestSoFar = field(default_factory=BestSoFar)
    _name: str = ""
    _redact: Redactor = field(default_factory=Redactor)

    def show(self, event: Event) -> None:
        """Show one event of the journal; those that a view has no place for change nothing."""
        data, time_ms = event.data, round(event.data.get("unix_s", 0.0) * 1e3)
        if event.name == "opened":
            self.open(data, time_ms)
        elif event.name == "finished":
            self.trial(Trial.from_json(data["trial"]), time_ms)
        elif event.name == "simulated":
            series = {names.clean_key(key): points for key, points in data["series"].items()}
            self.client.log(self.parent, series, {}, {}, time_ms)
        elif event.name == "summarised":
            self.summary(data["numbers"], data["tags"], data["note"], time_ms)
            if SYSTEM_SERIES in data["files"]:
                self.system_series(self.run_dir / SYSTEM_SERIES)
            self.artifacts([self.run_dir / name for name in data["files"]])
        elif event.name == "ended":
            self.finish(names.mlflow_status_of_search(data["exit_code"]), time_ms)

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
            ConnectionError: the server does not answer as one that works, or the database is gone.

        """
        why = why_unreachable(self.location.uri) if self.location.is_server else ""
        if self._client is not None and self.location.is_gone:
            why = f"{self.location.database} is gone"
        if why:
            raise ConnectionError(why)

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
            raise LookupError("no event 'opened' came before")
        return self._parent

    @property
    def has_run(self) -> bool:
        """Whether the store has a run of the search."""
        return self._parent is not None

    def forget(self) -> None:
        """Look runs up anew: after a failure the store may have more than was answered."""
        self._children = None

    def open(self, opened: Mapping[str, Any], time_ms: int) -> None:
        """Begin the search's run, or go on with the one that is there."""
        self.experiment_id = self.client.experiment(self.experiment, self.location)
        self.sweep()
        definition = opened.get("definition", {})
        self._knobs = tuple(knob[0] for knob in definition.get("knobs", ()))
        view = names.saved_view(self._knobs)
        self.client.tag_experiment(self.experiment_id, *view)
        self._nulls = names.nulls(definition)
        self._baseline = definition.get("baseline", {})
        self._name = names.search_name(opened.get("parameters", {}), self.run_dir.name)
        tags = {"perfsearch.run_dir": str(self.run_dir), **liveness_tags()}
        tags, long_tags = self._cut_tags({**tags, SEARCH_ID: self.search_id, ROLE: "search"})
        found = self._find("search")
        if found:
            self._parent = found[0].info.run_id
            have: Mapping[str, str] = found[0].data.params
            self.client.reopen(self._parent)
        else:
            have = {}
            self._parent = self.client.create(self.experiment_id, self._name, time_ms, tags)
        params, long = self._params(names.flat(opened.get("parameters", {})))
        new = {k: v for k, v in params.items() if k not in have}
        self.client.log(self._parent, {}, new, tags, 0)
        self._texts(self._parent, {**long, **long_tags})

    def trial(self, trial: Trial, time_ms: int) -> None:
        """Write a trial's run; one that is there already is completed, or left as it is."""
        digest, status = names.digest(trial), names.mlflow_status(trial.status)
        self._configurations[trial.number] = trial.configuration
        point = self._best.add(trial)
        child = self._known_children().get(trial.number)
        if child is not None and (child.digest, child.status) == (digest, status):
            return
        if point is not None:
            curves = {
                "best/objective": point.objective,
                "best/speed_up": self._best.speed_up(point.cost),
            }
            values = {k: [(point.trial, v)] for k, v in names.finite(curves).items()}
            self.client.log(self.parent, values, {}, {}, time_ms)
        if child is None:
            tags = {
                SEARCH_ID: self.search_id,
                ROLE: "trial",
                TRIAL: str(trial.number),
                "mlflow.parentRunId": self.parent,
                **liveness_tags(),
            }
            begin = time_ms - round(trial.seconds * 1e3)
            assert self.experiment_id is not None
            name = self._redact.text(names.trial_name(trial, self._baseline))
            run = self.client.create(self.experiment_id, name, begin, self._cut_tags(tags)[0])
            child = self._known_children()[trial.number] = Child(run, "RUNNING", "")
        known = names.trial_metrics(trial, self._best.baseline_cost)
        metrics = {k: [(0, v)] for k, v in names.headlines(known).items()}
        metrics.update({k: v for k, v in names.trial_series(trial).items() if v})
        knobs = self._knobs or tuple(trial.configuration)
        params, long = self._params(names.knob_params(trial.configuration, knobs, self._nulls))
        tags, long_tags = self._cut_tags(names.trial_tags(trial))
        if child.digest:
            # The trial was run again under its number: params cannot change, the rest can.
            params = {}
        self.client.log(child.run_id, metrics, params, {**tags, DIGEST: digest}, time_ms)
        self._texts(child.run_id, {**long, **long_tags})
        listed = json.dumps(dict(sorted(known.items())), indent=1)
        self._upload(child.run_id, names.ALL_METRICS, listed.encode(), "")
        self.client.finish(child.run_id, status, time_ms)
        child.digest, child.status = digest, status

    def summary(
        self, metrics: Mapping[str, float], tags: Mapping[str, str], note: str, time_ms: int
    ) -> None:
        """Metrics, tags and the note of the search's run; ``perfsearch.best_trial`` marks it."""
        found = dict(metrics)
        if "search/speed_up" in found:  # in one column with those of the trials
            found["objective/speed_up"] = found["search/speed_up"]
        values = {k: [(0, v)] for k, v in names.finite(found).items()}
        params, kept = self._best_params(tags)
        note = "\n\n".join(filter(None, [note, kept]))
        cut, long = self._cut_tags({**tags, **({NOTE: note} if note else {})})
        self.client.log(self.parent, values, params, cut, time_ms)
        self.client.rename(self.parent, names.ended_name(self._name, metrics, tags))
        self._texts(self.parent, long)
        if BEST_TRIAL in tags and (best := self._known_children().get(int(tags[BEST_TRIAL]))):
            self.client.log(best.run_id, {}, {}, {BEST: "true"}, time_ms)

    def _best_params(self, tags: Mapping[str, str]) -> tuple[dict[str, str], str]:
        """Params with the values that are handed over, and a line where others stand there.

        MLflow's params cannot change, and a search that is resumed after its end may.
        """
        configuration = self._configurations.get(int(tags.get(BEST_TRIAL, -1)))
        if configuration is None or tags.get(VERDICT) == names.NOT_SEARCHED:
            return {}, ""
        found = names.knob_params(configuration, self._knobs, self._nulls, "best")
        params, _ = self._params(found)
        run = self.client.run(self.parent)
        have = {} if run is None else run.data.params
        if any(have.get(key, value) != value for key, value in params.items()):
            now = " ".join(names.changes(configuration, self._baseline)) or "the baseline"
            return {}, f"The params best/... are of an earlier end of this search. Now: {now}"
        return {key: value for key, value in params.items() if key not in have}, ""

    def system_series(self, file: Path) -> None:
        """Write the sampler's readings of the whole search, each at its time."""
        samples = []
        with suppress(OSError, ValueError):  # gone, or edited by hand
            samples = [json.loads(line) for line in file.read_text().splitlines()]
        self.client.log_timed(self.parent, names.system_series(samples))

    def artifacts(self, paths: Sequence[Path]) -> None:
        """Upload files under their paths in the run directory, secrets masked."""
        for path in paths:
            if path.is_dir():
                files = (p for p in path.rglob("*") if p.is_file() and not p.is_symlink())
                self.artifacts(sorted(files))
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

    def finish(self, status: str, time_ms: int | None = None) -> None:
        """Give the search's run its end; the present is its time where none is known."""
        self.client.finish(self.parent, status, time_ms)

    def sweep(self) -> None:
        """End the runs of searches whose process is gone: nothing else will."""
        for run in self.client.running(self.experiment_id, self.location):
            if SEARCH_ID in run.data.tags and is_dead(run.data.tags):
                self.client.finish(run.info.run_id, "KILLED", None)

    def end_if_running(self, status: str) -> None:
        """Give the search's run an end if it has none."""
        if self.client.status(self.parent) == "RUNNING":
            self.finish(status)

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

    def _params(self, params: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
        """Params as MLflow takes them, and the full text of those that were cut."""
        return self._cut({k: self._redact.text(v) for k, v in params.items()}, names.PARAM_LIMIT)

    def _cut_tags(self, tags: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
        masked = {names.clean_key(k): self._redact.text(str(v)) for k, v in tags.items()}
        return self._cut(masked, names.TAG_LIMIT)

    @staticmethod
    def _cut(values: Mapping[str, str], limit: int) -> tuple[dict[str, str], dict[str, str]]:
        long = {k: v for k, v in values.items() if len(v) > limit}
        cut = {k: f"{v[: limit - 3]}..." if k in long else v for k, v in values.items()}
        return cut, long

    def _texts(self, run_id: str, texts: Mapping[str, str]) -> None:
        for key, value in texts.items():
            self._upload(run_id, re.sub(r"[^\w.-]", "_", key) + ".txt", value.encode(), "long")

    def _upload(self, run_id: str, name: str, content: bytes, folder: str) -> None:
        with temporary_directory() as directory:
            copy = directory / name
            copy.write_bytes(self._redact.data(content))
            self.client.upload(run_id, copy, None if folder in ("", ".") else folder)


@dataclass
class Child:
    """A trial's run, as the store has it."""

    run_id: str
    status: str
    digest: str


def shown(events: Sequence[Event]) -> list[Event]:
    """What a view needs of a journal so far, in order.

    Of the trials that were run again under their number only the last end, as an older one would
    be written over it and back; and no end of a search that was resumed since. Where an earlier
    version did not note when a trial ended, that is reckoned, always to the same moment.
    """
    last = {e.data["trial"]["number"]: e.number for e in events if e.name == "finished"}
    resumed = max((e.number for e in events if e.name == "opened"), default=0)
    found, clock_s = [], 0.0
    for event in events:
        clock_s = event.data.get("unix_s", clock_s)
        if event.name == "finished":
            if "unix_s" not in event.data:
                clock_s += event.data["trial"].get("seconds", 0.0)
                event = replace(event, data={**event.data, "unix_s": clock_s})
            if last[event.data["trial"]["number"]] != event.number:
                continue
        is_past_end = event.name == "ended" and event.number < resumed
        if is_past_end or event.name not in SHOWN:
            continue
        found.append(event)
    return found


# -----------------------------------------------------------------------------
# Liveness: whether the process that writes a run is still there.

HOST = "perfsearch.host"

PID = "perfsearch.controller_pid"

START = "perfsearch.controller_start"

_SLACK_S = 2.0
"""Start times have the resolution of a tick and shift with the wall clock's corrections."""


def liveness_tags() -> dict[str, str]:
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
