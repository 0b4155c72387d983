"""The user's files while a search runs a script: each start is undone, and whatever is left told.

A search keeps what its starts changed in a room, a directory beside the user's files. One that was
killed is found by the next in the same directory, which undoes its starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import stat
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from perfsearch.core.files import write_json, write_text
from perfsearch.core.locks import lock
from perfsearch.instrument.undo import (
    ASIDE,
    CHANGES,
    DRAFTS,
    ORDERS,
    RECORD,
    SHELF,
    Anothers,
    Deed,
    Entry,
    Undone,
    below,
    downloads,
    nobody,
    read,
    undo,
)
from perfsearch.workers import processes

ROOM = ".perfsearch-undo"
"""Directory in the working directory that is there while a search has something to put back."""

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

    Attributes:
        changed: paths that starts changed so far, downloads that later ones find apart.

    """

    own: Sequence[Path] = ()
    directory: Path = field(default_factory=Path.cwd)
    _lost: set[str] = field(default_factory=set)
    _room: Path | None = None
    _left_in: str = ""
    changed: set[str] = field(default_factory=set)
    _starts: int = 0
    _alive: dict[str, Path] = field(default_factory=dict)
    _before: Listing | None = None
    _closed: threading.Event = field(default_factory=threading.Event)
    _turn: threading.RLock = field(default_factory=threading.RLock)

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
            lines += [_still_kept(room, paths) for room, paths in unfinished(place)]
        if self._before is None:
            self._before = list_files(self.directory, self.own)
        return lines

    def begin(self, token: str) -> str:
        """Make the place where a start records what it changes.

        Starts that are alive at the same time have one place: each of its entries is of the state
        before any of them changed a path, as it is with the ranks of one start.

        Args:
            token: the mark of its processes.

        """
        with self._turn:
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
            self._alive[token] = next(iter(self._alive.values()), start)
            return str(self._alive[token])

    def end(self, token: str | None = None) -> None:
        """Undo what starts did, but for what the next would only do again, once all have ended.

        Args:
            token: the mark of the one that has ended; by default all have.

        """
        with self._turn:
            if token is None:
                self._alive.clear()
            else:
                self._alive.pop(token, None)
            if self._room is not None and not self._alive:
                done = _undo_starts(self._room, keep_downloads=True)
                self._lost |= done.lost
                self.changed |= done.changed

    def changed_by_now(self) -> set[str]:
        """``changed``, and what starts that are alive have changed."""
        with self._turn:
            records = {place / RECORD for place in self._alive.values()}
        return self.changed.union(*(_changed(read(record)) for record in records))

    def close(self) -> None:
        """Leave everything as it was before the first start."""
        room, self._room = self._room, None
        self._alive.clear()
        if room is not None:
            done = _close(room)
            self._lost |= done.lost
            if done.left:
                self._left_in = os.path.relpath(room)
            self._closed.set()

    def not_as_before(self) -> str:
        """One line that names files which are not as they were; empty where all are.

        Besides what the records tell that is what programs did which a script started.
        """
        after = None if self._before is None else list_files(self.directory, self.own)
        paths = sorted(self._lost | set(_differing(self._before, after)))
        if not paths:
            return ""
        kept = (
            f"; what could not be put back of that is kept in {self._left_in}, and the next search "
            "in this directory tries again"
        )
        return (
            "warning: changed while starts of the script ran, in a way that is not undone or by "
            f"others: {named(paths)}{kept if self._left_in else ''}"
        )


def _of_killed(done: Undone) -> list[str]:
    """What was undone of a search that was killed, a line each."""
    lines = []
    if done.back:
        lines.append(f"put back what a killed search had changed: {named(done.back)}")
    if done.others:
        lines.append(
            "warning: changed since the search was killed, and left as they are: "
            f"{named(done.others)}; what was there before it is in NAME{ASIDE}, if anything was"
        )
    return lines


def _left_alone(room: Path, host: str) -> str:
    return (
        f"warning: {os.path.relpath(room)} keeps files for a search on host {host}, which may "
        f"still run. If it does not, start one in this directory in {_SURELY_DEAD_S:g} s or later: "
        "they are put back then"
    )


def _still_kept(room: Path, paths: Collection[str]) -> str:
    return (
        f"warning: {os.path.relpath(room)} keeps files of a killed search that could not be put "
        f"back: {named(paths) or 'which ones is not on record'}. See that their directories are "
        "there and can be written, and start a search in this directory again, or take them from "
        f"*/{SHELF} in it (*/{RECORD} says which is which) and remove it"
    )


def named(paths: Collection[str]) -> str:
    """The first few of some paths, relative to the current directory, for people."""
    first = ", ".join(os.path.relpath(path) for path in sorted(paths)[:_NAMED])
    return first + (f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else "")


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
            done.add(_close(owner.parent, _after_death(owner.parent)))
    return done


def _after_death(room: Path) -> Anothers:
    """Tells which files were written to after the search of a room had died.

    In a copy of a directory all files were changed when it was made: there the time counts when
    their content was, which ``cp -a`` leaves as it was.
    """
    sign = (room / _OWNER).stat()  # of life, which sets both times to the same
    died_s = sign.st_mtime + _ANOTHERS_S
    copy = _tree(room)[1] if sign.st_ctime > sign.st_mtime + _HEARTBEAT_S else None

    def is_anothers(path: str) -> bool:
        try:
            found = os.lstat(path)
        except OSError:
            return False
        copied = copy is not None and below(path, copy)
        changed_s = found.st_mtime if copied else found.st_ctime
        return not stat.S_ISDIR(found.st_mode) and changed_s > died_s

    return is_anothers


def unfinished(directory: Path) -> list[tuple[Path, set[str]]]:
    """Rooms of dead searches that keep files which could not be put back, and their paths."""
    found = []
    for owner in sorted((directory / ROOM).glob(f"*/{_OWNER}")):
        room = owner.parent
        starts = [orders.parent for orders in room.glob(f"*/{ORDERS}")]
        if starts and _lives(owner) is False:
            entries = [e for start in starts for e in read(start / RECORD, *_tree(room))]
            found.append((room, {e["path"] for e in entries if e["deed"] == Deed.KEPT}))
    return found


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
    place = next((p for p in (directory, *own) if os.access(p, os.W_OK | os.X_OK)), directory)
    room = Path(os.path.realpath(place), ROOM, name)
    with contextlib.suppress(FileNotFoundError):  # another search has just ended here
        room.mkdir(parents=True)
    room.mkdir(parents=True, exist_ok=True)
    (room.parent / _README).write_text(_EXPLANATION)
    (room.parent / _IGNORED).write_text("*\n")
    me = os.getpid()
    here, whole = os.path.realpath(directory), str(room)
    tree = here if below(whole, here) else whole
    owner = {
        "host": socket.gethostname(),
        "controller": [me, processes.started_at(me)],
        "tree": [tree, os.path.relpath(tree, whole)],
    }
    write_json(room / _OWNER, owner)
    return room


def _tree(room: Path) -> tuple[str, str]:
    """The directory that a room lies in and goes with: its path when that was made, and now.

    The record names files by their paths of then. In a directory that was moved, copied or mounted
    elsewhere since, those are nothing or, worse, the original's.
    """
    try:
        was, way = json.loads((room / _OWNER).read_text())["tree"]
    except (OSError, ValueError, KeyError, TypeError):
        return "", ""
    return was, os.path.normpath(os.path.join(os.path.realpath(room), way))


def _undo_starts(room: Path, keep_downloads: bool, is_anothers: Anothers = nobody) -> Undone:
    done = Undone()
    tree = _tree(room)
    for start in sorted((p.parent for p in room.glob(f"*/{ORDERS}")), reverse=True):
        entries = read(start / RECORD, *tree)
        stays = downloads(entries) if keep_downloads else []
        if stays:
            with (room / _DOWNLOADS).open("a") as file:
                file.writelines(json.dumps(entry) + "\n" for entry in stays)
        staying = frozenset(e["path"] for e in stays)
        came = undo(entries, staying, is_anothers)
        done.add(came)
        done.changed |= _changed(entries, staying)
        _clear(start, came.left)
    return done


def _changed(entries: Sequence[Entry], staying: Collection[str] | None = None) -> set[str]:
    """Paths that are not as they were, but for what later starts would only make again."""
    if staying is None:
        staying = {entry["path"] for entry in downloads(entries)}
    return {e["path"] for e in entries if e["deed"] in CHANGES}.difference(staying)


def _clear(start: Path, left: Sequence[Entry]) -> None:
    """Remove what there is of a start that was undone, but never a file that is still kept."""
    if left:
        write_text(start / RECORD, "".join(json.dumps(entry) + "\n" for entry in left))
    elif not _on_shelf(start):
        (start / ORDERS).unlink(missing_ok=True)  # without which it is a start no more
        shutil.rmtree(start, ignore_errors=True)


def _on_shelf(start: Path) -> list[str]:
    try:
        names = os.listdir(start / SHELF)
    except FileNotFoundError:
        return []
    return [name for name in names if not name.endswith(DRAFTS)]


def _close(room: Path, is_anothers: Anothers = nobody) -> Undone:
    with _held(room) as there:
        if not there:
            return Undone()
        done = _undo_starts(room, keep_downloads=False, is_anothers=is_anothers)
        done.add(undo(read(room / _DOWNLOADS, *_tree(room)), is_anothers=is_anothers))
        (room / _DOWNLOADS).unlink(missing_ok=True)
        if any(room.glob(f"*/{ORDERS}")):
            return done  # what is still kept
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
