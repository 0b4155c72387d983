"""The view of a search in an MLflow store, such that writing twice changes nothing."""

from __future__ import annotations

import atexit
import http.client
import json
import logging
import os
import platform
import re
import shlex
import shutil
import sqlite3
import ssl
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from glob import escape
from pathlib import Path
from typing import Any
from uuid import uuid4

from perfsearch.core.errors import BadInputError
from perfsearch.core.files import (
    make_temporary_directory,
    remove_temporary_directory,
    temporary_directory,
)
from perfsearch.core.journal import Event
from perfsearch.core.knob import Configuration
from perfsearch.core.locks import lock
from perfsearch.core.secrets import Redactor
from perfsearch.core.trial import Trial
from perfsearch.tracking import names
from perfsearch.tracking.best_so_far import BestSoFar
from perfsearch.tracking.export import SYSTEM_SERIES

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
            self.finish("FINISHED" if data["exit_code"] == 0 else "FAILED", time_ms)

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
# Where a store is, and whether anything answers there.


class TrackingError(BadInputError):
    """A store that cannot be used; the message says what can."""


@dataclass(frozen=True)
class StoreLocation:
    """A tracking store.

    Attributes:
        uri: absolute, so that a change of directory does not lead elsewhere.
        artifact_location: where new experiments keep artifacts; ``None`` leaves it to the server.

    """

    uri: str
    artifact_location: str | None

    @property
    def is_server(self) -> bool:
        """Whether it is reached over HTTP."""
        return self.uri.startswith(("http://", "https://"))

    @property
    def database(self) -> Path | None:
        """The file of a database; its directory may have any name, and a query follows the file."""
        if not self.uri.startswith("sqlite:///"):
            return None
        folder, _, name = self.uri.removeprefix("sqlite:///").rpartition("/")
        return Path(folder or "/") / name.partition("?")[0]

    @property
    def query(self) -> str:
        """What follows the file of a database, for SQLAlchemy."""
        return self.uri.rpartition("/")[2].partition("?")[2]

    @property
    def is_gone(self) -> bool:
        """Whether it is a database whose file is not there."""
        return self.database is not None and not self.query and not self.database.exists()

    @property
    def files(self) -> list[Path]:
        """Files and directories of this host that MLflow writes to."""
        found = []
        if self.database is not None:
            endings = ("", "-journal", "-wal", "-shm")
            found += [Path(f"{self.database}{ending}") for ending in endings]
        for place in (self.uri, self.artifact_location or ""):
            if place.startswith("file:"):
                found.append(Path(urllib.request.url2pathname(urllib.parse.urlparse(place).path)))
        return found


def locate(uri: str | None, directory: Path | None = None) -> StoreLocation:
    """Resolve a tracking URI against the directory in which the command was run.

    Args:
        uri: ``None`` takes ``MLFLOW_TRACKING_URI``, and without it SQLite in ``directory``.
        directory: base of relative paths; the current directory by default.

    Raises:
        TrackingError: a plain directory, which MLflow no longer takes as a store.

    """
    base = (directory or Path.cwd()).resolve()
    uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{base / 'mlflow.db'}"
    scheme = re.match(r"^([A-Za-z][A-Za-z0-9+.-]*):", uri)
    if uri.startswith("sqlite:"):
        path = uri.removeprefix("sqlite:///")
        if path == uri or path in ("", ":memory:"):
            raise TrackingError(
                f"tracking.uri={uri}: not a database file. Use sqlite:///mlflow.db or an absolute "
                "sqlite:////path/mlflow.db."
            )
        found = StoreLocation(f"sqlite:///{base / path}", None)
        assert found.database is not None
        _require_usable(uri, found.database)
        return replace(found, artifact_location=(found.database.parent / "mlruns").as_uri())
    is_path = scheme is None and uri not in ("databricks", "databricks-uc")
    if is_path or uri.startswith("file:"):
        if os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() not in ("1", "true"):
            raise TrackingError(
                f"tracking.uri={uri}: MLflow no longer takes a plain directory as its store. Use "
                f"a database, such as sqlite:///{base / 'mlflow.db'}, or a server, http://...; or "
                "set MLFLOW_ALLOW_FILE_STORE=true."
            )
        return StoreLocation((base / uri).as_uri() if is_path else uri, None)
    if uri.split("://", 1)[0].split("+")[0] in ("postgresql", "mysql", "mssql"):
        return StoreLocation(uri, (base / "mlruns").as_uri())
    if not _is_known(uri):
        raise TrackingError(
            f"tracking.uri={uri}: MLflow has no such kind of store. Use a database, such as "
            f"sqlite:///{base / 'mlflow.db'}, or a server, http://..."
        )
    return StoreLocation(uri, None)


def _is_known(uri: str) -> bool:
    """Whether MLflow or a plugin of it takes the scheme."""
    scheme = uri.partition(":")[0]
    if scheme in ("http", "https", "databricks", "databricks-uc", "uc"):
        return True
    from importlib.metadata import entry_points

    return scheme in {e.name for e in entry_points(group="mlflow.tracking_store")}


def _require_usable(uri: str, file: Path) -> None:
    """Find out now what MLflow would try again and again at the end.

    Raises:
        TrackingError: the database cannot be made or written.

    """
    place = file.parent
    while not os.path.exists(place):  # also false where it may not be looked at
        place = place.parent
    reason = _why_not_writable(place)
    if os.path.exists(file):
        if file.is_dir():
            reason = f"{file} is a directory"
        elif not os.access(file, os.R_OK | os.W_OK):
            reason = f"{file} cannot be read and written"
    if reason:
        raise TrackingError(
            f"tracking.uri={uri}: {reason}. Set tracking.uri to a database that can be written, "
            "such as sqlite:///mlflow.db, or tracking.enabled=false."
        )


def _why_not_writable(place: Path) -> str:
    """Why a database, or a directory for it, cannot be made there; empty where it can."""
    if not place.is_dir():
        return f"{place} is no directory"
    try:
        with tempfile.TemporaryFile(dir=place):  # permissions alone do not tell, as in /proc
            return ""
    except OSError as error:
        return f"{place} cannot be written ({error.strerror})"


def without_credentials(uri: str) -> str:
    """The URI as it may be shown: user name and password taken out."""
    parts = urllib.parse.urlsplit(uri)
    if "@" not in parts.netloc:
        return uri
    return parts._replace(netloc="***@" + parts.netloc.rsplit("@", 1)[1]).geturl()


def is_elsewhere(uri: str) -> bool:
    """Whether a store is a server's that is not on this machine."""
    parts = urllib.parse.urlsplit(uri)
    if parts.scheme.partition("+")[0] in ("", "file", "sqlite"):
        return uri.startswith("databricks") or uri == "uc"
    return parts.hostname not in ("localhost", "127.0.0.1", "::1")


def how_to_open(location: StoreLocation, experiment_id: str | None = None) -> str:
    """The address of a server's experiment, or the command that opens the UI on the store.

    The address to open then is on a line below that command.
    """
    shown = without_credentials(location.uri)
    if location.is_server:
        return page_of(shown, experiment_id)
    there = f"\n{page_of(_UI, experiment_id)}" if experiment_id else ""
    return _command_of_ui(location) + there


_UI = "http://127.0.0.1:5000"
"""Where ``mlflow ui`` serves unless it is told otherwise."""


def page_of(server: str, experiment_id: str | None) -> str:
    """The address of an experiment's searches in MLflow's UI, with columns of ours.

    Without the type of workflow the UI shows a page of traces, and none of the runs.
    """
    if not experiment_id:
        return f"{server.rstrip('/')}/#/experiments"
    view = f"workflowType=machine_learning&viewStateShareKey={names.VIEW}"
    return f"{server.rstrip('/')}/#/experiments/{experiment_id}/runs?{view}"


def _command_of_ui(location: StoreLocation) -> str:
    shown = without_credentials(location.uri)
    program = ["mlflow"] if shutil.which("mlflow") else [sys.executable, "-m", "mlflow"]
    words = [*program, "ui", "--backend-store-uri"]
    database = location.database
    if database is not None and _is_odd(database.parent):
        here = shlex.join(["cd", str(database.parent)])
        return f"{here} && {shlex.join([*words, f'sqlite:///{database.name}'])}"
    return shlex.join([*words, shown])


def cause_of(error: BaseException) -> str:
    """What a store's error is of, in one line: the database's own words where it has some.

    MLflow and SQLAlchemy wrap them, now and then with words of their own before them.
    """
    found: BaseException | None = error
    seen: set[int] = set()
    while found is not None and id(found) not in seen:
        if isinstance(found, sqlite3.Error):
            return str(found)
        seen.add(id(found))
        found = found.__cause__ or found.__context__
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


_PATIENCE_S = 3.0
"""How long a server may take to say that it works."""

_DOWN = (407, 502, 503, 504)
"""What proxies, and servers that cannot work now, answer; MLflow would ask again for minutes."""


def why_unreachable(uri: str, timeout_s: float = _PATIENCE_S) -> str:
    """Why a server cannot be used now, asked as MLflow asks but once; empty where it can.

    Whatever else it answers, such as that it wants a password, is for MLflow to tell.
    """
    parts = urllib.parse.urlsplit(uri)
    shown, proxy = without_credentials(uri), _proxy_of(parts)
    through = f" through the proxy {without_credentials(proxy)}" if proxy else ""
    if proxy and not proxy.startswith(("http://", "https://")):
        return ""  # one that only MLflow's client can use
    plain = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="")
    asked = urllib.request.Request(
        plain._replace(path=f"{parts.path.rstrip('/')}/health").geturl(),
        headers={"User-Agent": "perfsearch"},
    )
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({parts.scheme: proxy} if proxy else {}),
        urllib.request.HTTPSHandler(context=ssl._create_unverified_context()),
        _NoRedirects,
    )
    try:
        opener.open(asked, timeout=timeout_s).close()
    except urllib.error.HTTPError as error:
        return f"{shown} answers {error.code} {error.reason}{through}" * (error.code in _DOWN)
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            return f"{shown} has not answered within {timeout_s:g} s{through}"
        if proxy:
            return f"{shown} cannot be reached{through}: {reason}. Past it goes no_proxy=HOST"
        if isinstance(reason, ssl.SSLError):
            return ""
        return f"nothing answers at {shown} ({reason})"
    return ""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Takes a redirect as the answer."""

    def redirect_request(self, *args: Any) -> None:
        """Nothing else is asked."""


def _proxy_of(parts: urllib.parse.SplitResult) -> str:
    """The proxy by which a server is reached; empty for none."""
    host = parts.hostname or ""
    if _is_local(host) or urllib.request.proxy_bypass(host):
        return ""
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all", "")
    return proxy if "://" in proxy or not proxy else f"http://{proxy}"


def _is_local(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


# -----------------------------------------------------------------------------
# MLflow's client of a store.

_QUIET = ("mlflow", "alembic", "sqlalchemy", "urllib3")


def connect(location: StoreLocation) -> Client:
    """Import MLflow and open the store; takes seconds the first time.

    Raises:
        ImportError: MLflow is not installed.
        Exception: whatever the store raises when it cannot be opened.

    """
    with _some_home():
        from mlflow.tracking import MlflowClient

    for name in _QUIET:
        # Their news (tables created, migrations run) would tear the terminal's live view, and what
        # fails is raised as well: a store that is gone would else be thousands of lines.
        logging.getLogger(name).setLevel(logging.CRITICAL)
    uri = location.uri
    if location.database is not None:
        uri = _sqlite(location.database, location.query)
    _keep_from_proxies(location)
    with _initialising(location) as file:
        if file is not None and not file.exists():
            _make(file)
        client = MlflowClient(tracking_uri=uri)
        client.search_experiments(max_results=1)
    return Client(client)


def _is_odd(directory: Path) -> bool:
    """Whether a URI with the directory's name might mean another one.

    SQLAlchemy takes some characters of a path as signs, which of them depends on its version.
    """
    return any(sign in str(directory) for sign in "%?#")


def _sqlite(file: Path, query: str = "") -> str:
    """The URI of a database for SQLAlchemy, by a link where the directory has an odd name."""
    directory = _link_to(file.parent) if _is_odd(file.parent) else file.parent
    return f"sqlite:///{directory / file.name}" + (f"?{query}" if query else "")


@cache
def _link_to(directory: Path) -> Path:
    """A link to the directory that is there as long as this process."""
    base = tempfile.gettempdir()
    own = make_temporary_directory("/tmp" if _is_odd(Path(base)) else base)
    atexit.register(remove_temporary_directory, own)
    link = own / "store"
    link.symlink_to(directory)
    return link


def _keep_from_proxies(location: StoreLocation) -> None:
    """Have MLflow reach a server of this host itself, whatever proxy the environment names."""
    host = urllib.parse.urlsplit(location.uri).hostname or ""
    if not (location.is_server and _is_local(host) and urllib.request.getproxies()):
        return
    for name in ("no_proxy", "NO_PROXY"):
        known = os.environ.get(name, "")
        if name == "no_proxy" and not known:
            known = os.environ.get("NO_PROXY", "")
        if host not in known.split(","):
            os.environ[name] = ",".join(filter(None, [known, host]))


@contextmanager
def _some_home() -> Iterator[None]:
    """Give a user without HOME and without an entry in the password file a home meanwhile.

    MLflow looks for one when it is imported, and fails where there is none.
    """
    if os.path.expanduser("~") != "~":
        yield
        return
    os.environ["HOME"] = tempfile.gettempdir()
    try:
        yield
    finally:
        os.environ.pop("HOME", None)


def _remove_draft(file: Path) -> None:
    """Remove what a process leaves that is ended while it makes a database."""
    for left in file.parent.glob(f"{escape(file.name)}*"):
        left.unlink(missing_ok=True)


def _make(file: Path) -> None:
    """Make a database file at one stroke: MLflow cannot go on with one that is half made.

    Its tables take seconds, and a process that is killed meanwhile would leave a store that nobody
    can open again.
    """
    from mlflow.tracking import MlflowClient

    for left in file.parent.glob(f".{escape(file.name)}.*.new*"):
        left.unlink()  # of one that was killed
    # MLflow keeps a connection to each path that it ever opened, so no path is used twice.
    new = file.with_name(f".{file.name}.{uuid4().hex}.new")
    atexit.register(_remove_draft, new)
    client = MlflowClient(tracking_uri=_sqlite(new))
    client.search_experiments(max_results=1)
    # closed before the file is moved; no public function of MLflow's does it
    store = getattr(getattr(client, "_tracking_client", None), "store", None)
    engine = getattr(store, "engine", None)
    if engine is not None:
        engine.dispose()
    if file.exists():  # made by another program in between
        new.unlink()
    else:
        new.rename(file)


@contextmanager
def _initialising(location: StoreLocation) -> Iterator[Path | None]:
    """Let one process at a time create the tables of a database file: migrations race.

    Yields the file, ``None`` for a store that is none.
    """
    if location.database is None:
        yield None
        return
    directory = location.database.parent
    directory.mkdir(parents=True, exist_ok=True)
    handle = os.open(directory, os.O_RDONLY)
    try:
        lock(handle)
        yield None if location.query else location.database
    finally:
        os.close(handle)


_MOST_IN_ONE_CALL = 1000
"""Metrics that a server takes in one call."""


class Client:
    """MLflow's client with explicit run ids: nothing depends on an active run or a thread."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def ping(self) -> None:
        """Ask the store for something small."""
        self._client.search_experiments(max_results=1)

    def experiment(self, name: str, location: StoreLocation) -> str:
        """Id of the experiment, which is made where there is none.

        Raises:
            RuntimeError: an experiment of that name was deleted.

        """
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                place = _artifacts(location, name)
                return str(self._client.create_experiment(name, place, tags=names.EXPERIMENT_TAGS))
            except Exception:
                # Another search may have made it in between.
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        if found.lifecycle_stage != "active":
            raise RuntimeError(
                f"the experiment {name!r} was deleted. Restore it (mlflow experiments restore -x "
                f"{found.experiment_id}) or set tracking.experiment to another name."
            )
        return str(found.experiment_id)

    def experiment_id(self, name: str) -> str | None:
        """Id of an experiment that is there and not deleted; none is made."""
        found = self._client.get_experiment_by_name(name)
        if found is None or found.lifecycle_stage != "active":
            return None
        return str(found.experiment_id)

    def run(self, run_id: str) -> Any | None:
        """A run, or ``None`` where there is none of that id."""
        from mlflow.exceptions import MlflowException

        try:
            return self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise

    def create(self, experiment_id: str, name: str, time_ms: int, tags: Mapping[str, str]) -> str:
        """Begin a run and return its id."""
        source = {"mlflow.source.name": "perfsearch", "mlflow.source.type": "LOCAL"}
        run = self._client.create_run(
            experiment_id, start_time=time_ms, tags={**source, **tags}, run_name=name
        )
        return str(run.info.run_id)

    def log(
        self,
        run_id: str,
        metrics: Mapping[str, Sequence[tuple[int, float]]],
        params: Mapping[str, str],
        tags: Mapping[str, str],
        time_ms: int,
    ) -> None:
        """Write metrics (pairs of step and value), params and tags in one call."""
        from mlflow.entities import Metric, Param, RunTag

        points = [
            Metric(key, value, time_ms, step)
            for key, series in metrics.items()
            for step, value in series
        ]
        if not (points or params or tags):
            return
        self._client.log_batch(
            run_id,
            metrics=points,
            params=[Param(k, v) for k, v in params.items()],
            tags=[RunTag(k, v) for k, v in tags.items()],
        )

    def log_timed(
        self, run_id: str, series: Mapping[str, Sequence[tuple[int, int, float]]]
    ) -> None:
        """Write series whose points have times of their own: milliseconds, step, value."""
        from mlflow.entities import Metric

        points = [
            Metric(key, value, time_ms, step)
            for key, listed in series.items()
            for time_ms, step, value in listed
        ]
        for begin in range(0, len(points), _MOST_IN_ONE_CALL):
            self._client.log_batch(run_id, metrics=points[begin : begin + _MOST_IN_ONE_CALL])

    def tag_experiment(self, experiment_id: str, key: str, value: str) -> None:
        """Set a tag of an experiment."""
        self._client.set_experiment_tag(experiment_id, key, value)

    def rename(self, run_id: str, name: str) -> None:
        """Give a run another name."""
        self._client.update_run(run_id, name=name)

    def upload(self, run_id: str, file: Path, folder: str | None) -> None:
        """Upload a file into a folder of the run's artifacts."""
        self._client.log_artifact(run_id, str(file), artifact_path=folder)

    def finish(self, run_id: str, status: str, time_ms: int | None) -> None:
        """End a run."""
        self._set_status(run_id, status, time_ms or round(time.time() * 1e3))

    def reopen(self, run_id: str) -> None:
        """Let a run go on."""
        self._set_status(run_id, "RUNNING", None)

    def status(self, run_id: str) -> str:
        """Status of a run."""
        return str(self._client.get_run(run_id).info.status)

    def search(self, experiment_id: str, rule: str) -> list[Any]:
        """Every run of the experiment that meets the rule, oldest first."""
        return self._pages([experiment_id], rule)

    def running(self, experiment_id: str | None, location: StoreLocation) -> list[Any]:
        """Runs that have not ended: of the experiment, in a local database of all of them."""
        ids = [experiment_id] if experiment_id else []
        if not location.is_server:
            ids = [e.experiment_id for e in self._client.search_experiments()]
        return self._pages(ids, "attributes.status = 'RUNNING'")

    def _pages(self, experiment_ids: list[str], rule: str) -> list[Any]:
        found: list[Any] = []
        token = None
        while True:
            page = self._client.search_runs(
                experiment_ids,
                filter_string=rule,
                order_by=["attributes.start_time ASC"],
                max_results=500,
                page_token=token,
            )
            found += page
            token = page.token
            if not token:
                return found

    def _set_status(self, run_id: str, status: str, end_time_ms: int | None) -> None:
        from mlflow.entities import RunStatus

        # The client's own set_terminated prints the run's address to the terminal, for every
        # trial, and can be told not to only through the environment, which is not ours to change.
        store = self._client._tracking_client.store
        store.update_run_info(run_id, RunStatus.from_string(status), end_time_ms, None)


def _artifacts(location: StoreLocation, experiment: str) -> str | None:
    if location.artifact_location is None:
        return None
    folder = "".join(c if c.isalnum() or c in "-_." else "_" for c in experiment).lstrip(".")
    return f"{location.artifact_location}/{folder or 'experiment'}"


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
