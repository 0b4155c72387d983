"""What a command needs of the process that it is started in, and leaves of it at its end."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO, cast

from perfsearch.core import shortage
from perfsearch.core.errors import BadInputError, printable
from perfsearch.core.signals import ExitCode


def open_standard_streams() -> None:
    """Put the null device where standard input, output or error was closed (``>&-``).

    Otherwise the next file that is opened, a journal say, would get the number of one of them and
    receive what some library or child process prints.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            os.set_inheritable(null, True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # as Python leaves it where the descriptor was closed
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - as long as the process


def require_current_directory() -> None:
    """See that the current directory is still there: relative paths are meant from it.

    Raises:
        BadInputError: it was removed, or may not be read.

    """
    try:
        os.getcwd()
    except OSError as error:
        raise BadInputError(
            f"the current directory cannot be used ({error.strerror}): was it removed? Change to "
            "one that exists, and give the command again."
        ) from error


def require_supported_python() -> None:
    """See that Hydra runs on this Python.

    Raises:
        BadInputError: it does not.

    """
    if sys.version_info >= (3, 14):
        found = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise BadInputError(
            f"Python {found}: Hydra 1.3 does not run on it. Use Python 3.11, 3.12 or 3.13."
        )


def told(command: str, error: Exception) -> ExitCode | None:
    """Say in one line what ended a command, where that is no bug of ours; its exit code.

    Args:
        command: the words by which it was called, such as ``perfsearch compare``.
        error: what ended it; ``None`` is returned for one that shows its traceback.

    """
    if shortage.remedy(error):
        line = f"{command}: {shortage.told(error)}, then give the same command again."
        code = OUT_OF_RESOURCES
    elif isinstance(error, BadInputError):
        line, code = f"{command}: {error}", ExitCode.BAD_INPUT
    else:
        return None
    with suppress(OSError):  # the terminal is gone as well
        print(printable(line), file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:  # it is the output that there is no room for
        with suppress(OSError):
            write_nowhere()
    return code


OUT_OF_RESOURCES = ExitCode.CIRCUIT_BREAKER
"""Exit code of a command that the machine had no more files, memory, disk or processes for."""


def flush_output() -> None:
    """Write out what is left to be; after a hang-up of the terminal there is nobody to read it.

    Raises:
        BrokenPipeError: whoever read the output has gone away.

    """
    try:
        sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        write_nowhere()


def write_nowhere() -> None:
    """Where the output's reader is gone, keep Python from stumbling over that at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class NamedLines(io.TextIOBase):
    """A stream that begins each line with a name, and writes whole lines at a time.

    Args:
        stream: where they go.
        name: of what writes.

    """

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name, self._begun = stream, name, ""

    def writable(self) -> bool:
        """That it is."""
        return True

    def fileno(self) -> int:
        """That of the stream, for processes that write there themselves."""
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Keep what is no whole line yet."""
        *lines, self._begun = (self._begun + text).split("\n")
        if lines:
            self._stream.write("".join(f"[{self._name}] {line}\n" for line in lines))
            self._stream.flush()
        return len(text)

    def end(self) -> None:
        """Write what is left."""
        if self._begun:
            self.write("\n")


@contextmanager
def named_lines(name: str) -> Iterator[None]:
    """Begin each line with a name, where searches that run at the same time share a terminal."""
    out, errors = sys.stdout, sys.stderr
    named = NamedLines(out, name), NamedLines(errors, name)
    sys.stdout, sys.stderr = cast(tuple[TextIO, TextIO], named)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, errors
        for stream in named:
            stream.end()
