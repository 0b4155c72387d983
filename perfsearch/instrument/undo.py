"""What starts of a script did to the user's files: the record of it, and how it is undone.

Nothing here imports torch. The ranks write the record (``files.py``); the controller, the process
that starts are forked from, or a later search in the same directory reads it backwards.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import socket
import stat
import threading
import time
import uuid
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from perfsearch.core.files import write_json
from perfsearch.core.locks import lock
from perfsearch.workers import processes

ROOM = ".perfsearch-undo"
"""Directory in the working directory that is there while a search has something to put back."""

RECORD = "record.jsonl"
ORDERS = "start.json"
_OWNER = "owner.json"
_DOWNLOADS = "downloads.jsonl"
_README = "README.txt"
_IGNORED = ".gitignore"
"""Keeps what is set aside out of the user's commits."""

_EXPLANATION = (
    "A search or profile of perfsearch keeps here the files that starts of your script changed or\n"
    "removed, and puts them back. If none runs any more, the next one in this directory does so\n"
    "before anything else. Until then do not delete this directory.\n"
)

_HEARTBEAT_S = 1.0
"""How often the owner of a room says that it lives."""

_ANOTHERS_S = 10.0
"""What changes so long after the last sign of life is not the start's: ranks end within seconds of
their controller."""

_SURELY_DEAD_S = 120.0
"""An owner on another host, which cannot be asked for, is dead after so long without a sign."""

ASIDE = ".before-perfsearch"
"""Ending of a file that was kept, where another has been put in its place since."""

Entry = dict[str, Any]


class Deed(StrEnum):
    """What an entry of the record says.

    An entry stands for the state that a path had before its first change: what a start does to it
    later needs no further one.
    """

    MADE = "made"  # there was nothing at ``path``
    KEPT = "kept"  # the file that was at ``path`` is at ``at``
    REMOVED = "removed"  # a directory was at ``path``, with ``mode``
    MOVED = "moved"  # the directory at ``path`` has gone to ``to``
    MARKED = "marked"  # ``path`` had this ``mode`` and these ``times``
    LOST = "lost"  # ``path`` is changed, and could not be kept
    STEP = "step"  # the first step of an optimizer is made
    TOUCHED = "touched"  # ``path``, made before that, is changed after it
    READ = "read"  # ``path``, made before that, is read


def read(file: Path) -> list[Entry]:
    """The entries of a record; lines that were torn are none."""
    entries = []
    try:
        lines = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    for line in lines:
        with contextlib.suppress(ValueError):
            entries.append(json.loads(line))
    return entries


# -----------------------------------------------------------------------------
# Undo one start: its record, read backwards.


@dataclass
class Undone:
    """What came of an undo.

    Attributes:
        lost: files that are not as they were.
        back: files that were put back, or removed as a start had made them.
        others: files that were changed after the start had died, which are left as they are.

    """

    lost: set[str] = field(default_factory=set)
    back: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)

    def add(self, more: Undone) -> None:
        """Take up what came of another one."""
        self.lost |= more.lost
        self.back |= more.back
        self.others |= more.others


def undo(
    entries: Sequence[Entry], staying: frozenset[str] = frozenset(), died_s: float = math.inf
) -> Undone:
    """Put back what a start changed; may be broken off anywhere and called again.

    Args:
        entries: its record, or what is left to be undone of one.
        staying: paths that it made and that are left where they are.
        died_s: Unix time after which it changed nothing any more. What was changed later is
            another's: it stays, and what was kept is put beside it.

    """
    done = Undone()
    to_come = Counter(e["at"] for e in entries if e["deed"] == Deed.KEPT)
    for entry in reversed(entries):
        path = entry.get("path", "")
        others_need_it = False
        if entry["deed"] == Deed.KEPT:
            to_come[entry["at"]] -= 1
            others_need_it = to_come[entry["at"]] > 0
        if entry["deed"] == Deed.MADE and path in staying:
            continue
        later = _is_anothers(path, died_s)
        try:
            if _undo_deed(entry, others_need_it, later):
                (done.others if later else done.back).add(path)
        except FileNotFoundError:
            continue
        except OSError:
            done.lost.add(path)
        if entry["deed"] == Deed.LOST:
            done.lost.add(path)
    return done


def _undo_deed(entry: Entry, others_need_it: bool, later: bool) -> bool:
    """Undo one entry; whether there was anything to undo.

    Args:
        entry: of the record.
        others_need_it: whether what was kept is needed for an earlier entry too.
        later: whether what is at its path is another's by now.

    """
    path = entry.get("path", "")
    match entry["deed"]:
        case Deed.MADE:
            return later or _remove(path)
        case Deed.KEPT:
            return _put_back(entry, others_need_it, aside=later)
        case Deed.REMOVED:
            os.makedirs(path, exist_ok=True)
            os.chmod(path, entry["mode"])
        case Deed.MOVED if not os.path.lexists(path):
            os.rename(entry["to"], path)
        case Deed.MARKED if not later:
            _mark(path, entry)
    return False


def _is_anothers(path: str, died_s: float) -> bool:
    """Whether a file was written to after the start had died."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return not stat.S_ISDIR(found.st_mode) and found.st_ctime > died_s


def _remove(path: str) -> bool:
    """Remove what a start made, a directory only if nothing of another is in it; whether it did."""
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
        return True
    with contextlib.suppress(OSError):
        os.rmdir(path)
        return True
    return False


def _put_back(entry: Entry, others_need_it: bool, aside: bool) -> bool:
    """Put a kept file back, or beside what has taken its place; whether it was still there."""
    path, at = entry["path"], entry["at"]
    if not os.path.lexists(at):
        return False  # done before, by an undo that was broken off
    if aside:
        path = f"{path}{ASIDE}"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.isdir(path) and not os.path.islink(path):
        _remove(path)
    source = at
    if others_need_it:
        source = f"{at}.again"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(source)
        os.link(at, source, follow_symlinks=False)
    os.replace(source, path)
    if not os.path.islink(path):
        _mark(path, entry)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(source)  # a move onto another name of the same file leaves both
    return True


def _mark(path: str, entry: Entry) -> None:
    now = os.stat(path)
    if stat.S_IMODE(now.st_mode) != entry["mode"]:
        os.chmod(path, entry["mode"])
    if now.st_mtime_ns != entry["times"][1]:
        os.utime(path, ns=tuple(entry["times"]))


_WORTH_KEEPING_BYTES = 2**20
"""Less than this is made again in no time, and may be what tells a script that it ran before."""


def downloads(entries: Sequence[Entry]) -> list[Entry]:
    """What a start made that the next ones would only make again, in the order of its making.

    That are files made before its first step, read by itself, and not touched after that step,
    such as a data set that it fetched. What lies in the same new directory belongs to them. What a
    script only writes (arguments, logs, a first checkpoint) does not, nor what is small (its own
    state): the next start is not to find it.
    """
    deeds = [entry["deed"] for entry in entries]
    if Deed.STEP not in deeds or Deed.MOVED in deeds:
        return []
    made = [e for e in entries[: deeds.index(Deed.STEP)] if e["deed"] == Deed.MADE]
    paths = {e["path"] for e in made}
    used = {_root(e["path"], paths) for e in entries if e["deed"] == Deed.READ}
    touched = {e["path"] for e in entries if e["deed"] == Deed.TOUCHED}
    stay = [e for e in made if e["path"] not in touched and _root(e["path"], paths) in used]
    sizes: Counter[str] = Counter()
    for path in {e["path"] for e in stay}:
        sizes[_root(path, paths)] += _size(path)
    return [e for e in stay if sizes[_root(e["path"], paths)] >= _WORTH_KEEPING_BYTES]


def _size(path: str) -> int:
    """Bytes of a file; 0 of a directory, and where nothing is."""
    try:
        found = os.lstat(path)
    except OSError:
        return 0
    return 0 if stat.S_ISDIR(found.st_mode) else found.st_size


def _root(path: str, made: set[str]) -> str:
    """The outermost directory around ``path`` that was made too, or ``path``."""
    root = path
    while (above := os.path.dirname(path)) != path:
        path = above
        if path in made:
            root = path
    return root


# -----------------------------------------------------------------------------
# What no record can tell: files that programs changed which a script started.

_MOST_ENTRIES = 50_000
_NAMED = 5
_OF_TOOLS = frozenset({ROOM, ".git", "__pycache__", "node_modules"})

Listing = Mapping[str, tuple[int, int]]
"""Size and time of the last change of each file, by its path."""


def list_files(directory: Path, own: Sequence[Path]) -> Listing | None:
    """The files below a directory; ``None`` where there are too many to look at.

    Args:
        directory: the directory.
        own: perfsearch's own files and directories, which are left out, as is what it prints to.

    """
    left_out = {str(path.absolute()) for path in own}
    drafts = tuple(f"{path.absolute().parent}/.{path.name}." for path in own)
    said = set()
    for descriptor in (1, 2):  # as with > search.log
        with contextlib.suppress(OSError):
            status = os.fstat(descriptor)
            said.add((status.st_dev, status.st_ino))
    found: dict[str, tuple[int, int]] = {}
    waiting = [str(directory)]
    seen = 0
    while waiting:
        try:
            entries = list(os.scandir(waiting.pop()))
        except OSError:
            continue
        seen += len(entries)
        if seen > _MOST_ENTRIES:
            return None
        if any(entry.name == "pyvenv.cfg" for entry in entries):
            continue  # Python's packages
        for entry in entries:
            if entry.path in left_out or entry.name in _OF_TOOLS:
                continue
            if entry.path.startswith(drafts):
                continue
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                else:
                    now = entry.stat(follow_symlinks=False)
                    if (now.st_dev, now.st_ino) not in said:
                        found[entry.path] = now.st_size, now.st_mtime_ns
    return found


def _differing(before: Listing | None, after: Listing | None) -> list[str]:
    if before is None or after is None:
        return []
    return [p for p in before.keys() | after.keys() if before.get(p) != after.get(p)]


# -----------------------------------------------------------------------------
# The controller's side: where the record of each start is, and when it is undone.


@dataclass
class UserFiles:
    """Keeps what starts of a script change, and puts it back.

    Args:
        own: directories that starts may change as they like: perfsearch's own.
        directory: the working directory of the starts.

    """

    own: Sequence[Path] = ()
    directory: Path = field(default_factory=Path.cwd)
    _lost: set[str] = field(default_factory=set)
    _room: Path | None = None
    _starts: int = 0
    _before: Listing | None = None
    _closed: threading.Event = field(default_factory=threading.Event)

    def open(self) -> list[str]:
        """Undo what killed searches have left in this directory, and see what is there.

        Returns:
            Lines for the user that say what was undone.

        """
        lines: list[str] = []
        for place in (self.directory, *self.own):
            done = recover(place)
            self._lost |= done.lost
            lines += _of_killed(done) + [_left_alone(room, host) for room, host in strangers(place)]
        if self._before is None:
            self._before = list_files(self.directory, self.own)
        return lines

    def begin(self, token: str) -> str:
        """Make the place where a start records what it changes.

        Args:
            token: the mark of its processes.

        """
        room = self._room
        if room is None:
            room = self._room = _new_room(self.directory, self.own)
            self._closed = threading.Event()
            owner, closed = room / _OWNER, self._closed
            threading.Thread(target=_live, args=(owner, closed), daemon=True).start()
        self._starts += 1
        start = room / f"{self._starts:06d}"
        start.mkdir()
        orders = {
            "token": token,
            "directory": str(self.directory),
            "own": [str(room.parent), *(str(path.absolute()) for path in self.own)],
        }
        write_json(start / ORDERS, orders)
        return str(start)

    def end(self) -> None:
        """Undo what the starts that have ended did, but for what the next would only do again."""
        if self._room is not None:
            self._lost |= _undo_starts(self._room, keep_downloads=True).lost

    def close(self) -> None:
        """Leave everything as it was before the first start."""
        room, self._room = self._room, None
        if room is not None:
            self._lost |= _close(room).lost
            self._closed.set()

    def not_as_before(self) -> str:
        """One line that names files which are not as they were; empty where all are.

        Besides what the records tell that is what programs did which a script started.
        """
        after = None if self._before is None else list_files(self.directory, self.own)
        paths = sorted(self._lost | set(_differing(self._before, after)))
        if not paths:
            return ""
        return (
            "warning: changed while starts of the script ran, in a way that is not undone or by "
            f"others: {_listed(paths)}"
        )


def _of_killed(done: Undone) -> list[str]:
    """What was undone of a search that was killed, a line each."""
    lines = []
    if done.back:
        lines.append(f"put back what a killed search had changed: {_listed(done.back)}")
    if done.others:
        lines.append(
            "warning: changed since the search was killed, and left as they are: "
            f"{_listed(done.others)}; what was there before it is in NAME{ASIDE}, if anything was"
        )
    return lines


def _left_alone(room: Path, host: str) -> str:
    return (
        f"warning: {os.path.relpath(room)} keeps files for a search on host {host}, which may "
        f"still run. If it does not, start one in this directory in {_SURELY_DEAD_S:g} s or later: "
        "they are put back then"
    )


def _listed(paths: Collection[str]) -> str:
    named = ", ".join(os.path.relpath(path) for path in sorted(paths)[:_NAMED])
    return named + (f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else "")


def recover(directory: Path) -> Undone:
    """Undo what searches did that were killed.

    Those that still run, or may do so on another host, are left alone.

    Args:
        directory: where they worked.

    """
    done = Undone()
    for owner in sorted((directory / ROOM).glob(f"*/{_OWNER}")):
        if _lives(owner) is not False:
            continue
        for orders in owner.parent.glob(f"*/{ORDERS}"):
            with contextlib.suppress(OSError, ValueError):
                processes.end_all(json.loads(orders.read_text())["token"], grace_s=0.0)
        with contextlib.suppress(OSError):
            done.add(_close(owner.parent, owner.stat().st_mtime + _ANOTHERS_S))
    return done


def strangers(directory: Path) -> list[tuple[Path, str]]:
    """Rooms of searches on other hosts that may still run, and which host."""
    owners = sorted((directory / ROOM).glob(f"*/{_OWNER}"))
    return [(owner.parent, host) for owner in owners if isinstance(host := _lives(owner), str)]


def _lives(owner: Path) -> bool | str:
    """Whether the search that made a room still runs; on another host, which one it may run on."""
    try:
        entry = json.loads(owner.read_text())
        host, (pid, started) = str(entry["host"]), entry["controller"]
        silent_s = time.time() - owner.stat().st_mtime
    except (OSError, ValueError, KeyError, TypeError):
        return True
    if host == socket.gethostname():
        return processes.is_alive(int(pid), started)
    return host if silent_s < _SURELY_DEAD_S else False


def _live(owner: Path, closed: threading.Event) -> None:
    """Give signs of life, by the time of the file, until the search has ended."""
    while not closed.wait(_HEARTBEAT_S):
        with contextlib.suppress(OSError):
            os.utime(owner)


def _new_room(directory: Path, own: Sequence[Path]) -> Path:
    """A directory of this search, in the working directory or in the first of its own."""
    name = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
    room = next(
        (place for place in (directory, *own) if os.access(place, os.W_OK | os.X_OK)), directory
    )
    room = room / ROOM / name
    with contextlib.suppress(FileNotFoundError):  # another search has just ended here
        room.mkdir(parents=True)
    room.mkdir(parents=True, exist_ok=True)
    (room.parent / _README).write_text(_EXPLANATION)
    (room.parent / _IGNORED).write_text("*\n")
    me = os.getpid()
    owner = {"host": socket.gethostname(), "controller": [me, processes.started_at(me)]}
    write_json(room / _OWNER, owner)
    return room


def _undo_starts(room: Path, keep_downloads: bool, died_s: float = math.inf) -> Undone:
    done = Undone()
    for start in sorted((p.parent for p in room.glob(f"*/{ORDERS}")), reverse=True):
        entries = read(start / RECORD)
        stays = downloads(entries) if keep_downloads else []
        if stays:
            with (room / _DOWNLOADS).open("a") as file:
                file.writelines(json.dumps(entry) + "\n" for entry in stays)
        done.add(undo(entries, frozenset(e["path"] for e in stays), died_s))
        shutil.rmtree(start, ignore_errors=True)
    return done


def _close(room: Path, died_s: float = math.inf) -> Undone:
    with _held(room) as there:
        if not there:
            return Undone()
        done = _undo_starts(room, keep_downloads=False, died_s=died_s)
        done.add(undo(read(room / _DOWNLOADS), died_s=died_s))
        shutil.rmtree(room, ignore_errors=True)
    with contextlib.suppress(OSError):
        if not any(p.is_dir() for p in room.parent.iterdir()):
            for name in (_README, _IGNORED):
                (room.parent / name).unlink(missing_ok=True)
        room.parent.rmdir()
    return done


@contextlib.contextmanager
def _held(room: Path) -> Iterator[bool]:
    """Keep others from undoing the same; whether there still is something to undo."""
    try:
        descriptor = os.open(room / _OWNER, os.O_RDWR)
    except OSError:
        yield False
        return
    try:
        lock(descriptor)
        yield (room / _OWNER).exists()
    finally:
        os.close(descriptor)
