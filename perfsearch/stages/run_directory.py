"""Which directory a search works in: a new one, or that of an earlier run to go on with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from perfsearch.core.errors import BadInputError
from perfsearch.core.journal import JOURNAL, Event, legible, read
from perfsearch.core.trial import Status


class RefusedError(BadInputError):
    """A search that must not start as asked; the message names the key and the remedy."""


def choose_run_dir(base: Path, resume: str, named: bool = False) -> tuple[Path, bool]:
    """The directory to work in, and whether it holds a search to go on with.

    ``base`` itself, or ``base-2``, ``base-3``, ... after finished searches. To run failed trials
    again it is the latest of them that has any; or ``base``, where the user ``named`` it and it
    does.

    Raises:
        RefusedError: ``resume=failed`` and there is nothing to resume.

    """
    taken = [path for path in _numbered(base) if (path / JOURNAL).exists()]
    if taken and resume == "failed":
        ordered = [*([base] if named and base in taken else []), *reversed(taken)]
        return next((path for path in ordered if _has_failed(path)), ordered[0]), True
    if resume == "failed":
        raise RefusedError(f"resume=failed: there is no journal in {base}.")
    if taken and resume == "auto":
        _, events = read(taken[-1] / JOURNAL)
        if not any(e.name == "ended" for e in _since_opened(events)):
            return taken[-1], True
    if not taken:
        return base, False
    last = re.search(r"-(\d+)$", taken[-1].name.removeprefix(base.name))
    return base.with_name(f"{base.name}-{int(last.group(1)) + 1 if last else 2}"), False


def _has_failed(run_dir: Path) -> bool:
    """Whether a finished search has trials that failed."""
    path = run_dir / JOURNAL
    _, events = read(path)
    ended = any(e.name == "ended" for e in _since_opened(events))
    return ended and bool(failed_trials(path, events))


def failed_trials(path: Path, events: Sequence[Event]) -> list[int]:
    """Numbers of the trials whose last ending was a failure.

    Raises:
        JournalError: an event of the journal ``path`` tells of no trial.

    """
    last: dict[int, Status] = {}
    for event in events:
        if event.name == "finished":
            with legible(path, event):
                trial = event.data["trial"]
                last[int(trial["number"])] = Status(trial["status"])
    return [number for number, status in last.items() if status.has_failed]


def _numbered(base: Path) -> list[Path]:
    """``base`` and its numbered successors that exist, in order."""
    found = [base] if base.exists() else []
    pattern = re.compile(re.escape(base.name) + r"-(\d+)$")
    if base.parent.exists():
        later = [(pattern.match(p.name), p) for p in base.parent.iterdir()]
        found += [p for _, p in sorted((int(m.group(1)), p) for m, p in later if m)]
    return found


def _since_opened(events: list[Event]) -> list[Event]:
    places = [i for i, event in enumerate(events) if event.name == "opened"]
    return events[places[-1] :] if places else events
