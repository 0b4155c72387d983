"""JSON lines over a Unix socket that only the same user can reach."""

from __future__ import annotations

import json
import selectors
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MAX_DIRECTORY = 70  # a Unix socket's path holds about 100 characters


def socket_directory() -> Path:
    """A new directory of this user's own, whose path is short enough for sockets in it."""
    base = tempfile.gettempdir()
    base = base if len(base) < _MAX_DIRECTORY else "/tmp"
    return Path(tempfile.mkdtemp(prefix="perfsearch-", dir=base))


class ChannelClosed(ConnectionError):
    """The other end is gone."""


class Channel:
    """One end of the control connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = b""

    @classmethod
    def connect(cls, path: Path) -> Channel:
        """Reach the controller."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(str(path))
        return cls(connection)

    def send(self, message: dict[str, Any]) -> None:
        """Send one message.

        Raises:
            ChannelClosed: the other end is gone.

        """
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait for one message.

        Raises:
            ChannelClosed: the other end is gone.
            TimeoutError: nothing came in time.

        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            if deadline is not None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"no message in {timeout_s:g} s")
                self._socket.settimeout(left)
            else:
                self._socket.settimeout(None)
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                continue
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not data:
                raise ChannelClosed("the connection was closed")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


class Listener:
    """The controller's end before anybody has connected."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        self._socket.listen(1)

    def accept(self, timeout_s: float, alive: Callable[[], bool]) -> Channel:
        """Wait for rank 0.

        Args:
            timeout_s: how long.
            alive: whether it may still come; asked several times a second.

        Raises:
            ChannelClosed: ``alive`` said no.
            TimeoutError: nobody came in time.

        """
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while time.monotonic() < deadline:
                if selector.select(timeout=0.1):
                    return Channel(self._socket.accept()[0])
                if not alive():
                    raise ChannelClosed("the launcher ended before rank 0 was there")
        raise TimeoutError(f"rank 0 was not there after {timeout_s:g} s")

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()
