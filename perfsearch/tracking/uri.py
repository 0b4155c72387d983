"""Where MLflow's store is, and how to look at it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import sys
import tempfile
import urllib.parse
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from perfsearch.core.errors import BadInputError


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
        file = base / path
        _require_usable(uri, file)
        return StoreLocation(f"sqlite:///{file}", (file.parent / "mlruns").as_uri())
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


def how_to_open(location: StoreLocation, experiment_id: str | None = None) -> str:
    """The address of a server's experiment, or the command that opens the UI on the store."""
    shown = without_credentials(location.uri)
    if location.is_server:
        return f"{shown.rstrip('/')}/#/experiments/{experiment_id or ''}"
    program = ["mlflow"] if shutil.which("mlflow") else [sys.executable, "-m", "mlflow"]
    return shlex.join([*program, "ui", "--backend-store-uri", shown])


def is_reachable(uri: str, timeout_s: float = 3.0) -> bool:
    """Whether the server's port takes connections; behind a proxy that cannot be told so."""
    parts = urllib.parse.urlsplit(uri)
    host = parts.hostname or ""
    proxied = parts.scheme in urllib.request.getproxies()
    if proxied and not urllib.request.proxy_bypass(host):
        return True
    port = parts.port or (443 if parts.scheme == "https" else 80)
    with suppress(OSError), socket.create_connection((host, port), timeout=timeout_s):
        return True
    return False
