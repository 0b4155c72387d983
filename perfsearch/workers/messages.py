"""What the controller and the ranks say to each other: plain JSON, never pickle."""

from __future__ import annotations

import json
import math
import os
import selectors
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from perfsearch.core.files import make_temporary_directory
from perfsearch.core.hardware import GroupSpec

Message = dict[str, Any]
"""What is said through a ``Channel``: plain values, which JSON holds."""

TOKEN_VARIABLE = "PERFSEARCH_GROUP"
"""Environment variable that marks every process of a group, and their descendants."""

SPEC_FILE = "spec.json"
PLACE_FILE = "place.json"
STORE_PORT_FILE = "store.port"
SOCKET_FILE = "control.sock"
LAUNCHER_REPORT = "launcher.json"
EXIT_FILE = "launcher.exit"
NCCL_LOG_FILE = "nccl.%p"
TORCH_LOGS = "torch"
MOST_OF_MESSAGE = 64 * 2**20
"""Bytes of the longest message; more is held of none."""
AFTER_PEER = "after a peer"
PROFILING = "profile"
"""What a rank is doing that profiles steps, its trial's score being known."""


@dataclass(frozen=True)
class Place:
    """What the processes of a group are told of the node that they are on.

    Attributes:
        group: name of the group, the same on each node.
        token: the mark in the environment of each of its processes on this node.
        owner_pid: the process whose death ends the group here: the controller, or what holds its
            place on another node.
        owner_started: when that process was started, so that a reused pid is told apart.
        forked_from: the process that the group is forked from, and that outlives it; 0: none.
        node: number of this node; the controller's is 0.
        nnodes: how many there are.
        host: what the node is called.
        store_port: of this host's loopback, at which the group's store is reached; 0 on the
            controller's node, where whoever serves it leaves the port in ``STORE_PORT_FILE``.

    """

    group: str
    token: str
    owner_pid: int
    owner_started: float
    forked_from: int = 0
    node: int = 0
    nnodes: int = 1
    host: str = ""
    store_port: int = 0

    def write(self, directory: Path) -> None:
        """Leave it in the group's directory."""
        (directory / PLACE_FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, directory: str | Path) -> Place:
        """What ``write`` left."""
        return cls(**json.loads((Path(directory) / PLACE_FILE).read_text()))


@dataclass(frozen=True)
class Startup:
    """What one start of a group needs beyond its spec.

    Attributes:
        spec: the group.
        log_directory: where ranks log until the first trial names its own.
        group_values: group-scope values of the first trial, for the first process group.
        group_env: the environment that it is made under.

    """

    spec: GroupSpec
    log_directory: str
    group_values: dict[str, Any] = field(default_factory=dict)
    group_env: dict[str, str] = field(default_factory=dict)

    def write(self, directory: Path) -> None:
        """Leave it for the launcher and the ranks."""
        (directory / SPEC_FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, directory: Path) -> Startup:
        """What ``write`` left."""
        record = json.loads((directory / SPEC_FILE).read_text())
        return cls(**{**record, "spec": GroupSpec(**record["spec"])})


@dataclass(frozen=True)
class TrialRequest:
    """One configuration to measure, as sent to the ranks.

    Attributes:
        serial: number of the request within the group.
        recipe: module below ``perfsearch`` that builds it, such as ``training.ddp``.
        configuration: every knob of the runner, pinned ones included.
        group_values: values of group-scope knobs; a change makes a new process group.
        group_env: environment that communicators of that process group are created under.
        scored_steps: smallest and largest number of scored steps.
        scored_seconds: wall time that the scored steps should cover.
        look_steps: as many steps are made at least where the job has them, in search of slow ones
            that recur seldom.
        look_seconds: unless they take longer than this.
        stop_above_s: a step that is surely slower than this ends the trial early.
        samples_per_step: the global batch.
        timeout_s: how long a collective may take.
        log_directory: where each rank's log goes.
        detail: ``light``, or ``full`` for a profile after the scored steps.
        begin_step: first step, counted from 1 at the trial's start, that the profile covers;
            ``None``: the first after the scored ones.
        end_step: the last one.
        trace: whether the profile leaves a Chrome trace in the log directory.
        recipe_options: further plain values for the recipe.

    """

    serial: int
    recipe: str
    configuration: dict[str, Any]
    group_values: dict[str, Any] = field(default_factory=dict)
    group_env: dict[str, str] = field(default_factory=dict)
    scored_steps: tuple[int, int] = (8, 60)
    scored_seconds: float = 1.0
    look_steps: int = 0
    look_seconds: float = math.inf
    stop_above_s: float | None = None
    samples_per_step: int = 1
    timeout_s: float = 300.0
    log_directory: str = "logs"
    detail: str = "light"
    begin_step: int | None = None
    end_step: int | None = None
    trace: bool = False
    recipe_options: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> TrialRequest:
        """Rebuild it on a rank."""
        low, high = record["scored_steps"]
        return cls(**{**record, "scored_steps": (low, high)})


@dataclass
class RankError:
    """How one rank failed, written by that rank.

    Attributes:
        rank: which.
        time: seconds since the epoch.
        type: name of the exception.
        message: its text.
        traceback: the whole of it.
        phase: what the rank was doing: ``start``, ``connect``, ``build``, ``train``,
            ``profile``, or ``after a peer`` that had failed before.
        out_of_memory: whether memory had run out, as the rank that has the exception knows.
        log: path of the rank's log.

    """

    rank: int
    time: float
    type: str
    message: str
    traceback: str = ""
    phase: str = "train"
    out_of_memory: bool = False
    log: str = ""


def rank_log(directory: str | Path, rank: int) -> Path:
    """Where rank ``rank`` logs under a trial's log directory."""
    return Path(directory) / f"rank{rank}.log"


def rank_error_file(directory: str | Path, rank: int) -> Path:
    """Where rank ``rank`` leaves its exception."""
    return Path(directory) / f"rank{rank}.error.json"


def stack_note_file(directory: str | Path, rank: int) -> Path:
    """Where rank ``rank`` notes, in the group's directory, which process can dump its stack."""
    return Path(directory) / f"rank{rank}.stacks.json"


def trace_file(directory: str | Path, rank: int) -> Path:
    """Where rank ``rank`` leaves its Chrome trace."""
    return Path(directory) / f"rank{rank}.trace.json.gz"


# -----------------------------------------------------------------------------
# JSON lines over a Unix socket that only the same user can reach.

LONGEST_SOCKET = 107
"""Bytes that a Unix socket's path may have on Linux."""

_WORKER_SOCKET = len("/perfsearch-12345678/listener-12345678")  # the longest in such a directory


def socket_directory() -> Path:
    """A new directory of this user's own, whose path is short enough for sockets in it."""
    base = tempfile.gettempdir()
    fits = len(os.fsencode(base)) <= LONGEST_SOCKET - _WORKER_SOCKET
    return make_temporary_directory(base if fits else "/tmp")


def keep_worker_sockets(directory: str | Path) -> None:
    """Have ``multiprocessing`` make its sockets in a group's directory, with which they go.

    The worker processes of a ``DataLoader`` hand their batches over by such sockets. By default
    they are in a directory among the temporary files, which stays behind where its process is
    killed, and where the path is too long, whoever waits for a batch waits for ever. Children of
    this process have it so, too, forked or spawned. Users' files stay where ``TMPDIR`` says.

    Args:
        directory: from ``socket_directory``.

    """
    from multiprocessing import process

    # what util.get_temp_dir looks at first; there is no public way
    config: dict[str, Any] = getattr(process.current_process(), "_config")  # noqa: B009
    config["tempdir"] = str(directory)


class ChannelClosed(ConnectionError):
    """The other end is gone."""


class Channel:
    """One end of the control connection.

    ``multiprocessing.connection`` was weighed: its ``recv_bytes`` has no time limit once a message
    has begun, and its listener's ``accept`` none at all, while nothing here may wait for ever.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray()

    @classmethod
    def connect(cls, path: Path) -> Channel:
        """Reach the controller."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(str(path))
        return cls(connection)

    @property
    def own_address(self) -> str:
        """The address of this end, where it is one of the network."""
        return str(self._socket.getsockname()[0])

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
        whole = b"\n" in self._buffer
        while not whole:
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
            whole = b"\n" in data
            if len(self._buffer) > MOST_OF_MESSAGE:
                raise ChannelClosed(f"a message of more than {MOST_OF_MESSAGE // 2**20} MiB came")
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ChannelClosed("what came is no message") from error
        if not isinstance(message, dict):
            raise ChannelClosed("what came is no message")
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
