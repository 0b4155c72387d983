"""What starts of a script did to the user's files: the record of it, and how it is undone.

Nothing here imports torch. The ranks write the record (``files.py``); the controller, the process
that starts are forked from, or a later search in the same directory (``user_files.py``) reads it
backwards.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

RECORD = "record.jsonl"
ORDERS = "start.json"
SHELF = "kept"
"""Directory of a start in which files are kept."""

DRAFTS = (".new", ".again")
"""Endings of what is on a shelf only while it is made or put back."""

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


CHANGES = frozenset({Deed.MADE, Deed.KEPT, Deed.REMOVED, Deed.MOVED, Deed.MARKED, Deed.LOST})
"""Entries of paths that are not as they were."""


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
        changed: every path that was not as before, whatever came of it.

    """

    lost: set[str] = field(default_factory=set)
    back: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)
    left: list[Entry] = field(default_factory=list)
    changed: set[str] = field(default_factory=set)

    def add(self, more: Undone) -> None:
        """Take up what came of another one."""
        self.lost |= more.lost
        self.back |= more.back
        self.others |= more.others
        self.left += more.left
        self.changed |= more.changed


Anothers = Callable[[str], bool]
"""Tells whether what is at a path was put or changed there by others than the starts."""


def nobody(path: str) -> bool:
    """Nothing at all is others'."""
    return False


def undo(
    entries: Sequence[Entry],
    staying: frozenset[str] = frozenset(),
    is_anothers: Anothers = nobody,
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
