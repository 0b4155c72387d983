"""What a script imports, imported once: told by its first start, done where others are forked from.

The first start tells which third-party modules it had imported when its first step was made. The
process that later starts are forked from imports them beforehand, each watched: what does more than
to define things, or depends on what differs between starts, is left out there, with everything that
imports it, and imported by each start as ever. The script's own modules are never imported ahead.
Nothing here imports torch.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import builtins
import contextlib
import importlib
import importlib.util
import itertools
import logging
import os
import random
import signal
import site
import sys
import sysconfig
import tempfile
import threading
import time
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.machinery import ExtensionFileLoader, SourceFileLoader, SourcelessFileLoader
from typing import Any

from perfsearch.instrument.launch import SET_BY_TORCHRUN

NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""torch asks NVML whether there is a GPU where this is 1. Asked of CUDA, no fork could use one."""

_OF_MAPPINGS = (os.__file__, "<frozen os>", "<frozen _collections_abc>")
"""Whose code stands between ``os.environ`` and whoever changes it."""

_THREADS_END_S = 0.2


@dataclass(frozen=True)
class Imports:
    """What a start of a script had imported when its first step was made, and what that depends on.

    Attributes:
        modules: third-party ones, in the order in which their imports began.
        settings: variables of the environment that the script set until then: how many of
            ``modules`` were there before, the name and the value, ``None`` where it was removed.
        arguments: ``sys.argv``.
        path: the directory that is first in ``sys.path``; empty: none was put there.
        main: the file of ``__main__``; empty where it is a module.

    """

    modules: list[str]
    settings: list[tuple[int, str, str | None]] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    path: str = ""
    main: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Imports:
        """What ``to_json`` gave."""
        settings = [(int(place), name, value) for place, name, value in data["settings"]]
        return cls(**{**data, "settings": settings})

    def without(self, names: Iterable[str]) -> Imports:
        """The same, less some modules."""
        left_out = frozenset(names)
        before = list(itertools.accumulate((m not in left_out for m in self.modules), initial=0))
        settings = [(before[place], name, value) for place, name, value in self.settings]
        return replace(
            self, modules=[m for m in self.modules if m not in left_out], settings=settings
        )

    def before(self, variable: str) -> Imports | None:
        """What was imported before the script set a variable; ``None`` where it set none such."""
        places = [place for place, name, _ in self.settings if name == variable]
        if not places:
            return None
        first = min(places)
        settings = [(min(place, first), name, value) for place, name, value in self.settings]
        return replace(self, modules=self.modules[:first], settings=settings)

    def unlike(self, settings: Sequence[tuple[int, str, str | None]]) -> str:
        """A variable by which modules would have been imported otherwise in a start, or empty.

        Args:
            settings: that the start has made.

        """
        now = {name: value for _, name, value in settings}
        late = {name for place, name, _ in self.settings if place >= len(self.modules)}
        early = {name: value for _, name, value in self.settings if name not in late}
        other = [name for name in early if name not in now or now[name] != early[name]]
        return next(iter([*other, *(now.keys() - early.keys() - late)]), "")


ahead: Imports | None = None
"""What this process, or the one that it is a fork of, has imported before the script did."""


# -----------------------------------------------------------------------------
# Whose a module is.


class Places:
    """Where third-party packages and Python's own modules lie."""

    def __init__(self) -> None:
        paths = sysconfig.get_paths()
        packages = [paths["purelib"], paths["platlib"], site.getusersitepackages()]
        self._packages = _rooms([*packages, *site.getsitepackages()])
        self._python = _rooms([paths["stdlib"], paths["platstdlib"]])
        self._own = _rooms([os.path.dirname(os.path.dirname(os.path.abspath(__file__)))])

    def is_third_party(self, file: str) -> bool:
        """Whether a file belongs to an installed package that is not ours."""
        return file.startswith(self._packages) and not file.startswith(self._own)

    def may_be_scripts(self, file: str) -> bool:
        """Whether code of this file may be the script's: also a text that is executed."""
        return not file.startswith((*self._packages, *self._own))

    def is_users(self, file: str) -> bool:
        """Whether it belongs to the script, or what lies beside it."""
        return os.path.isabs(file) and not file.startswith(
            (*self._packages, *self._python, *self._own)
        )


def _rooms(directories: Iterable[str]) -> tuple[str, ...]:
    both = {*directories, *map(os.path.realpath, directories)}
    return tuple(f"{directory}{os.sep}" for directory in both if directory)


def _file_of(name: str, module: Any) -> str:
    """The file that a module was made from under this name; empty where there is none."""
    spec = getattr(module, "__spec__", None)
    if getattr(spec, "name", None) != name or spec is None:
        return ""
    return spec.origin or "" if spec.has_location else ""


# -----------------------------------------------------------------------------
# In a start: what is imported and set until the first step.


class Recorder:
    """Notes what the script sets in the environment, and in the end what it has imported.

    What a library sets is not the script's: it is set again where that is imported again, and what
    it sets later is for itself.
    """

    def __init__(self) -> None:
        self._places = Places()
        self._owner = os.getpid()
        self._set: list[tuple[str, str, str | None]] = []
        self._begun = dict(os.environ)
        environ: Any = type(os.environ)
        put, remove = environ.__setitem__, environ.__delitem__

        def setting(variables: Any, name: str, value: str) -> None:
            put(variables, name, value)
            self._note(name, value)

        def removing(variables: Any, name: str) -> None:
            remove(variables, name)
            self._note(name, None)

        environ.__setitem__, environ.__delitem__ = setting, removing
        self._undo: Callable[[], None] = lambda: _put_back(environ, put, remove)

    def _note(self, name: str, value: str | None) -> None:
        if os.getpid() == self._owner and not self._is_librarys():
            self._set.append((next(reversed(sys.modules), ""), name, value))

    def _is_librarys(self) -> bool:
        """Whether a library, or perfsearch, sets what is being set."""
        frame: types.FrameType | None = sys._getframe(3)
        while frame is not None and frame.f_code.co_filename in _OF_MAPPINGS:
            frame = frame.f_back
        return frame is None or not self._places.may_be_scripts(frame.f_code.co_filename)

    def end(self) -> tuple[list[str], list[tuple[int, str, str | None]]]:
        """Note no more; the modules and settings of ``Imports``.

        What has its first value again, as where libraries empty the environment for a while, was
        not set.
        """
        self._undo()
        found, before = [], {}
        for name, module in list(sys.modules.items()):
            if self._places.is_third_party(_file_of(name, module)) and "__main__" not in name:
                found.append(name)
            before[name] = len(found)
        settings = [
            (before.get(last, len(found)), name, value)
            for last, name, value in self._set
            if os.environ.get(name) != self._begun.get(name)
        ]
        return found, settings


def _put_back(environ: Any, put: Any, remove: Any) -> None:
    environ.__setitem__, environ.__delitem__ = put, remove


# -----------------------------------------------------------------------------
# In the process that later starts are forked from.


@dataclass
class Done:
    """What came of importing ahead.

    Attributes:
        left_out: modules that are not to be imported ahead, and why.
        with_them: those and all that import one of them.

    """

    left_out: dict[str, str]
    with_them: set[str]


def import_ahead(imports: Imports, by_torchrun: bool) -> Done:
    """Import the modules, each watched; standard output is not written to.

    Environment, arguments and ``__main__`` are those of a start meanwhile. New variables that an
    imported module sets stay, as they would in a start.

    Args:
        imports: what the first start told.
        by_torchrun: whether starts have variables of torchrun that this process has not.

    """
    watch = _Watch(by_torchrun)
    reserved = {NVML_CHECK: os.environ.get(NVML_CHECK)}
    os.environ[NVML_CHECK] = "1"
    settings = list(imports.settings)
    if imports.path:
        sys.path.insert(0, imports.path)
    sys.argv = _Arguments(imports.arguments, watch)
    if imports.main:
        blank_main(imports.main)
    with watch:
        for place, name in enumerate(imports.modules):
            while settings and settings[0][0] <= place:
                _, variable, value = settings.pop(0)
                reserved.setdefault(variable, os.environ.get(variable))
                _set(variable, value)
                watch.expect()
            watch.import_module(name)
    for variable, value in reserved.items():
        _set(variable, value)
    with contextlib.suppress(ValueError):
        sys.path.remove(imports.path)
    sys.argv = list(imports.arguments)
    return Done(watch.left_out, watch.dependents())


def _set(variable: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(variable, None)
    else:
        os.environ[variable] = value


def blank_main(path: str) -> types.ModuleType:
    """The module that the script at ``path`` will be executed in, put in its place.

    It is made once, so that whoever takes it from there beforehand has the right one.
    """
    present = sys.modules["__main__"]
    if getattr(present, "__file__", "") == path:
        return present
    main = types.ModuleType("__main__")  # kept, so that workers and pickles find its classes
    main.__dict__.update(__file__=path, __cached__=None, __builtins__=builtins)
    main.__loader__ = SourceFileLoader("__main__", path)
    sys.modules["__main__"] = main
    return main


class _Arguments(list[str]):
    """``sys.argv`` that tells when it is read; starts may have others."""

    def __init__(self, words: Iterable[str], watch: _Watch) -> None:
        super().__init__(words)
        self._watch = watch

    def __getitem__(self, place: Any) -> Any:
        self._watch.note("it reads sys.argv")
        return super().__getitem__(place)

    def __iter__(self) -> Iterator[str]:
        self._watch.note("it reads sys.argv")
        return super().__iter__()

    def __contains__(self, word: object) -> bool:
        self._watch.note("it reads sys.argv")
        return super().__contains__(word)

    def __len__(self) -> int:
        self._watch.note("it reads sys.argv")
        return super().__len__()


class _Watch:
    """Sees what importing a module does besides, and which module it was; a context.

    Args:
        by_torchrun: whether variables of torchrun are missed here.

    Attributes:
        left_out: modules that did something, and what.

    """

    def __init__(self, by_torchrun: bool) -> None:
        self.left_out: dict[str, str] = {}
        self._by_torchrun = by_torchrun
        self._places = Places()
        self._stack: list[str] = []
        self._importers: dict[str, set[str]] = defaultdict(set)
        self._hidden = contextlib.ExitStack()
        self._open: frozenset[str] = frozenset()
        self._gpus: set[str] = set()

    def __enter__(self) -> _Watch:
        self._output = self._hidden.enter_context(_output_aside())
        self._hidden.enter_context(_loaders_around(self._around))
        self._hidden.enter_context(_imports_seen(self._needs))
        if self._by_torchrun:
            self._hidden.enter_context(_variables_seen(SET_BY_TORCHRUN, self.note))
        self._known = dict(os.environ)
        self.expect()
        return self

    def __exit__(self, *error: object) -> None:
        self._hidden.close()

    def expect(self) -> None:
        """Take what holds now for what a module finds."""
        self._before = self._state()

    def import_module(self, name: str) -> None:
        """Import one; what it raises is noted."""
        self._stack.append(name)
        try:
            importlib.import_module(name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.left_out.setdefault(name, f"{type(error).__name__}: {error}")
        finally:
            self._look()
            self._stack.pop()

    def note(self, what: str) -> None:
        """Note that the module that is being imported did something."""
        if self._stack:
            self.left_out.setdefault(self._stack[-1], what)

    def dependents(self) -> set[str]:
        """What was left out, and all that import it, directly or by others."""
        found, new = set(self.left_out), set(self.left_out)
        names = {*self._importers, *itertools.chain.from_iterable(self._importers.values())}
        inner = defaultdict(set)
        for name in names | sys.modules.keys():
            inner[name.rpartition(".")[0]].add(name)  # importing it imports the package first
        while new:
            new = set().union(*((self._importers[n] | inner[n]) for n in new)) - found
            found |= new
        return found

    def _needs(self, importer: str, name: str) -> None:
        self._importers[name].add(importer)

    @contextlib.contextmanager
    def _around(self, module: str, file: str) -> Iterator[None]:
        """Around the execution of a module's body."""
        self._look()
        if self._stack and self._stack[-1] != module:
            self._needs(self._stack[-1], module)
        if self._places.is_users(file):
            self.note(f"it imports {file}, which may change")
        self._stack.append(module)
        try:
            yield
        finally:
            self._look()
            self._stack.pop()

    def _look(self) -> None:
        """See what has been done since the last look; the innermost module did it."""
        now = self._state()
        if now == self._before:
            return
        for what, value in now.items():
            if _is_same(self._before[what], value):
                continue
            if what == _THREAD and not _has_more_threads(self._before[what]):
                now[what] = self._before[what]
                continue
            self.note(what)
        self._before = now

    def _holds_gpu(self) -> bool:
        """Whether CUDA was begun with here: no fork could use it."""
        torch = _whole("torch")
        if torch is not None and torch.cuda.is_initialized():
            return True
        open_now = _open_descriptors()
        new = {one for one in open_now - self._open if _is_gpu(one)}
        self._gpus = (self._gpus & open_now) | new
        self._open = open_now
        return bool(self._gpus)

    def _state(self) -> dict[str, Any]:
        """What importing should leave alone, by what to say where it did not."""
        changed = [n for n, value in self._known.items() if os.environ.get(n) != value]
        return {
            _THREAD: _threads(),
            "it starts a process": _has_children(),
            "it opens the GPU": self._holds_gpu(),
            "it handles a signal": [*map(_signal.getsignal, _SIGNALS)],
            "it writes to standard output": self._output(),
            "it draws or seeds random numbers": _random_states(),
            "it changes the working directory": os.getcwd(),
            "it sets up logging": (len(logging.root.handlers), logging.root.level),
            "it changes variables of the environment": changed,
        }


# -----------------------------------------------------------------------------
# What is looked at.

_THREAD = "it starts a thread"

_SIGNALS = [int(number) for number in signal.valid_signals()]
"""Asked of the C module, which makes no enumeration members: it is asked after each import."""


def _threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def _has_more_threads(before: int) -> bool:
    """Whether there are more threads than before a module, also after a fork.

    Some libraries (OpenBLAS) have a handler that ends theirs before each fork, to have them again
    when they are needed: they bear it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads, in Python
        child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    deadline = time.monotonic() + _THREADS_END_S
    while (more := _threads() > before) and time.monotonic() < deadline:
        time.sleep(0.01)
    return more


def _has_children() -> bool:
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return True
    return False


def _whole(name: str) -> Any:
    """A module; ``None`` before it has been imported to its end, when it is not to be used."""
    module = sys.modules.get(name)
    under_way = getattr(getattr(module, "__spec__", None), "_initializing", False)
    return None if under_way else module


def _open_descriptors() -> frozenset[str]:
    with contextlib.suppress(OSError):
        return frozenset(os.listdir("/proc/self/fd"))
    return frozenset()


def _is_gpu(descriptor: str) -> bool:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith("/dev/nvidia-uvm")
    return False


def _random_states() -> dict[str, Any]:
    """By generator; there are more once their libraries have been imported."""
    states: dict[str, Any] = {"random": hash(random.getstate())}
    drawn, torch = _whole("numpy.random"), _whole("torch")
    if drawn is not None:
        states["numpy"] = drawn.get_state()[1].tobytes()
        if torch is not None:
            states["torch"] = torch.get_rng_state().numpy().tobytes()
    return states


def _is_same(before: Any, now: Any) -> bool:
    if isinstance(before, dict):
        return all(before[name] == now[name] for name in before.keys() & now.keys())
    return bool(before == now)


@contextlib.contextmanager
def _output_aside() -> Iterator[Callable[[], int]]:
    """Send standard output to nowhere; gives what tells how many bytes were written."""
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)

        def written() -> int:
            sys.stdout.flush()
            return os.fstat(1).st_size

        try:
            yield written
        finally:
            sys.stdout.flush()
            os.dup2(kept, 1)
            os.close(kept)


@contextlib.contextmanager
def _loaders_around(
    around: Callable[[str, str], contextlib.AbstractContextManager[None]],
) -> Iterator[None]:
    """Have each execution of a module's body be inside of ``around``, told name and file."""
    kinds: list[Any] = [SourceFileLoader, SourcelessFileLoader, ExtensionFileLoader]

    def within(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(loader: Any, what: Any) -> Any:
            spec = what if hasattr(what, "submodule_search_locations") else what.__spec__
            with around(spec.name, spec.origin or ""):
                return original(loader, what)

        return call

    wrapped = [(kind, "exec_module") for kind in kinds] + [(ExtensionFileLoader, "create_module")]
    own = [(kind, name, vars(kind).get(name)) for kind, name in wrapped]
    for kind, name, _ in own:
        setattr(kind, name, within(getattr(kind, name)))
    try:
        yield
    finally:
        for kind, name, before in own:
            if before is None:
                delattr(kind, name)
            else:
                setattr(kind, name, before)


@contextlib.contextmanager
def _imports_seen(needs: Callable[[str, str], None]) -> Iterator[None]:
    """Have ``needs`` told of each import statement: who imports, and what."""
    original: Any = builtins.__import__

    def importing(
        name: str,
        globals: Any = None,
        locals: Any = None,
        fromlist: Any = (),
        level: int = 0,
    ) -> Any:
        importer = (globals or {}).get("__name__")
        if importer:
            whole = name
            if level:
                package = (globals or {}).get("__package__") or ""
                with contextlib.suppress(ImportError):
                    whole = importlib.util.resolve_name("." * level + name, package)
            needs(importer, whole)
            for word in fromlist or ():
                needs(importer, f"{whole}.{word}")
        return original(name, globals, locals, fromlist, level)

    builtins.__import__ = importing
    try:
        yield
    finally:
        builtins.__import__ = original


@contextlib.contextmanager
def _variables_seen(names: Sequence[str], note: Callable[[str], None]) -> Iterator[None]:
    """Have ``note`` told where one of these variables is asked for."""
    environ: Any = type(os.environ)
    original = environ.__getitem__

    def asked(variables: Any, name: str) -> str:
        if name in names:
            note(f"it reads {name}")
        value: str = original(variables, name)
        return value

    environ.__getitem__ = asked
    try:
        yield
    finally:
        environ.__getitem__ = original
