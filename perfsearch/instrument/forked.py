"""A rank of a script as a fork of a process that has imported what the script imports.

It begins as Python begins one: with its environment, its signals and no open files but the usual;
and it ends as Python ends one. No torch here.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from perfsearch.instrument.imports import NVML_CHECK

_PLAIN = subprocess.Popen


@dataclass(frozen=True)
class Ground:
    """What every fork begins with, noted before anything is forked.

    Attributes:
        handlers: of signals.
        files: descriptors of what imported modules have opened.

    """

    handlers: Mapping[int, Any]
    files: frozenset[int]

    @classmethod
    def here(cls) -> Ground:
        """Those of the process that it is called in."""
        handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        return cls({n: h for n, h in handlers.items() if h is not None}, _open())

    def take(self) -> None:
        """Begin with it, in a fork.

        Other files are let go, and their descriptors lead nowhere: an object that is left of the
        launcher may still close its own, which must not be one that the script has opened.
        """
        for number, handler in self.handlers.items():
            if signal.getsignal(number) != handler:
                signal.signal(number, handler)
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor in _open() - self.files - {0, 1, 2, nowhere}:
            with contextlib.suppress(OSError):
                os.fstat(descriptor)  # the one that listed them is closed
                os.dup2(nowhere, descriptor, inheritable=False)
        os.close(nowhere)


def _open() -> frozenset[int]:
    try:
        return frozenset(map(int, os.listdir("/proc/self/fd")))
    except OSError:
        return frozenset()


class ForkedProcess(subprocess.Popen[bytes]):
    """``subprocess.Popen`` of Python and our entry, which forks instead of starting Python.

    Everything else of it, such as waiting and killing, is as ever. Another command is started.
    """

    entry: Callable[[], int]
    """What the fork runs; its exit code."""

    ground: Ground
    """What it begins with."""

    words: Sequence[str]
    """The command up to the arguments of our entry; what begins so is forked."""

    unset: Sequence[str] = ()
    """Variables of the launcher that its ranks do not have."""

    def __init__(self, args: Any, *more: Any, **given: Any) -> None:
        self._given = given
        super().__init__(args, *more, **given)

    def _execute_child(self, *prepared: Any) -> None:
        command = list(self.args) if isinstance(self.args, list | tuple) else []
        if command[: len(self.words)] != list(self.words):
            getattr(super(), "_execute_child")(*prepared)  # noqa: B009 - which stubs have not
            return
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._become([str(word) for word in command[len(self.words) :]])
        self._child_created = True

    def _become(self, arguments: list[str]) -> NoReturn:
        """In the fork: be the rank; never returns."""
        code = 1
        try:
            if self._given.get("start_new_session"):
                os.setsid()
            for target, file in ((1, self._given.get("stdout")), (2, self._given.get("stderr"))):
                if file is not None:
                    os.dup2(file if isinstance(file, int) else file.fileno(), target)
            self.ground.take()
            subprocess.Popen = _PLAIN  # type: ignore[misc]
            environ = self._given.get("env") or os.environ
            _be_environment({n: v for n, v in environ.items() if n not in self.unset})
            sys.argv = [sys.argv[0], *arguments]
            code = _code_of(self.entry)
        finally:
            _end(code)


def _be_environment(environ: Mapping[str, str]) -> None:
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    for name, value in environ.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _code_of(entry: Callable[[], int]) -> int:
    """The exit code that Python would end with."""
    try:
        return entry()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1


def _end(code: int) -> NoReturn:
    """End as Python does: threads are waited for, exit functions called, files written out.

    Only modules are not taken down, which takes long and frees nothing.
    """
    try:
        with contextlib.suppress(BaseException):
            getattr(threading, "_shutdown", lambda: None)()
        with contextlib.suppress(BaseException):
            getattr(atexit, "_run_exitfuncs", lambda: None)()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                stream.flush()
    finally:
        os._exit(code & 0xFF)


def write_at_once() -> None:
    """Write what is printed at once, as ``python -u`` does, which ranks are started with."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, name)
        raw = open(descriptor, "wb", buffering=0, closefd=False)  # noqa: SIM115 - as long as Python
        new = io.TextIOWrapper(raw, old.encoding, old.errors, write_through=True)
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def have_ranks_forked(entry: Callable[[], int], ground: Ground, words: Sequence[str]) -> None:
    """Have ranks be forks from here on: in a launcher, which starts nothing else.

    Args:
        entry: what they run.
        ground: what they begin with.
        words: how the command of one begins.

    """
    if NVML_CHECK not in os.environ:
        os.environ[NVML_CHECK] = "1"
        ForkedProcess.unset = (NVML_CHECK,)
    ForkedProcess.entry = staticmethod(entry)
    ForkedProcess.ground, ForkedProcess.words = ground, tuple(words)
    subprocess.Popen = ForkedProcess  # type: ignore[misc, assignment]
    for name, module in list(sys.modules.items()):
        if name.endswith(".subprocess_handler.subprocess_handler") and hasattr(module, "Popen"):
            setattr(module, "Popen", ForkedProcess)  # noqa: B010 - by which torch's agent has it
