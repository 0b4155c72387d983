"""The append-only record of a search: the truth that everything else is a view of."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfsearch.core.errors import BadInputError
from perfsearch.core.files import read_at_most, write_text
from perfsearch.core.secrets import Redactor

JOURNAL = "journal.jsonl"
"""Its name in a run directory."""

SCHEMA = 1
"""Version of the line format, stated in a journal's first line."""

MOST_READ = 2**30
"""Bytes that a journal may have: a trial takes some tens of KiB, and all is held in memory."""

EVENTS = (
    *("opened", "asked", "simulated", "screened", "started", "finished", "told"),
    *("finalists", "confirmed", "neighbours", "summarised", "ended"),
)

_REMEDY = "Use resume=never for a new search beside it, or move the directory away."


class JournalError(BadInputError):
    """A journal that cannot be opened; the message says why and what to do."""


class JournalWriteError(OSError):
    """The disk is full, or it or the file gone, in the middle of a search; what was written before
    is as it was.
    """

    def __str__(self) -> str:
        return str(self.strerror)


@dataclass(frozen=True)
class Event:
    """One line of a journal after the first.

    Attributes:
        number: position, counted from 1 without gaps.
        name: one of ``EVENTS``.
        data: what happened, as plain values.

    """

    number: int
    name: str
    data: dict[str, Any]


@contextmanager
def legible(path: Path, event: Event) -> Iterator[None]:
    """While an event of the journal ``path`` is read.

    Raises:
        JournalError: it holds what this version does not know.

    """
    try:
        yield
    except JournalError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise JournalError(
            f"{path}: line {event.number + 1} ({event.name}) does not say what this version "
            f"understands ({type(error).__name__}: {error}). Use the version that wrote it, "
            "resume=never, or another run_dir."
        ) from error


class Journal:
    """JSON lines, each on disk before ``append`` returns.

    Secrets are masked in what is written. Views of a search are told of each event through
    ``followers``, once it is on disk; they must neither raise nor take long.

    The first line is a header with the schema version. A line that a kill tore in the middle is
    dropped when the journal is opened again; nothing else is ever removed.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """Create a journal that must not exist yet.

        Raises:
            JournalError: it exists, or cannot be written.

        """
        self.path = path
        self._redact = Redactor()
        self.header: dict[str, Any] = {"schema": SCHEMA, **self._redact.tree(header)}
        self._held: list[Event] | None = []
        self._count = 0
        self.followers: list[Callable[[Event], None]] = []
        self.dropped_line = ""
        try:
            if path.exists():
                raise FileExistsError(errno.EEXIST, "it exists already")
            # A journal is there with its whole first line or not at all, whenever a kill comes.
            write_text(path, _line(self.header), durable=True)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            raise JournalError(f"{path}: cannot be created: {error.strerror}") from error

    @classmethod
    def reopen(cls, path: Path) -> Journal:
        """Open an existing journal to go on, dropping a torn last line from the file.

        Raises:
            JournalError: no journal, unknown schema, or damage elsewhere than in the last line.

        """
        header, events, good_bytes, torn = _read(path)
        journal = cls.__new__(cls)
        journal.path, journal.header = path, header
        journal._held, journal._count = events, len(events)
        journal.dropped_line, journal.followers = torn, []
        journal._redact = Redactor()
        try:
            journal._file = os.open(path, os.O_WRONLY | os.O_APPEND)
            if torn:
                os.ftruncate(journal._file, good_bytes)
                os.fsync(journal._file)
        except OSError as error:
            raise JournalError(f"{path}: cannot be written: {error.strerror}") from error
        return journal

    def append(self, name: str, **data: Any) -> Event:
        """Write an event and wait until it is on disk.

        Raises:
            JournalWriteError: the disk is full or gone, or the file was removed or moved away; what
                was written before stays valid.

        """
        if name not in EVENTS:
            raise ValueError(f"unknown journal event {name!r}")
        count, size = self._count, os.fstat(self._file).st_size
        event = Event(count + 1, name, self._redact.tree(data))
        try:
            if self._held is not None:
                self._held.append(event)
            self._count += 1
            self._write({"n": event.number, "event": name, **event.data})
        except BaseException as error:
            # Also where a signal raises in between: the file and this record of it stay the same.
            self._count = count
            if self._held is not None:
                del self._held[count:]
            os.ftruncate(self._file, size)
            if isinstance(error, OSError):
                message = f"{self.path}: {_why_not_written(error)}"
                raise JournalWriteError(error.errno, message) from error
            raise
        for follower in self.followers:
            follower(event)
        return event

    @property
    def events(self) -> list[Event]:
        """All so far; once they are no longer held, they are read from the disk each time."""
        return read(self.path)[1] if self._held is None else self._held

    def hold_no_more(self) -> None:
        """Give their memory back, as they are on disk."""
        self._held = None

    def of(self, *names: str) -> Iterator[Event]:
        """The events with one of these names, in order."""
        return (event for event in self.events if event.name in names)

    @property
    def ended(self) -> bool:
        """Whether the search came to its own end since it was last opened."""
        last = [e.name for e in self.events if e.name in ("opened", "ended")]
        return bool(last) and last[-1] == "ended"

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _write(self, record: Mapping[str, Any]) -> None:
        rest = memoryview(_line(record).encode())
        while rest:
            rest = rest[os.write(self._file, rest) :]
        os.fsync(self._file)
        os.stat(self.path)  # what is written to a file that was removed meanwhile is lost


def _why_not_written(error: OSError) -> str:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return "it was removed or moved away while the search ran"
    return f"cannot be written: {error.strerror}"


def read(path: Path) -> tuple[dict[str, Any], list[Event]]:
    """Read header and events without changing the file; a torn last line is left out.

    Raises:
        JournalError: as ``Journal.reopen``.

    """
    header, events, _, _ = _read(path)
    return header, events


def measured_as(header: Mapping[str, Any], events: Sequence[Event]) -> dict[str, str]:
    """What the trials of a search hold for: job, ranks, devices, versions; empty: there is none.

    The header has it as the search began; where nothing could be measured then, and something of it
    was changed since, it is as it was when the first trial was.
    """
    identity: dict[str, str] = dict(_mapping(header.get("identity")))
    for event in events:
        if event.name == "opened":
            known = {
                name.removeprefix(_IDENTITY): str(value)
                for name, value in _mapping(event.data.get("parameters")).items()
                if name.startswith(_IDENTITY)
            }
            identity = known or identity
        elif event.name == "finished" and _mapping(event.data.get("trial")).get("status") == "ok":
            return identity
    return {}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


_IDENTITY = "identity/"


def _read(path: Path) -> tuple[dict[str, Any], list[Event], int, str]:
    try:
        raw = read_at_most(path, MOST_READ)
    except OSError as error:
        raise JournalError(f"{path}: cannot be read: {error.strerror}. {_REMEDY}") from error
    except ValueError as error:
        raise JournalError(f"{path}: it {error}. {_REMEDY}") from error
    whole, _, tail = raw.rpartition(b"\n")
    lines = whole.split(b"\n") if whole else []
    records: list[dict[str, Any]] = []
    for place, line in enumerate(lines):
        record = _parse(line)
        if record is None and place == len(lines) - 1 and not tail:
            tail = line + b"\n"
            break
        if record is None:
            raise JournalError(f"{path}: line {place + 1} is damaged. {_REMEDY}")
        records.append(record)
    if not records:
        raise JournalError(f"{path}: has no complete first line. {_REMEDY}")
    header = records[0]
    if header.get("schema") != SCHEMA:
        raise JournalError(
            f"{path}: journal schema {header.get('schema')!r}, and this perfsearch reads {SCHEMA}. "
            f"Use the version that wrote it, or another run_dir."
        )
    events = []
    for place, record in enumerate(records[1:], start=1):
        number, name = record.pop("n", None), record.pop("event", None)
        if number != place:
            raise JournalError(
                f"{path}: line {place + 1} is out of order: its number is {number!r}, and {place} "
                f"is next. {_REMEDY}"
            )
        if name not in EVENTS:
            raise JournalError(
                f"{path}: line {place + 1} tells of {name!r}, and this perfsearch knows "
                f"{', '.join(EVENTS)}. Use the version that wrote it, or resume=never."
            )
        events.append(Event(place, name, record))
    return header, events, len(raw) - len(tail), tail.decode(errors="replace")


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n"
