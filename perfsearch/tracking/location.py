"""Where a tracking store is, whether anything answers there, and how it is opened by people."""

from __future__ import annotations

import http.client
import os
import re
import shlex
import shutil
import sqlite3
import ssl
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perfsearch.core.errors import BadInputError
from perfsearch.tracking import names


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
    if database is not None and is_odd(database.parent):
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
    if is_local(host) or urllib.request.proxy_bypass(host):
        return ""
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all", "")
    return proxy if "://" in proxy or not proxy else f"http://{proxy}"


def is_local(host: str) -> bool:
    """Whether a name or an address is this host's own."""
    return host in ("localhost", "::1") or host.startswith("127.")


def is_odd(directory: Path) -> bool:
    """Whether a URI with the directory's name might mean another one.

    SQLAlchemy takes some characters of a path as signs, which of them depends on its version.
    """
    return any(sign in str(directory) for sign in "%?#")
