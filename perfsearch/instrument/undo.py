"""What starts of a script did to the user's files: the record of it, and how it is undone.

Nothing here imports torch. The ranks write the record (``files.py``); the controller, the process
that starts are forked from, or a later search in the same directory reads it backwards.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import stat
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from perfsearch.core.files import write_json, write_text
from perfsearch.core.locks import lock
from perfsearch.workers import processes

ROOM = ".perfsearch-undo"
"""Directory in the working directory that is there while a search has something to put back."""

RECORD = "record.jsonl"
ORDERS = "start.json"
SHELF = "kept"
"""Directory of a start in which files are kept."""

_DRAFTS = (".new", ".again")
"""Endings of what is on a shelf only while it is made or put back."""

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
    MARKED = "marked"  # ``path`` had this ``mode``, these ``times``, and so on
    LOST = "lost"  # ``path`` is changed, and could not be kept
    STEP = "step"  # the first step of an optimizer is made
    TOUCHED = "touched"  # ``path``, made before that, is changed after it
    READ = "read"  # ``path``, made before that, is read


def read(file: Path, was: str = "", now: str = "") -> list[Entry]:
    """The entries of a record; lines that were torn are none.

    Args:
        file: the record.
        was: the path that a directory had when the record was written,
        now: and the one that it has: what lies below it is there now.

    """
    entries = []
    try:
        lines = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    for line in lines:
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            for key in ("path", "at", "to") if was != now else ():
                if key in entry and below(entry[key], was):
                    way = os.path.relpath(entry[key], was)
                    entry[key] = os.path.normpath(os.path.join(now, way))
            entries.append(entry)
    return entries


def below(path: str, root: str) -> bool:
    """Whether a path is that of a directory, or of something in it."""
    return f"{path}{os.sep}".startswith(f"{root.rstrip(os.sep)}{os.sep}")


# -----------------------------------------------------------------------------
# Undo one start: its record, read backwards.


@dataclass
class Undone:
    """What came of an undo.

    Attributes:
        lost: files that are not as they were.
        back: files that were put back, or removed as a start had made them.
        others: files that were changed after the start had died, which are left as they are.
        left: entries of files that are still kept, as they could not be put back.

    """

    lost: set[str] = field(default_factory=set)
    back: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)
    left: list[Entry] = field(default_factory=list)

    def add(self, more: Undone) -> None:
        """Take up what came of another one."""
        self.lost |= more.lost
        self.back |= more.back
        self.others |= more.others
        self.left += more.left


Anothers = Callable[[str], bool]
"""Tells whether what is at a path was put or changed there by others than the starts."""


def _nobody(path: str) -> bool:
    return False


def undo(
    entries: Sequence[Entry],
    staying: frozenset[str] = frozenset(),
    is_anothers: Anothers = _nobody,
) -> Undone:
    """Put back what a start changed; may be broken off anywhere and called again.

    Args:
        entries: its record, or what is left to be undone of one.
        staying: paths that it made and that are left where they are.
        is_anothers: tells of what was changed after it had died. That stays, and what was kept is
            put beside it.

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
        later = is_anothers(path)
        try:
            if _undo_deed(entry, others_need_it, later):
                (done.others if later else done.back).add(path)
        except OSError as error:
            if entry["deed"] == Deed.KEPT and not _was_put_back(entry["at"]):
                done.left.insert(0, entry)
            elif isinstance(error, FileNotFoundError):
                continue
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
    if _was_put_back(at):
        return False
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
    _move(source, path)
    if not os.path.islink(path):
        _mark(path, entry)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(source)  # a move onto another name of the same file leaves both
    return True


def _was_put_back(at: str) -> bool:
    """Whether a kept file is gone because an undo that was broken off has put it back.

    It is not if the place where it was kept is gone too, as a file system that is not mounted here.
    """
    return not os.path.lexists(at) and os.path.isdir(os.path.dirname(at))


def _move(source: str, path: str) -> None:
    """Let a file take the place of another, on another file system too."""
    try:
        os.replace(source, path)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        draft = f"{path}{ASIDE}.part"
        shutil.copy2(source, draft, follow_symlinks=False)
        os.replace(draft, path)
        os.unlink(source)


_OF_SYSTEM = "security."
"""Start of the names of extended attributes that are none of a script's."""


def marks(path: str, found: os.stat_result) -> Entry:
    """What a file has beside its content, as entries of the record have it."""
    return {
        "mode": stat.S_IMODE(found.st_mode),
        "times": [found.st_atime_ns, found.st_mtime_ns],
        "owner": [found.st_uid, found.st_gid],
        "attributes": _attributes(path),
    }


def _attributes(path: str) -> dict[str, str]:
    """Extended attributes of a file, their values in hexadecimal digits; none where there are none.

    A file system or a kind of file that has no such attributes is one without any.
    """
    if os.path.islink(path) or not hasattr(os, "listxattr"):
        return {}
    with contextlib.suppress(OSError):
        names = [name for name in os.listxattr(path) if not name.startswith(_OF_SYSTEM)]
        return {name: os.getxattr(path, name).hex() for name in names}
    return {}


def _mark(path: str, entry: Entry) -> None:
    now = os.stat(path)
    user, group = entry.get("owner", (now.st_uid, now.st_gid))
    # no user but root gives files away: one with another owner was copied by that one
    if (now.st_uid, now.st_gid) != (user, group) and (now.st_uid == user or os.geteuid() == 0):
        os.chown(path, user, group)
    found = _attributes(path)
    wanted = entry.get("attributes", found)
    for name in found.keys() - wanted.keys():
        os.removexattr(path, name)
    for name in wanted:
        if found.get(name) != wanted[name]:
            os.setxattr(path, name, bytes.fromhex(wanted[name]))
    if stat.S_IMODE(os.stat(path).st_mode) != entry["mode"]:  # which another owner may change
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
    _left_in: str = ""
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
            lines += [_still_kept(room, paths) for room, paths in unfinished(place)]
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
            f"others: {_listed(paths)}{kept if self._left_in else ''}"
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


def _still_kept(room: Path, paths: Collection[str]) -> str:
    return (
        f"warning: {os.path.relpath(room)} keeps files of a killed search that could not be put "
        f"back: {_listed(paths) or 'which ones is not on record'}. See that their directories are "
        "there and can be written, and start a search in this directory again, or take them from "
        f"*/{SHELF} in it (*/{RECORD} says which is which) and remove it"
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


def _undo_starts(room: Path, keep_downloads: bool, is_anothers: Anothers = _nobody) -> Undone:
    done = Undone()
    tree = _tree(room)
    for start in sorted((p.parent for p in room.glob(f"*/{ORDERS}")), reverse=True):
        entries = read(start / RECORD, *tree)
        stays = downloads(entries) if keep_downloads else []
        if stays:
            with (room / _DOWNLOADS).open("a") as file:
                file.writelines(json.dumps(entry) + "\n" for entry in stays)
        came = undo(entries, frozenset(e["path"] for e in stays), is_anothers)
        done.add(came)
        _clear(start, came.left)
    return done


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
    return [name for name in names if not name.endswith(_DRAFTS)]


def _close(room: Path, is_anothers: Anothers = _nobody) -> Undone:
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
