"""``perfsearch-sync RUN_DIR``: upload what MLflow missed of a search."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from perfsearch.search.trial import Trial
from perfsearch.tracking import names, owner, spool
from perfsearch.tracking.mirror import Mirror
from perfsearch.tracking.uri import TrackingError, how_to_open, locate, without_credentials

JOURNAL = "journal.jsonl"
JOURNAL_SCHEMA = 1

EXIT_DONE, EXIT_STORE_FAILED, EXIT_BAD_INPUT = 0, 1, 2


class SyncError(ValueError):
    """A run directory that cannot be uploaded; the message says why and what to do."""


def read_trials(run_dir: Path) -> list[Trial]:
    """Trials that the journal calls finished, by number; a later record of a number replaces it.

    Raises:
        SyncError: there is no journal, its version is unknown, or a whole line is no record.

    """
    path = run_dir / JOURNAL
    if not path.is_file():
        raise SyncError(f"{path} does not exist. Give the run directory of a search.")
    lines = path.read_text(errors="replace").split("\n")
    trials: dict[int, Trial] = {}
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            record = json.loads(line)
            if number == 1:
                _check_schema(path, record)
            if record.get("event") == "finished":
                trial = Trial.from_json(record["trial"])
                trials[trial.number] = trial
        except SyncError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if number >= len(lines) - 1:
                continue  # the last line was torn by a kill
            raise SyncError(f"{path}, line {number}: not a journal record ({error})") from error
    return [trials[number] for number in sorted(trials)]


def _check_schema(path: Path, header: Mapping[str, Any]) -> None:
    if header.get("schema") != JOURNAL_SCHEMA:
        raise SyncError(
            f"{path}: schema version {header.get('schema')!r}, but this version of perfsearch "
            f"reads version {JOURNAL_SCHEMA}. Use the version that wrote it."
        )


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
    try:
        records = list(spool.read(run_dir))
    except ValueError as error:
        raise SyncError(str(error)) from error
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
    by_number = {trial.number: trial for trial in trials}
    moments = {r["number"]: r for r in records if r["kind"] == "trial"}
    last_open = max(i for i, r in enumerate(records) if r["kind"] == "open")
    mirror.apply(records[last_open])
    knobs = next((list(r["knobs"]) for r in moments.values()), _knob_names(trials))
    time_ms = records[last_open]["time_ms"]
    for number, trial in by_number.items():
        moment = moments.get(number, {"kind": "trial", "knobs": knobs, "time_ms": time_ms})
        time_ms = moment["time_ms"]
        mirror.apply(moment, trial)
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


def _knob_names(trials: Iterable[Trial]) -> list[str]:
    return list(dict.fromkeys(name for trial in trials for name in trial.configuration))


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
        if uri == "env":
            uri = os.environ.get("MLFLOW_TRACKING_URI")
            if not uri:
                raise SyncError("--uri env: MLFLOW_TRACKING_URI is not set.")
        mirror = rebuild(options.run_dir, uri)
    except (SyncError, TrackingError) as error:
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
