"""``perfsearch-sync RUN_DIR``: upload what MLflow missed of a search."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from perfsearch.cli.terminal import (
    open_standard_streams,
    require_current_directory,
    told,
)
from perfsearch.core.errors import BadInputError
from perfsearch.core.journal import JOURNAL, Event, legible, read
from perfsearch.core.python import let_warnings_be_warnings
from perfsearch.core.trial import Trial
from perfsearch.core.version import version
from perfsearch.pipeline.resume import LockError, run_directory_lock
from perfsearch.tracking.location import how_to_open, is_elsewhere, locate, without_credentials
from perfsearch.tracking.store import Store, shown

EXIT_DONE, EXIT_STORE_FAILED = 0, 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of ``perfsearch-sync``: 0 done, 1 the store failed, 2 bad input, 3 as others."""
    open_standard_streams()
    let_warnings_be_warnings()
    parser = argparse.ArgumentParser(
        prog="perfsearch-sync", description="Upload to MLflow what it missed of a search."
    )
    parser.add_argument("run_dir", type=Path, help="directory of a search, with journal.jsonl")
    parser.add_argument(
        "--uri",
        help="tracking URI; by default that of the search; 'env' takes MLFLOW_TRACKING_URI",
    )
    parser.add_argument("--version", action="version", version=f"perfsearch {version()}")
    options = parser.parse_args(arguments)
    uri = options.uri
    try:
        require_current_directory()
        if uri == "env":
            uri = os.environ.get("MLFLOW_TRACKING_URI")
            if not uri:
                raise SyncError("--uri env: MLFLOW_TRACKING_URI is not set.")
        store = rebuild(options.run_dir, uri)
    except Exception as error:  # the store's own exceptions have no common base
        code = told("perfsearch-sync", error)
        if code is not None:
            return code
        where = without_credentials(uri) if uri else "the search's store"
        print(
            f"perfsearch-sync: writing to {where} failed: {type(error).__name__}: {error}. "
            "Nothing is lost; try again.",
            file=sys.stderr,
        )
        return EXIT_STORE_FAILED
    print(f"uploaded {options.run_dir}; open it with: ", end="")
    print(how_to_open(store.location, store.experiment_id))
    return EXIT_DONE


def _warn(text: str) -> None:
    print(f"perfsearch-sync: {text}", file=sys.stderr)


class SyncError(BadInputError):
    """A run directory that cannot be uploaded; the message says why and what to do."""


def rebuild(run_dir: Path, uri: str | None = None) -> Store:
    """Write everything that the journal tells into the store; repeating changes nothing.

    Args:
        run_dir: directory of a search that is not running.
        uri: the store; by default the one that the search used.

    Returns:
        The view that was written.

    Raises:
        SyncError: the directory holds no search, or the search is running.
        JournalError: its journal cannot be read.
        TrackingError: the store's URI cannot be used.
        Exception: whatever the store raises.

    """
    if not (run_dir / JOURNAL).is_file():
        raise SyncError(f"{run_dir / JOURNAL} does not exist. Give the run directory of a search.")
    with ExitStack() as held:
        try:
            held.enter_context(run_directory_lock(run_dir, _warn))
        except LockError as error:
            raise SyncError(
                f"{run_dir}: a search, or another upload, is running there; it uploads by itself. "
                "Try again when it has ended."
            ) from error
        return _upload(run_dir, uri)


def _upload(run_dir: Path, uri: str | None) -> Store:
    header, events = _read(run_dir)
    destination: dict[str, Any] = {"uri": None, "experiment": "perfsearch"}
    for event in events:
        if event.name == "opened":
            destination.update(event.data.get("tracking", {}))
    recorded = None if uri else _usable(destination["uri"])
    # What is said now is meant from the current directory.
    said = uri or (None if recorded else os.environ.get("MLFLOW_TRACKING_URI"))
    location = locate(said) if said else locate(recorded, run_dir)
    search_id = str(header.get("search_id", run_dir.resolve().name))
    store = Store(location, destination["experiment"], search_id, run_dir.resolve())
    store.check_reachable()
    for event in shown(events):
        store.show(event)
    # No search is alive here, so a run without an end belongs to one that was killed.
    store.end_if_running("KILLED")
    return store


def _usable(uri: str | None) -> str | None:
    """The recorded URI, unless its password was kept out of the record, or it is a server's.

    The journal may be somebody else's, and MLflow would give its server the user's credentials.
    """
    if uri is not None and "***@" in uri:
        raise SyncError(
            f"the search used {uri}, whose password is not recorded. Give the store with --uri, or "
            "set MLFLOW_TRACKING_URI and --uri env."
        )
    if uri is not None and is_elsewhere(uri) and uri != os.environ.get("MLFLOW_TRACKING_URI"):
        raise SyncError(
            f"the journal names the server {without_credentials(uri)}, and a file may not send you "
            f"to one. If you mean it, give --uri {without_credentials(uri)}."
        )
    return uri


def _read(run_dir: Path) -> tuple[dict[str, Any], list[Event]]:
    """Header and events of the journal, of which one ``opened`` is there in any case.

    Raises:
        JournalError: it cannot be read.

    """
    path = run_dir / JOURNAL
    header, events = read(path)
    for event in events:
        if event.name == "finished":
            with legible(path, event):
                Trial.from_json(event.data["trial"])
    if not any(event.name == "opened" for event in events):  # it was killed before it noted that
        started_s = header.get("started_unix_s", path.stat().st_mtime)
        events.insert(0, Event(0, "opened", {"unix_s": started_s}))
    log = run_dir / WRITE_AHEAD_LOG
    if log.exists():
        events = _with_write_ahead_log(log, events)
    return header, events


WRITE_AHEAD_LOG = "tracking.jsonl"
"""What MLflow was to be told, which earlier versions kept beside the journal."""


def _with_write_ahead_log(log: Path, events: Sequence[Event]) -> list[Event]:
    """The events of an earlier version's search, completed from its write-ahead log."""
    kept: dict[str, list[dict[str, Any]]] = {}
    for line in log.read_text(errors="replace").splitlines():
        with suppress(ValueError, TypeError, KeyError):  # a line that a kill tore
            record = json.loads(line)
            kept.setdefault(record["kind"], []).append(record)
    ended_s = {r["number"]: r["time_ms"] / 1e3 for r in kept.get("trial", ())}
    found = []
    for event in events:
        data = event.data
        if event.name == "opened" and "tracking" not in data and "open" in kept:
            told = kept["open"][-1]
            tracking = {"uri": told["uri"], "experiment": told["experiment"]}
            data = {**data, "parameters": told["parameters"], "tracking": tracking}
        elif event.name == "finished" and "unix_s" not in data:
            number = data["trial"]["number"]
            data = {**data, "unix_s": ended_s[number]} if number in ended_s else data
        found.append(replace(event, data=data))
    number = max(event.number for event in found)
    for told in kept.get("series", ()):
        series = {told["name"]: [[told["step"], told["value"]]]}
        data = {"series": series, "unix_s": told["time_ms"] / 1e3}
        found.append(Event(number, "simulated", data))
    files = [path for told in kept.get("artifacts", ()) for path in told["paths"]]
    for told in kept.get("summary", ()):
        numbers = {"numbers": told["metrics"], "tags": told["tags"], "note": told["note"]}
        data = {**numbers, "files": files, "unix_s": told["time_ms"] / 1e3}
        found.append(Event(number, "summarised", data))
    return found


if __name__ == "__main__":
    raise SystemExit(main())
