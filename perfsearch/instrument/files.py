"""Keeps the user's files inside a rank of a search: before a script changes one, it is set aside.

Python tells of each opening, renaming or removing of a file before it is done (audit events, see
PEP 578); libraries that write files themselves are wrapped. Nothing that exists is copied where it
is truncated, replaced or removed, however large it is: its other name in the start's directory (a
hard link) outlives that. Only what is changed in place (appended to, as a log is) must be copied.
Processes that are forked, as a ``DataLoader``'s workers are, keep files as their parent does.
``undo.py`` has the record, and puts back.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
import sys
import tempfile
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from perfsearch.core.locks import lock, unlock
from perfsearch.instrument.patching import Around, after_import, wrap
from perfsearch.instrument.undo import ORDERS, RECORD, SHELF, Deed, Entry, below, marks

_MOST_COPIED = 2**30
"""Bytes up to which a file that is changed in place is copied."""

_FICLONE = 0x40049409  # of Linux: let a file share another's blocks

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_UNNAMED = getattr(os, "O_TMPFILE", 0)
_SQLITE_FILES = ("-journal", "-wal", "-shm")

_CACHES = {
    "XDG_CACHE_HOME": "~/.cache",
    "XDG_CONFIG_HOME": "~/.config",
    "TORCH_HOME": "",
    "HF_HOME": "",
    "HF_HUB_CACHE": "",
    "HF_DATASETS_CACHE": "",
    "TRANSFORMERS_CACHE": "",
    "TRITON_CACHE_DIR": "~/.triton",
    "TORCHINDUCTOR_CACHE_DIR": "",
    "TORCH_EXTENSIONS_DIR": "",
    "CUDA_CACHE_PATH": "~/.nv",
    "NUMBA_CACHE_DIR": "",
    "MPLCONFIGDIR": "",
    "PYTHONPYCACHEPREFIX": "",
}
"""Variables that name a cache, and where it is without."""


class Scope:
    """Which files are the user's.

    Not so are those of the system, temporary ones, caches, Python's packages, and what is
    perfsearch's own. What is below the working directory is the user's all the same, wherever that
    is, but for what lies there expressly.

    Args:
        directory: the working directory.
        own: directories of perfsearch.

    """

    def __init__(self, directory: str, own: Sequence[str]) -> None:
        here = os.path.realpath(directory)
        caches = [os.environ.get(name) or usual for name, usual in _CACHES.items()]
        python = [sys.prefix, sys.base_prefix, sys.exec_prefix]
        system = ["/dev", "/proc", "/sys", "/run", "/tmp", "/var/tmp", tempfile.gettempdir()]
        roots = {os.path.realpath(os.path.expanduser(p)) for p in caches + python + system if p}
        around = {root for root in roots if below(here, root)}
        expressly = {os.path.realpath(path) for path in own}
        self._left_out = tuple(f"{root}{os.sep}" for root in (roots - around) | expressly)
        self._around = tuple(f"{root}{os.sep}" for root in around)
        self._here = f"{here}{os.sep}"

    def has(self, path: str) -> bool:
        """Whether the file at this absolute path is the user's."""
        whole = f"{path}{os.sep}"
        if whole.startswith(self._left_out) or f"{os.sep}__pycache__{os.sep}" in whole:
            return False
        return whole.startswith(self._here) or not whole.startswith(self._around)


class Record:
    """A start's record, to which each of its processes appends, one at a time.

    Args:
        directory: of the start.

    Attributes:
        known: paths whose state before the start is on record.
        early: paths that were made before the first step.
        early_names: their names without the directories.
        stepped: whether that is made.

    """

    def __init__(self, directory: str) -> None:
        self._file = os.path.join(directory, RECORD)
        self._said: set[tuple[str, str]] = set()
        self._read_to = 0
        self.known: set[str] = set()
        self.early: set[str] = set()
        self.early_names: set[str] = set()
        self.stepped = False

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Keep the other processes and threads out, and learn what they have written."""
        descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            lock(descriptor)  # of this opening: a fork has its own
            self._learn(descriptor)
            self._open = descriptor
            yield
        finally:
            unlock(descriptor)
            os.close(descriptor)

    def say(self, deed: Deed, path: str = "", **more: Any) -> None:
        """Append an entry, within a ``turn``, before what it tells of is done."""
        if (deed, path) in self._said:
            return
        entry = {"deed": deed, "path": path, **more}
        line = json.dumps(entry).encode() + b"\n"
        if os.write(self._open, line) < len(line):
            os.ftruncate(self._open, self._read_to)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file)
        self._read_to += len(line)
        self._take(entry)

    def has_said(self, deed: Deed, path: str) -> bool:
        """Whether there is such an entry."""
        return (deed, path) in self._said

    def _learn(self, descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        if size == self._read_to:
            return
        text = os.pread(descriptor, size - self._read_to, self._read_to)
        self._read_to = size
        for line in text.split(b"\n"):
            with contextlib.suppress(ValueError):  # of one that was killed while it wrote
                self._take(json.loads(line))

    def _take(self, entry: Entry) -> None:
        deed, path = Deed(entry["deed"]), entry["path"]
        match deed:
            case Deed.MADE | Deed.KEPT | Deed.REMOVED | Deed.LOST:
                self.known.add(path)
                if deed is Deed.MADE and not self.stepped:
                    self.early.add(path)
                    self.early_names.add(os.path.basename(path))
            case Deed.MOVED:
                for moved in (path, entry["to"]):  # from now on other things have these names
                    self.known = {p for p in self.known if not below(p, moved)}
                    self._said = {said for said in self._said if not below(said[1], moved)}
            case Deed.STEP:
                self.stepped = True
        if deed is not Deed.MOVED:  # which may happen to another of that name again
            self._said.add((deed, path))


class Keeper:
    """Sees that each file of the user's is kept before it is changed.

    Args:
        directory: of the start, as the controller made it.
        own: further directories that are not the user's.

    """

    def __init__(self, directory: str, own: Sequence[str] = ()) -> None:
        orders = json.loads(Path(directory, ORDERS).read_text())
        self.scope = Scope(orders["directory"], [*orders["own"], *own])
        self.record = Record(directory)
        self._shelf = os.path.join(directory, SHELF)
        os.makedirs(self._shelf, exist_ok=True)
        self._device = os.stat(self._shelf).st_dev
        self._mark = os.path.basename(os.path.dirname(directory))
        self._local = threading.local()
        self.events: dict[str, Callable[..., None]] = {
            "open": self._opened,
            "os.remove": self._removed,
            "os.rmdir": self._directory_removed,
            "os.mkdir": lambda path, mode, at: self.made(path, at),
            "os.symlink": lambda source, path, at: self.made(path, at),
            "os.link": self._linked,
            "os.rename": self._renamed,
            "os.truncate": lambda path, length: self.before_writing(path),
            "os.chmod": lambda path, mode, at: self._marked(path, at),
            "os.utime": lambda path, times, ns, at: self._marked(path, at),
            "os.chown": lambda path, user, group, at: self._marked(path, at),
            "os.setxattr": lambda path, *_: self._marked(path),
            "os.removexattr": lambda path, *_: self._marked(path),
            "socket.bind": lambda socket, address: self._bound(address),
            "sqlite3.connect": self._database,
        }

    def quietly(self, act: Callable[..., None], *args: Any) -> None:
        """Do it unless this thread is doing so already.

        What fails does not reach the script, but for a full disk and used-up descriptors: what
        cannot be put on record must not be done.
        """
        if getattr(self._local, "busy", False):
            return
        self._local.busy = True
        try:
            act(*args)
        except Exception as error:
            if _is_used_up(error):
                raise
            # else of no concern to the script, which meets what is wrong in its own words
        finally:
            self._local.busy = False

    def first_step(self) -> None:
        """The first step of an optimizer is made."""

        def say() -> None:
            with self.record.turn():
                self.record.say(Deed.STEP)

        self.quietly(say)

    def before_writing(
        self, path: Any, *, replaces: bool = False, creates: bool = False, new: bool = False
    ) -> None:
        """A file is about to be opened for writing.

        Args:
            path: its path.
            replaces: whether nothing of its content will be left.
            creates: whether it is made where there is none.
            new: whether this fails where there is one.

        """
        if not isinstance(path, str | bytes | os.PathLike):
            return
        name = os.path.realpath(os.fsdecode(path))
        if not self.scope.has(name):
            return
        with self.record.turn():
            found = _status(name)
            if found is None:
                if creates and os.path.isdir(os.path.dirname(name)):
                    self._note_made(name)
            elif stat.S_ISREG(found.st_mode) and not new and os.access(name, os.W_OK):
                self._before_change(name, found, replaces)

    def _opened(self, path: Any, mode: Any, flags: int) -> None:
        if flags & _WRITING:
            if flags & _UNNAMED != _UNNAMED or not _UNNAMED:
                self.before_writing(
                    path,
                    replaces=bool(flags & os.O_TRUNC),
                    creates=bool(flags & os.O_CREAT),
                    new=bool(flags & os.O_CREAT and flags & os.O_EXCL),
                )
        elif self.record.early_names and isinstance(path, str | bytes | os.PathLike):
            text = os.fsdecode(path)
            if os.path.basename(text) not in self.record.early_names:
                return  # of most files that are read no more must be known
            name = os.path.realpath(text)
            if name in self.record.early and not self.record.has_said(Deed.READ, name):
                with self.record.turn():
                    self.record.say(Deed.READ, name)

    def _before_change(self, name: str, found: os.stat_result, replaces: bool) -> None:
        """Have the script write to another file than the one that is kept."""
        known = name in self.record.known
        at = self._place(name, found)
        draft = f"{at}.new"
        if known and not os.path.lexists(at):
            self._note_touched(name)
            return
        try:
            if not _draft(name, draft, found, replaces):
                self.record.say(Deed.LOST, name)
                return
            if not known:
                self._keep(name, found)
            os.replace(draft, name)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(draft)
            if _is_used_up(error):
                raise
            self.record.say(Deed.LOST, name)  # its directory cannot be written

    def _keep(self, name: str, found: os.stat_result) -> None:
        """Give what is at ``name`` another name of ours; a copy where there are no hard links."""
        at = self._place(name, found)
        self.record.say(Deed.KEPT, name, at=at, **marks(name, found))
        if os.path.lexists(at):
            return
        try:
            os.link(name, at, follow_symlinks=False)
        except OSError:
            if not _copied(name, at, found):
                self.record.say(Deed.LOST, name)

    def _place(self, name: str, found: os.stat_result) -> str:
        """Where this file is kept, or would be: on its own file system."""
        key = f"{found.st_dev}-{found.st_ino}"
        if found.st_dev == self._device:
            return os.path.join(self._shelf, key)
        return os.path.join(os.path.dirname(name), f".perfsearch-undo-{self._mark}-{key}")

    def _note_made(self, name: str) -> None:
        if name in self.record.known:
            self._note_touched(name)
        else:
            self.record.say(Deed.MADE, name)

    def _note_touched(self, name: str) -> None:
        if self.record.stepped and name in self.record.early:
            self.record.say(Deed.TOUCHED, name)

    def _removed(self, path: Any, at: int) -> None:
        name = _entry(path, at)
        if self.scope.has(name):
            with self.record.turn():
                self._before_loss(name)

    def _before_loss(self, name: str) -> None:
        """What is at ``name`` is about to lose that name."""
        found = _status(name)
        if found is None or stat.S_ISDIR(found.st_mode):
            return
        if name in self.record.known:
            self._note_touched(name)
        else:
            self._keep(name, found)

    def _directory_removed(self, path: Any, at: int) -> None:
        name = _entry(path, at)
        if self.scope.has(name):
            with self.record.turn():
                self._before_directory_goes(name)

    def _before_directory_goes(self, name: str) -> None:
        found = _status(name)
        if found is not None and stat.S_ISDIR(found.st_mode) and name not in self.record.known:
            self.record.say(Deed.REMOVED, name, mode=stat.S_IMODE(found.st_mode))

    def made(self, path: Any, at: int | None = None) -> None:
        """An entry of a directory is about to be made, where there is none."""
        name = _entry(path, at)
        if self.scope.has(name):
            with self.record.turn():
                if _status(name) is None and os.path.isdir(os.path.dirname(name)):
                    self._note_made(name)

    def _linked(self, source: Any, path: Any, source_at: int, at: int) -> None:
        origin = _entry(source, source_at)
        if self.scope.has(origin):
            with self.record.turn():
                self._before_loss(origin)  # what is written to the other name is not to reach it
        self.made(path, at)

    def _renamed(self, source: Any, target: Any, source_at: int, target_at: int) -> None:
        old, new = _entry(source, source_at), _entry(target, target_at)
        if not (self.scope.has(old) or self.scope.has(new)):
            return
        with self.record.turn():
            found = _status(old)
            if found is None or not os.path.isdir(os.path.dirname(new)):
                return
            if stat.S_ISDIR(found.st_mode):
                self._before_directory_goes(new)
                self.record.say(Deed.MOVED, old, to=new)
                return
            if self.scope.has(old):
                self._before_loss(old)
            if self.scope.has(new):
                if _status(new) is None:
                    self._note_made(new)
                else:
                    self._before_loss(new)

    def _bound(self, address: Any) -> None:
        """A socket is about to be bound, which makes a file where the address is a path."""
        if isinstance(address, str | bytes) and os.fsencode(address)[:1] not in (b"", b"\0"):
            self.made(address)

    def _marked(self, path: Any, at: int = -1) -> None:
        if isinstance(path, int):  # a descriptor
            path = os.readlink(f"/proc/self/fd/{path}")
        if not isinstance(path, str | bytes | os.PathLike):
            return
        name = os.path.realpath(_entry(path, at))
        if not self.scope.has(name):
            return
        with self.record.turn():
            found = _status(name)
            if found is not None and name not in self.record.known:
                self.record.say(Deed.MARKED, name, **marks(name, found))

    def _database(self, path: Any) -> None:
        name = os.fsdecode(path)
        if name.startswith("file:"):  # https://sqlite.org/uri.html
            name = urllib.parse.unquote(urllib.parse.urlsplit(name).path)
        if name not in ("", ":memory:"):
            for file in (name, *(name + ending for ending in _SQLITE_FILES)):
                self.before_writing(file, creates=True)


def _is_used_up(error: BaseException) -> bool:
    """Whether there is no room on a disk, or no descriptor, which the script would meet as well."""
    return isinstance(error, OSError) and error.errno in _USED_UP


_USED_UP = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE))


def _status(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


def _entry(path: Any, at: int | None = -1) -> str:
    """The absolute path of a directory's entry, which may itself be a symbolic link."""
    name = os.fsdecode(path).rstrip(os.sep)
    if at is not None and at >= 0 and not os.path.isabs(name):
        name = os.path.join(os.readlink(f"/proc/self/fd/{at}"), name)
    above, last = os.path.split(name)
    if last in ("", ".", ".."):
        return os.path.realpath(name)
    return os.path.join(os.path.realpath(above), last)


def _copied(name: str, at: str, found: os.stat_result) -> bool:
    """Copy a file; ``False`` where it cannot be or is too much. At ``at`` it is whole or not."""
    if found.st_size > _MOST_COPIED:
        return False
    try:
        shutil.copy2(name, f"{at}.new", follow_symlinks=False)
        os.replace(f"{at}.new", at)
    except OSError as error:
        if _is_used_up(error):
            raise
        return False
    return True


def _draft(name: str, draft: str, found: os.stat_result, empty: bool) -> bool:
    """Make what the script is to write to: empty or a copy; ``False`` where it is too much."""
    with open(name, "rb") as source, open(draft, "wb") as target:
        os.fchmod(target.fileno(), stat.S_IMODE(found.st_mode))
        if empty:
            return True
        with contextlib.suppress(OSError):
            fcntl.ioctl(target.fileno(), _FICLONE, source.fileno())
            return True
        if found.st_size > _MOST_COPIED:
            os.unlink(draft)
            return False
        shutil.copyfileobj(source, target, 2**20)
    return True


# -----------------------------------------------------------------------------
# Put into force: Python's events, and the libraries that open files themselves.

_WRITERS = (
    ("torch", "_C.PyTorchFileWriter.__init__", 1),  # torch.save, torch.package, torch.export
    ("torch", "_C.ScriptModule.save", 1),
    ("safetensors", "serialize_file", 1),
    ("tokenizers", "Tokenizer.save", 1),
    ("torchvision.io.image", "write_file", 0),
    ("cv2", "imwrite", 0),
)
"""Functions that open a file outside of Python, and which of their arguments names it."""

_NAMES = ("filename", "file_name", "path")
"""What that argument may be called."""


_MAKERS = ("mkfifo", "mknod")
"""Functions of ``os`` that make what their first argument names, of which Python does not tell."""


def _hook(keeper: Keeper) -> Callable[[str, tuple[Any, ...]], None]:
    """Python's audit hook; most events, such as each ``id()``, are none of files'."""
    action, quietly = keeper.events.get, keeper.quietly

    def hook(event: str, args: tuple[Any, ...]) -> None:
        act = action(event)
        if act is not None:
            quietly(act, *args)

    return hook


def keep_files(directory: str, own: Sequence[str] = ()) -> Keeper:
    """Keep the user's files from here on, in this process and those that it forks.

    Args:
        directory: of the start, as the controller made it.
        own: further directories that are not the user's.

    """
    keeper = Keeper(directory, own)

    def writing(place: int) -> Around:
        def around(
            original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            by_name = next((kwargs[name] for name in _NAMES if name in kwargs), None)
            named = args[place] if len(args) > place else by_name
            keeper.quietly(lambda: keeper.before_writing(named, replaces=True, creates=True))
            return original(*args, **kwargs)

        return around

    def making(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        keeper.quietly(keeper.made, args[0] if args else kwargs.get("path"), kwargs.get("dir_fd"))
        return original(*args, **kwargs)

    for maker in _MAKERS:
        wrap(os, maker, making)
    for module, function, place in _WRITERS:
        owner, _, name = function.rpartition(".")

        def meet(found: Any, owner: str = owner, name: str = name, place: int = place) -> None:
            for part in filter(None, owner.split(".")):
                found = getattr(found, part, None)
            if hasattr(found, name):
                wrap(found, name, writing(place))

        after_import(module, meet)
    sys.addaudithook(_hook(keeper))
    return keeper
