"""Connections between the nodes of a search, which strangers cannot make.

One socket listens on the controller's node, at one address. Whoever connects proves that it knows
the search's secret, and is proved the same, before anything else is said. What stands behind are
the controller itself, the stores at which ranks meet, and the sockets on which it hears scripts;
these listen on loopback or in a directory of the user's own. On each other node ``Doors`` takes
what connects to such a place there through the gate. Bytes are not encrypted.

``multiprocessing.connection`` has such a challenge too; its listener deals with one caller at a
time, and waits for ever for one that says nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

SECRET_VARIABLE = "PERFSEARCH_SECRET"
"""Environment variable that holds the secret of a search on its other nodes."""

SHORTEST_SECRET = 16

HANDSHAKE_S = 10.0
"""How long a caller may take to say who it is."""

SILENT_S = 10.0
"""Seconds without a sign of life after which a node counts as gone."""

_NONCE = 32
_CHUNK = 1 << 16
_LONGEST_LINE = 4096
_LOOK_S = 0.05
_GREETING = b"perfsearch 1\n"


class StrangerError(ConnectionError):
    """The other end does not know the secret."""


def secret_from(environ: dict[str, str] | os._Environ[str]) -> str:
    """The secret that the user has set, or a new one.

    Raises:
        ValueError: it is too short.

    """
    given = environ.get(SECRET_VARIABLE, "")
    if given and len(given) < SHORTEST_SECRET:
        raise ValueError(
            f"{SECRET_VARIABLE} has {len(given)} characters: allowed are {SHORTEST_SECRET} or "
            "more. Leave it unset for one that is drawn"
        )
    return given or secrets.token_hex(16)


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel find out within ``SILENT_S`` that the other end is gone; send without delay.

    A host that lost its power or its network closes no connection.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SILENT_S))


# -----------------------------------------------------------------------------
# The handshake: each end sends a number that it has drawn, and the other's under the secret.


async def _prove(connection: socket.socket, secret: str, calling: bool) -> None:
    """Make sure that both ends know the secret; the caller shows it first.

    Raises:
        StrangerError: the other end does not.

    """
    own, roles = secrets.token_bytes(_NONCE), (b"caller", b"gate")
    if calling:
        if await _read(connection, len(_GREETING)) != _GREETING:
            raise StrangerError("no perfsearch of this version listens there")
        theirs = await _read(connection, _NONCE)
        await _send(connection, own + _proof(secret, roles[0], theirs + own))
        try:
            answer = await _read(connection, _NONCE)
        except OSError as error:
            raise StrangerError("it takes another secret") from error
        if not hmac.compare_digest(answer, _proof(secret, roles[1], own + theirs)):
            raise StrangerError("it does not know the secret")
        return
    await _send(connection, _GREETING + own)
    theirs = await _read(connection, _NONCE)
    answer = await _read(connection, _NONCE)
    if not hmac.compare_digest(answer, _proof(secret, roles[0], own + theirs)):
        raise StrangerError("it does not know the secret")
    await _send(connection, _proof(secret, roles[1], theirs + own))


def _proof(secret: str, role: bytes, numbers: bytes) -> bytes:
    return hmac.new(secret.encode(), role + numbers, hashlib.sha256).digest()


async def _read(connection: socket.socket, count: int) -> bytes:
    """Exactly so many bytes."""
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < count:
        more = await loop.sock_recv(connection, count - len(data))
        if not more:
            raise StrangerError("it closed the connection")
        data += more
    return data


async def _send(connection: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, data)


async def _carry(one: socket.socket, other: socket.socket) -> None:
    """Take bytes from each to the other until both have ended."""

    async def way(source: socket.socket, target: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(source, _CHUNK):
                await loop.sock_sendall(target, data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    with contextlib.closing(one), contextlib.closing(other):
        await asyncio.gather(way(one, other), way(other, one))


# -----------------------------------------------------------------------------
# The two ends of what is carried.


class _Carrier:
    """An event loop in a thread of its own, which accepts connections and carries bytes."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gate", daemon=True)
        self._thread.start()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _serve(
        self, listener: socket.socket, handle: Callable[[socket.socket], Awaitable[None]]
    ) -> None:
        listener.setblocking(False)
        tasks = set()
        with contextlib.closing(listener), contextlib.suppress(OSError):
            while True:
                connection, _ = await self._loop.sock_accept(listener)
                connection.setblocking(False)
                task = self._loop.create_task(self._guarded(handle, connection))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

    async def _guarded(
        self, handle: Callable[[socket.socket], Awaitable[None]], connection: socket.socket
    ) -> None:
        try:
            await handle(connection)
        except (OSError, TimeoutError, ValueError, LookupError, TypeError):
            connection.close()

    def close(self) -> None:
        """Listen no more, and break off what is carried."""
        if self._loop.is_closed():
            return
        self._run(_cancel_all())
        self._thread.join(HANDSHAKE_S)
        if not self._loop.is_running():
            self._loop.close()


async def _cancel_all() -> None:
    loop, me = asyncio.get_running_loop(), asyncio.current_task()
    others = [task for task in asyncio.all_tasks() if task is not me]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    loop.stop()


class Gate(_Carrier):
    """The controller's end.

    Args:
        listener: at which other nodes arrive.
        secret: of the search.
        admit: takes the connection of a node that wants to join, in a thread of its own.
        open_place: gives a connection to a place of a group, by both names; ``None`` as long as it
            is not there; it raises ``LookupError`` where it never will be.
        refuse: told the address of a stranger.

    """

    def __init__(
        self,
        listener: socket.socket,
        secret: str,
        admit: Callable[[socket.socket], None],
        open_place: Callable[[str, str], socket.socket | None],
        refuse: Callable[[str], None],
    ) -> None:
        super().__init__()
        self._secret, self._admit, self._open_place = secret, admit, open_place
        self._refuse = refuse
        self._run(self._serve(listener, self._receive))

    async def _receive(self, connection: socket.socket) -> None:
        keep_alive(connection)
        address = str(connection.getpeername()[0])
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await _prove(connection, self._secret, calling=False)
                asked = json.loads(await self._line(connection))
        except (StrangerError, TimeoutError):
            self._refuse(address)
            raise
        group, place = str(asked["group"]), str(asked["place"])
        if not group:
            connection.setblocking(True)
            threading.Thread(target=self._admit, args=(connection,), daemon=True).start()
            return
        try:
            while (target := self._open_place(group, place)) is None:
                await asyncio.sleep(_LOOK_S)
        except LookupError:
            connection.close()
            return
        target.setblocking(False)
        await _carry(connection, target)

    @staticmethod
    async def _line(connection: socket.socket) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            line += await _read(connection, 1)
            if len(line) > _LONGEST_LINE:
                raise ValueError("a line too long")
        return line


class Doors(_Carrier):
    """The end on another node.

    Args:
        gate: host and port of the gate.
        secret: of the search.

    """

    def __init__(self, gate: tuple[str, int], secret: str) -> None:
        super().__init__()
        self._gate, self._secret = gate, secret

    def call(self) -> socket.socket:
        """A connection to the controller itself.

        Raises:
            OSError: nobody is there.
            StrangerError: it is another search's.

        """
        connection: socket.socket = self._run(self._dial("", "")).result(2 * HANDSHAKE_S)
        connection.setblocking(True)
        return connection

    def open_port(self, group: str, place: str) -> int:
        """A port of this host's loopback that leads to a place of a group."""
        listener = socket.create_server(("127.0.0.1", 0))
        self._run(self._serve(listener, self._through(group, place)))
        return int(listener.getsockname()[1])

    def open_socket(self, path: Path, group: str, place: str) -> None:
        """The same as a Unix socket."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen()
        self._run(self._serve(listener, self._through(group, place)))

    def _through(self, group: str, place: str) -> Callable[[socket.socket], Awaitable[None]]:
        async def handle(connection: socket.socket) -> None:
            await _carry(connection, await self._dial(group, place))

        return handle

    async def _dial(self, group: str, place: str) -> socket.socket:
        async with asyncio.timeout(HANDSHAKE_S):
            family, kind, protocol, _, address = (
                await self._loop.getaddrinfo(*self._gate, type=socket.SOCK_STREAM)
            )[0]
            connection = socket.socket(family, kind, protocol)
            connection.setblocking(False)
            try:
                await self._loop.sock_connect(connection, address)
                keep_alive(connection)
                await _prove(connection, self._secret, calling=True)
                asked = {"group": group, "place": place}
                await _send(connection, json.dumps(asked).encode() + b"\n")
            except BaseException:
                connection.close()
                raise
        return connection
