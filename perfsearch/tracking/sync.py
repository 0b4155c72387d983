"""``perfsearch-sync RUN_DIR``: upload what MLflow missed of a search."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from perfsearch.cli.terminal import open_standard_streams, require_current_directory
from perfsearch.core.errors import BadInputError
from perfsearch.core.journal import JOURNAL
from perfsearch.core.trial import Trial
from perfsearch.tracking import names, owner, recorded, spool
from perfsearch.tracking.mirror import Mirror
from perfsearch.tracking.recorded import SyncError, read_trials
from perfsearch.tracking.uri import how_to_open, locate, without_credentials

EXIT_DONE, EXIT_STORE_FAILED, EXIT_BAD_INPUT = 0, 1, 2


def rebuild(run_dir: Path, uri: str | None = None) -> Mirror:
    """Write everything that the run directory knows into the store; repeating changes nothing.

    Args:
        run_dir: directory of a search that is not running.
        uri: the store; by default the one that the search used.

    Returns:
        The view that was written.

    Raises:
        SyncError: the directory holds no search, or the search is running.
        TrackingError: the store's URI cannot be used.
        Exception: whatever the store raises.

    """
    trials = read_trials(run_dir)
    records = recorded.read_records(run_dir)
    opened = next((r for r in reversed(records) if r["kind"] == "open"), None)
    if opened is None:
        opened = _stand_in(run_dir, trials)
        records.insert(0, opened)
    lock = spool.Spool(run_dir)
    try:
        if not lock.lock():
            raise SyncError(
                f"{run_dir}: a search, or another upload, is running there; it uploads by itself. "
                "Try again when it has ended."
            )
        location = locate(uri or _usable(opened["uri"]), run_dir)
        mirror = Mirror(location, opened["experiment"], opened["search_id"], run_dir.resolve())
        mirror.check_reachable()
        _write(mirror, records, trials)
        return mirror
    finally:
        lock.close()


def _write(mirror: Mirror, records: Sequence[Mapping[str, Any]], trials: list[Trial]) -> None:
    last_open = max(i for i, r in enumerate(records) if r["kind"] == "open")
    mirror.apply(records[last_open])
    for record, trial in recorded.with_moments(trials, records):
        mirror.apply(record, trial)
    for index, record in enumerate(records):
        is_end = record["kind"] == "close" and index > last_open
        if is_end or record["kind"] in ("summary", "series", "artifacts"):
            mirror.apply(record)
    # No search is alive here, so a run without an end belongs to one that was killed.
    mirror.end_if_running("KILLED")


def _stand_in(run_dir: Path, trials: Iterable[Trial]) -> dict[str, Any]:
    """What is needed to open the view where the search left no ``tracking.jsonl``."""
    journal = run_dir / JOURNAL
    header = json.loads(journal.read_text().split("\n", 1)[0])
    time_ms = round(journal.stat().st_mtime * 1e3)
    return {
        "kind": "open",
        "time_ms": time_ms,
        "name": run_dir.resolve().name,
        "uri": None,
        "experiment": str(header.get("experiment", "perfsearch")),
        "search_id": str(header.get("search_id", run_dir.resolve().name)),
        "parameters": {},
        "tags": {},
        "nulls": _nulls(trials),
        "owner": owner.owner_tags(),
    }


def _nulls(trials: Iterable[Trial]) -> dict[str, int | str]:
    seen: dict[str, list[Any]] = {}
    for trial in trials:
        for name, value in trial.configuration.items():
            seen.setdefault(name, [])
            if value is not None:
                seen[name].append(value)
    return {name: names.null_of(values) for name, values in seen.items()}


def _usable(uri: str | None) -> str | None:
    """The recorded URI, unless its password was kept out of the record."""
    if uri is not None and "***@" in uri:
        raise SyncError(
            f"the search used {uri}, whose password is not recorded. Give the store with --uri, or "
            "set MLFLOW_TRACKING_URI and --uri env."
        )
    return uri


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of ``perfsearch-sync``: 0 done, 1 the store failed, 2 bad input."""
    open_standard_streams()
    parser = argparse.ArgumentParser(
        prog="perfsearch-sync", description="Upload to MLflow what it missed of a search."
    )
    parser.add_argument("run_dir", type=Path, help="directory of a search, with journal.jsonl")
    parser.add_argument(
        "--uri",
        help="tracking URI; by default that of the search; 'env' takes MLFLOW_TRACKING_URI",
    )
    options = parser.parse_args(arguments)
    uri = options.uri
    try:
        require_current_directory()
        if uri == "env":
            uri = os.environ.get("MLFLOW_TRACKING_URI")
            if not uri:
                raise SyncError("--uri env: MLFLOW_TRACKING_URI is not set.")
        mirror = rebuild(options.run_dir, uri)
    except (SyncError, BadInputError) as error:
        print(f"perfsearch-sync: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except Exception as error:  # the store's own exceptions have no common base
        shown = without_credentials(uri) if uri else "the search's store"
        print(
            f"perfsearch-sync: writing to {shown} failed: {type(error).__name__}: {error}. "
            "Nothing is lost; try again.",
            file=sys.stderr,
        )
        return EXIT_STORE_FAILED
    print(f"uploaded {options.run_dir}; open it with: ", end="")
    print(how_to_open(mirror.location, mirror.experiment_id))
    return EXIT_DONE


if __name__ == "__main__":
    raise SystemExit(main())
