"""What a run directory knows of a search: the journal's trials, and what its view was told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from perfsearch.core.journal import JOURNAL, JournalError, legible, read
from perfsearch.core.trial import Trial
from perfsearch.tracking import spool


class SyncError(ValueError):
    """A run directory that cannot be uploaded; the message says why and what to do."""


def read_trials(run_dir: Path) -> list[Trial]:
    """Trials that the journal calls finished, by number; a later record of a number replaces it.

    Raises:
        SyncError: there is no journal, or it cannot be read.

    """
    path = run_dir / JOURNAL
    if not path.is_file():
        raise SyncError(f"{path} does not exist. Give the run directory of a search.")
    trials: dict[int, Trial] = {}
    try:
        for event in read(path)[1]:
            with legible(path, event):
                if event.name == "finished":
                    trial = Trial.from_json(event.data["trial"])
                    trials[trial.number] = trial
    except JournalError as error:
        raise SyncError(str(error)) from error
    return [trials[number] for number in sorted(trials)]


def read_records(run_dir: Path) -> list[dict[str, Any]]:
    """What the view was told, in order.

    Raises:
        SyncError: it was written by another version.

    """
    try:
        return list(spool.read(run_dir))
    except ValueError as error:
        raise SyncError(str(error)) from error


def with_moments(
    trials: Sequence[Trial], records: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Mapping[str, Any], Trial]]:
    """Each trial with the record under which the view was told of it, or with a likely one.

    The same trial always gets the same time, so that writing it twice changes nothing.
    """
    told = {r["number"]: r for r in records if r["kind"] == "trial"}
    knobs = next((list(r["knobs"]) for r in told.values()), None)
    if knobs is None:
        knobs = list(dict.fromkeys(name for trial in trials for name in trial.configuration))
    time_ms = next((r["time_ms"] for r in records), 0)
    for trial in trials:
        record = told.get(
            trial.number,
            {"kind": "trial", "number": trial.number, "knobs": knobs, "time_ms": time_ms},
        )
        time_ms = record["time_ms"]
        yield record, trial
