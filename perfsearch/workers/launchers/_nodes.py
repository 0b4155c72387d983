"""The other nodes of a search, as its controller has them: joined, told what to start, watched."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfsearch.core.errors import BadInputError, NodesGoneError
from perfsearch.core.hardware import Gpu, Hardware
from perfsearch.core.option import option
from perfsearch.workers.failures import ProcessEnd
from perfsearch.workers.launchers import _agreement
from perfsearch.workers.launchers._addresses import (
    interface_variables,
    interface_with,
    listen_at,
)
from perfsearch.workers.launchers._gate import (
    HANDSHAKE_S,
    SECRET_VARIABLE,
    SILENT_S,
    Gate,
    secret_from,
)
from perfsearch.workers.launchers.base import Launch, Launcher, NodeReport, Process, Say
from perfsearch.workers.launchers.local import Fork
from perfsearch.workers.messages import (
    PLACE_FILE,
    STORE_PORT_FILE,
    TOKEN_VARIABLE,
    Channel,
    ChannelClosed,
    Message,
    RankError,
)
from perfsearch.workers.preload import LauncherGone, Preloaded

STORE = "store"
"""The place of a group at which its ranks meet."""

JOIN = "perfsearch.workers.join"
"""The module behind ``perfsearch join``."""

AGAIN_S = 10.0
"""Least time between two starts of what has a node join."""

_POLL_S = 0.05
_ENDING_S = 20.0
_LOSS_CODE = 1
_WINDOW_S = 5.0
"""Longest wait for a node's system metrics; a trial goes without them then."""


class Node:
    """One other node that has joined.

    Args:
        number: its number; the controller's is 0.
        host: what it is called.
        hello: what it told of itself.
        channel: to it.
        changed: told whenever something was heard of it, or nothing will be any more.

    Attributes:
        lost: why nothing is to be heard of it any more; empty while it is there.

    """

    def __init__(
        self,
        number: int,
        host: str,
        hello: Message,
        channel: Channel,
        changed: threading.Condition,
    ) -> None:
        self.number, self.host, self.hello = number, host, hello
        self.lost = ""
        self._channel, self._changed = channel, changed
        self._heard: dict[tuple[str, str], Message] = {}

    @property
    def gpus(self) -> frozenset[str]:
        """UUIDs of its GPUs."""
        return frozenset(str(gpu[0]) for gpu in self.hello["gpus"])

    def listen(self) -> None:
        """Take what it says, until it is gone."""
        try:
            while True:
                message = self._channel.receive()
                with self._changed:
                    self._heard[message["event"], message["group"]] = message
                    self._changed.notify_all()
        except (ChannelClosed, KeyError):
            self.give_up("its connection is lost")

    def give_up(self, why: str) -> None:
        """Count it as gone."""
        self._channel.close()
        with self._changed:
            self.lost = self.lost or f"node {self.host} is gone: {why}"
            self._changed.notify_all()

    def send(self, message: Message) -> None:
        """Say something to it; it is gone where it cannot be reached."""
        try:
            self._channel.send(message)
        except ChannelClosed:
            self.give_up("its connection is lost")

    def heard(self, event: str, group: str) -> Message | None:
        """What it said of a group, if it did."""
        return self._heard.get((event, group))

    def ask(self, message: Message, event: str, timeout_s: float) -> Message | None:
        """Ask something and wait for the answer; ``None`` where it is gone, or says nothing."""
        with self._changed:
            self._heard.pop((event, message["group"]), None)
        self.send(message)
        self.await_word(event, message["group"], timeout_s)
        return self.heard(event, message["group"])

    def await_word(self, event: str, group: str, timeout_s: float) -> None:
        """Wait until it has said something of a group, or is gone."""
        with self._changed:
            self._changed.wait_for(lambda: self.lost or (event, group) in self._heard, timeout_s)

    def forget(self, group: str) -> None:
        """Drop what it said of a group that is over."""
        with self._changed:
            self._heard = {key: m for key, m in self._heard.items() if key[1] != group}


@dataclass
class Starter:
    """A command that has another node join, such as by ``ssh``; run again where it has ended.

    Attributes:
        words: the command.
        says: what it reads: the secret, where that is not among its variables.
        environment: variables beside those of this process.

    """

    words: Sequence[str]
    says: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None
    _not_before: float = 0.0

    def run(self) -> None:
        """Start it, unless it runs, or has ended just now."""
        runs = self._process is not None and self._process.poll() is None
        if runs or time.monotonic() < self._not_before:
            return
        self._not_before = time.monotonic() + AGAIN_S
        self._process = subprocess.Popen(
            list(self.words),
            stdin=subprocess.PIPE,
            stdout=2,  # this command's own output has the search's result
            env={**os.environ, **self.environment},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as stream:
            stream.write(f"{self.says}\n".encode())

    def end(self) -> None:
        """Wait a moment for its end, then end it."""
        if self._process is None:
            return
        try:
            self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()


class SeveralNodes(Launcher):
    """Starts ranks on this node and on others, which have joined.

    Each other node runs one process, ``perfsearch join``. It holds what groups are forked from
    there, carries what its ranks say to this node, and ends them when this node is gone.
    """

    several_nodes = True

    @dataclass(frozen=True)
    class Options(Launcher.Options):
        """Options of every launcher of several nodes, as keys ``launcher.*``.

        Attributes:
            endpoint: ``HOST:PORT`` of this node, at which the others reach it; ``null``: its own
                address, any port.
            interface: network interface of the ranks' sockets; ``null``: the one that leads to the
                endpoint.
            wait_s: longest wait for a node that is missing, in seconds.

        """

        endpoint: str | None = None
        interface: str | None = None
        wait_s: float = option(600.0, low=0.0)

    def __init__(self, options: Any, nnodes: int) -> None:
        super().__init__(options, nnodes)
        self.changed = threading.Condition()
        self.members: dict[int, Node] = {}
        self.directories: dict[str, Path] = {}
        self.secret = ""
        self.endpoint = ""
        self._gate: Gate | None = None
        self._hardware: Hardware | None = None
        self._versions: dict[str, str] = {}
        self._say: Say = lambda text: None
        self._starters: list[Starter] = []
        self._strangers: set[str] = set()
        self._interface = ""
        self._sample_s = 0.0

    # -- what a kind of launcher has of its own

    def starters(self) -> list[Starter]:
        """Commands that have the other nodes join; empty where the user does."""
        return []

    # -- from the beginning of a search to its end

    def open(self, hardware: Hardware, say: Say) -> None:
        """See ``Launcher``."""
        if self.nnodes == 1:
            return
        try:
            self.secret = secret_from(os.environ)
        except ValueError as error:
            raise BadInputError(str(error)) from error
        self._hardware, self._say = hardware, say
        self._versions = _agreement.versions(bool(hardware.gpus))
        listener = listen_at(self.options.endpoint, self.options.interface)
        address, port = listener.getsockname()[:2]
        host = (self.options.endpoint or "").rpartition(":")[0] or address
        self.endpoint = f"{host}:{port}"
        self._interface = self.options.interface or interface_with(address)
        self._gate = Gate(listener, self.secret, self._admit, self._open_place, self._stranger)
        self._starters = self.starters()
        self.await_all()

    def close(self) -> None:
        """See ``Launcher``."""
        for node in self.members.values():
            if not node.lost:
                node.send({"op": "close", "group": ""})
        for starter in self._starters:
            starter.end()
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.close()
        self.members.clear()

    def sample(self, interval_s: float) -> None:
        """See ``Launcher``."""
        self._sample_s = interval_s  # of nodes that come later, too
        for node in self.members.values():
            if not node.lost:
                node.send({"op": "sample", "group": "", "interval_s": interval_s})

    def windows(self, begin_monotonic: float, end_monotonic: float) -> list[dict[str, float]]:
        """See ``Launcher``. Nodes whose clocks differ are told how long ago it was."""
        found = []
        for node in self.members.values():
            now = time.monotonic()
            ago = {"begin_s": now - begin_monotonic, "end_s": now - end_monotonic}
            asked = {"op": "window", "group": "", **ago}
            answer = None if node.lost else node.ask(asked, "window", _WINDOW_S)
            if answer is not None:
                found.append({str(k): float(v) for k, v in answer["means"].items()})
        return found

    def launch(
        self, preloaded: Preloaded, arguments: Callable[[Path], list[str]] | None = None
    ) -> Launch:
        """See ``Launcher``."""
        fork = Fork(preloaded, arguments)
        return fork if self.nnodes == 1 else Spread(fork, self, self.nnodes)

    def await_all(self) -> None:
        """Wait until every node is there.

        Raises:
            NodesGoneError: one did not come in time.

        """
        deadline, told = time.monotonic() + self.options.wait_s, False
        while missing := self.missing():
            if not told:
                told = True
                gone = [node.lost for node in self.members.values() if node.lost]
                self._say("; ".join([*gone, f"waiting for {_count(len(missing))} more"]))
                if not self._starters:
                    command = f"{SECRET_VARIABLE}={self.secret} perfsearch join {self.endpoint}"
                    self._say(f"run this there, unless it runs already:\n  {command}")
            for starter in self._starters:
                starter.run()
            if time.monotonic() >= deadline:
                names = [self.members[n].host for n in missing if n in self.members]
                who = f"node {', '.join(names)}" if names else _count(len(missing))
                raise NodesGoneError(
                    f"{who} did not join within {self.options.wait_s:g} s (launcher.wait_s)"
                )
            with self.changed:
                self.changed.wait(min(1.0, max(0.0, deadline - time.monotonic())))

    def missing(self) -> list[int]:
        """Numbers of the nodes that are not there."""
        here = {number for number, node in self.members.items() if not node.lost}
        return [number for number in range(1, self.nnodes) if number not in here]

    def variables(self) -> dict[str, str]:
        """By which interface the ranks of this node talk to others."""
        return interface_variables(self._interface, bool(self.options.interface))

    # -- who comes

    def _stranger(self, address: str) -> None:
        if address not in self._strangers:
            self._strangers.add(address)
            self._say(f"warning: {address} was turned away: it does not know the search's secret")

    def _admit(self, connection: socket.socket) -> None:
        """Take in a node, or tell it why not."""
        address = str(connection.getpeername()[0])
        channel = Channel(connection)
        try:
            hello = channel.receive(HANDSHAKE_S)
            named = f"{hello['name']} ({address})"
            with self.changed:
                number, reason = self._seat(hello)
                node = Node(number, named, hello, channel, self.changed)
                if not reason:
                    before = self.members.get(number)
                    self.members[number] = node
            if reason:
                self._say(f"warning: node {named} was refused: {reason}")
                channel.send({"op": "refuse", "reason": reason})
                channel.close()
                return
            if before is not None and not before.lost:
                before.give_up("it has joined anew")
            channel.send(
                {
                    "op": "welcome",
                    "node": number,
                    "nnodes": self.nnodes,
                    "host": named,
                    "interface": self.options.interface or "",
                    "wait_s": self.options.wait_s,
                    "sample_s": self._sample_s,
                }
            )
        except (OSError, TimeoutError, KeyError, TypeError):
            channel.close()
            return
        self._say(f"node {named} has joined")
        with self.changed:
            self.changed.notify_all()
        node.listen()

    def _seat(self, hello: Message) -> tuple[int, str]:
        """The number that a node gets, or why it gets none."""
        assert self._hardware is not None
        differing = _agreement.differences(hello, self._versions, os.environ)
        if differing:
            return 0, f"{'; '.join(differing)}. Have it the same on each node"
        gpus = [Gpu(*gpu) for gpu in hello["gpus"]]
        if self._hardware.gpus and (why := _agreement.too_few_gpus(gpus, self._hardware.nproc)):
            return 0, why
        for number, node in self.members.items():
            if node.hello["instance"] == hello["instance"]:
                return number, ""
        taken = {gpu.uuid: "the search's own node" for gpu in self._hardware.gpus}
        for node in self.members.values():
            if not node.lost:
                taken.update(dict.fromkeys(node.gpus, f"node {node.host}"))
        twice = next((gpu.uuid for gpu in gpus if gpu.uuid in taken), "")
        if twice and self._hardware.gpus:
            return 0, f"GPU {twice} is there already, with {taken[twice]}: a node joins once"
        free = self.missing()
        if not free:
            names = ", ".join(node.host for node in self.members.values())
            return 0, f"nnodes={self.nnodes}, and every node is there already: {names}"
        return free[0], ""

    def _open_place(self, group: str, place: str) -> socket.socket | None:
        """A connection to what stands behind the gate; see ``Gate``."""
        directory = self.directories.get(group)
        if directory is None:
            raise LookupError(group)
        try:
            if place == STORE:
                port = int((directory / STORE_PORT_FILE).read_text())
                return socket.create_connection(("127.0.0.1", port), HANDSHAKE_S)
            if place != Path(place).name:
                raise LookupError(place)
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.connect(str(directory / place))
            return connection
        except FileNotFoundError:
            return None


def _count(missing: int) -> str:
    return f"{missing} node" + "s" * (missing > 1)


# -----------------------------------------------------------------------------
# A group over several nodes.


@dataclass
class Spread(Launch):
    """A group with a share on each node: a fork on this one, and another by each that has joined.

    Attributes:
        own: how it is started on this node.
        launcher: the nodes.

    """

    own: Fork
    launcher: SeveralNodes
    nnodes: int
    _group: str = ""
    _nodes: list[Node] = field(default_factory=list)

    @property
    def token(self) -> str:
        """See ``Launch``."""
        return self.own.token

    @property
    def outliving(self) -> Sequence[int]:
        """See ``Launch``."""
        return self.own.outliving

    def record(self, directory: Path) -> None:
        """See ``Launch``."""
        self.own.record(directory)

    def forget(self) -> None:
        """See ``Launch``."""
        self.own.forget()

    def await_nodes(self) -> None:
        """See ``Launch``."""
        self.launcher.await_all()

    def log_to(self, logs: Path) -> None:
        """See ``Launch``."""
        for node in self.launcher.members.values():
            if not node.lost:
                node.send({"op": "logs", "group": "", "directory": str(logs)})

    def start(
        self, directory: Path, environment: Mapping[str, str], log: Path, limit_s: float
    ) -> Process:
        """See ``Launch``."""
        self._group = directory.name
        self.launcher.directories[self._group] = directory
        self._nodes = list(self.launcher.members.values())
        if lost := "; ".join(node.lost for node in self._nodes if node.lost):
            raise LauncherGone(lost)
        message = self._order(directory, environment, log, limit_s)
        for node in self._nodes:
            node.send(message)
        whole = {**environment, **self.launcher.variables()}
        own = self.own.start(directory, whole, log, limit_s)
        return SpreadProcess(own, self._nodes, self._group)

    def _order(
        self, directory: Path, environment: Mapping[str, str], log: Path, limit_s: float
    ) -> Message:
        """What the other nodes are told of the start."""
        preloaded = self.own.preloaded
        arguments = self.own.arguments
        entries = [path for path in directory.iterdir() if path.name != PLACE_FILE]
        return {
            "op": "start",
            "group": self._group,
            "directory": str(directory),
            "working_directory": str(preloaded.directory or Path.cwd()),
            "module": preloaded.module,
            "python": preloaded.python,
            "preloaded": _own_settings(preloaded.environment),
            "environment": _own_settings(environment),
            "arguments": None if arguments is None else arguments(directory),
            "files": {p.name: p.read_text() for p in entries if p.suffix == ".json"},
            "sockets": [path.name for path in entries if path.is_socket()],
            "log": str(log),
            "limit_s": limit_s,
        }

    def reports(self, logs: Path, world_size: int, stacks: bool) -> Sequence[NodeReport]:
        """See ``Launch``."""
        message = {
            "op": "report",
            "group": self._group,
            "logs": str(logs),
            "world_size": world_size,
            "stacks": stacks,
        }
        return [self._report(node, message) for node in self._nodes]

    @staticmethod
    def _report(node: Node, message: Message) -> NodeReport:
        answer = None if node.lost else node.ask(message, "report", SILENT_S + 2.0)
        if answer is None:
            return NodeReport(lost=node.lost or f"node {node.host} does not answer")
        error = answer["launcher_error"]
        return NodeReport(
            errors=[RankError(**one) for one in answer["errors"]],
            ends=[ProcessEnd(**one) for one in answer["ends"]],
            launcher_error=f"node {node.host}: {error}" if error else "",
            log_tails={int(rank): tail for rank, tail in answer["log_tails"].items()},
            places={int(rank): place for rank, place in answer["places"].items()},
            oom_kills=int(answer["oom_kills"]),
            memory=str(answer["memory"]),
        )

    def end_elsewhere(self) -> None:
        """See ``Launch``."""
        deadline = time.monotonic() + _ENDING_S
        for node in self._nodes:
            if not node.lost:
                node.send({"op": "end", "group": self._group})
        for node in self._nodes:
            node.await_word("over", self._group, max(0.0, deadline - time.monotonic()))
            if not node.lost and not node.heard("over", self._group):
                node.give_up("it does not end its ranks")
            node.forget(self._group)
        self.launcher.directories.pop(self._group, None)
        self._nodes = []


class SpreadProcess:
    """The first processes of a group on all nodes, as one.

    Args:
        own: that of this node.
        nodes: the others.
        group: the group's name.

    """

    def __init__(self, own: Process, nodes: Sequence[Node], group: str) -> None:
        self._own, self._nodes, self._group = own, nodes, group

    def poll(self) -> int | None:
        """The first code that is not 0, 0 once all have ended so, ``None`` while they run."""
        codes = [self._own.poll(), *map(self._code, self._nodes)]
        failed = [code for code in codes if code]
        if failed:
            return failed[0]
        return None if None in codes else 0

    def _code(self, node: Node) -> int | None:
        if node.lost:
            return _LOSS_CODE
        ended = node.heard("ended", self._group)
        return None if ended is None else int(ended["code"])

    def wait(self, timeout: float | None = None, /) -> int:
        """See ``Process``."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("launchers", timeout or 0.0)
            time.sleep(_POLL_S)
        return code


def _own_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that each node must be given: what a search sets, and what all must have alike."""
    set_here = {
        name: value
        for name, value in environment.items()
        if os.environ.get(name) != value and name != TOKEN_VARIABLE
    }
    return {**_agreement.shared_variables(environment), **set_here}
