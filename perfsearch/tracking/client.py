"""MLflow's client of a store: made without waiting, and asked for what a view needs."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from glob import escape
from pathlib import Path
from typing import Any
from uuid import uuid4

from perfsearch.core.files import (
    make_temporary_directory,
    remove_temporary_directory,
)
from perfsearch.core.locks import lock
from perfsearch.core.python import large_imports
from perfsearch.tracking import names
from perfsearch.tracking.location import StoreLocation, is_local, is_odd

_QUIET = ("mlflow", "alembic", "sqlalchemy", "urllib3")


def connect(location: StoreLocation) -> Client:
    """Import MLflow and open the store; takes seconds the first time.

    Raises:
        ImportError: MLflow is not installed.
        Exception: whatever the store raises when it cannot be opened.

    """
    with _some_home(), large_imports():
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
        with large_imports():
            client = MlflowClient(tracking_uri=uri)
            client.search_experiments(max_results=1)
    return Client(client)


def _sqlite(file: Path, query: str = "") -> str:
    """The URI of a database for SQLAlchemy, by a link where the directory has an odd name."""
    directory = _link_to(file.parent) if is_odd(file.parent) else file.parent
    return f"sqlite:///{directory / file.name}" + (f"?{query}" if query else "")


@cache
def _link_to(directory: Path) -> Path:
    """A link to the directory that is there as long as this process."""
    base = tempfile.gettempdir()
    own = make_temporary_directory("/tmp" if is_odd(Path(base)) else base)
    atexit.register(remove_temporary_directory, own)
    link = own / "store"
    link.symlink_to(directory)
    return link


def _keep_from_proxies(location: StoreLocation) -> None:
    """Have MLflow reach a server of this host itself, whatever proxy the environment names."""
    host = urllib.parse.urlsplit(location.uri).hostname or ""
    if not (location.is_server and is_local(host) and urllib.request.getproxies()):
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


_RUNS_A_ROUND = 50
"""Runs after which the garbage collector is called, which costs tenths of a second.

A run leaves some KiB in cycles. By itself the collector goes through all objects only once they are
a quarter more than before, and MLflow's imports are so many that a long search ends before.
"""

_MOST_IN_ONE_CALL = 1000
"""Metrics that a server takes in one call."""


class Client:
    """MLflow's client with explicit run ids: nothing depends on an active run or a thread."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._ended = 0

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
        _let_go(run_id)
        self._ended += 1
        if self._ended % _RUNS_A_ROUND == 0:
            gc.collect()

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


def _let_go(run_id: str) -> None:
    """Give back what MLflow keeps of a run that was given a file.

    It holds a thread pool and a queue, 10 KiB, for each of the last 1024 runs, and makes them anew
    where it has none; no public function of MLflow's forgets one.
    """
    from mlflow.tracking._tracking_service import utils

    getattr(utils, "_artifact_repos_cache", {}).pop(run_id, None)


def _artifacts(location: StoreLocation, experiment: str) -> str | None:
    if location.artifact_location is None:
        return None
    folder = "".join(c if c.isalnum() or c in "-_." else "_" for c in experiment).lstrip(".")
    return f"{location.artifact_location}/{folder or 'experiment'}"
