"""The Unix socket by which an open session is asked for measurements, one JSON line each way.

It stands in the session's run directory. Nobody but the same user gets in: its mode is 0600, and
the kernel says who has called.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from perfsearch.core.errors import BadInputError
from perfsearch.workers.messages import LONGEST_SOCKET

SOCKET = "session.sock"
"""Its name in a run directory."""

DIRECTORY = Path("outputs") / "session"
"""Where a session's files go by default."""

_LONGEST_REQUEST = 65536
_REQUEST_S = 5.0
"""How long a caller may take to say what it wants: nobody else is served meanwhile."""


class NoSessionError(BadInputError):
    """No session is open there."""


class SessionEndedError(Exception):
    """The session ended before it had answered."""


class SessionSocket:
    """Where a session waits for callers.

    Args:
        run_dir: the session's, whose lock it holds: a socket that is there was left by a kill.

    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / SOCKET
        self.path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            with _short(self.path) as path:
                self._socket.bind(path)
        finally:
            os.umask(before)
        self._socket.listen()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()
        self.path.unlink(missing_ok=True)

    def wait(self, seconds: float) -> Caller | None:
        """The next caller with a request; ``None``: there was none for so long."""
        deadline = time.monotonic() + seconds
        while True:
            self._socket.settimeout(max(0.0, deadline - time.monotonic()))
            try:
                connection, _ = self._socket.accept()
            except (TimeoutError, BlockingIOError):
                return None
            if _is_ours(connection):
                with suppress(OSError, ValueError):
                    return Caller(connection)
            connection.close()


class Caller:
    """Somebody who asked for something.

    Attributes:
        request: what for.

    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        try:
            self.request: dict[str, Any] = json.loads(_line(connection, _REQUEST_S))
        except RecursionError as error:
            raise ValueError("a request is not nested so deeply") from error
        if not isinstance(self.request, dict):
            raise ValueError("a request is an object")

    def answer(self, reply: Mapping[str, Any]) -> None:
        """Tell the caller, who may have gone away, and hang up."""
        with self._connection as connection, suppress(OSError):
            connection.settimeout(_REQUEST_S)
            connection.sendall(json.dumps(reply).encode() + b"\n")


def is_open(run_dir: Path) -> bool:
    """Whether a session can be asked there."""
    try:
        _connected(run_dir).close()
    except NoSessionError:
        return False
    return True


def ask(run_dir: Path, request: Mapping[str, Any]) -> dict[str, Any]:
    """What the session in ``run_dir`` answers, however long it takes.

    Raises:
        NoSessionError: there is none; nothing was measured.
        SessionEndedError: it ended before it had answered.

    """
    with _connected(run_dir) as connection:
        try:
            connection.sendall(json.dumps(request).encode() + b"\n")
            reply: dict[str, Any] = json.loads(_line(connection, None))
        except (OSError, ValueError) as error:
            raise SessionEndedError(
                f"{run_dir}: the session ended before it had answered. Its journal has what was "
                "measured; open another: perfsearch session"
            ) from error
        return reply


def _connected(run_dir: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short(run_dir / SOCKET) as path:
            connection.connect(path)
    except OSError as error:
        connection.close()
        raise NoSessionError(
            f"{run_dir}: no session is open there. Open one: perfsearch session"
        ) from error
    return connection


def _line(connection: socket.socket, seconds: float | None) -> bytes:
    """The first line that comes.

    Raises:
        OSError: it takes too long, or the other side is gone.
        ValueError: it is too long, or torn.

    """
    deadline = None if seconds is None else time.monotonic() + seconds
    received = b""
    while not received.endswith(b"\n"):
        if deadline is not None:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            if len(received) > _LONGEST_REQUEST:
                raise ValueError("a request is one short line")
        part = connection.recv(_LONGEST_REQUEST)
        if not part:
            raise ValueError("the line was torn")
        received += part
    return received


def _is_ours(connection: socket.socket) -> bool:
    """Whether the same user called; where the kernel does not say, the socket's mode has to do."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    size = struct.calcsize("3i")
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, user, _ = struct.unpack("3i", found)
    return bool(user == os.geteuid())


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """The socket's path, or another one to it where it has more characters than one may have."""
    if len(os.fsencode(path)) <= LONGEST_SOCKET:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
