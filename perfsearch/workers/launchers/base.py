"""The contract of a launcher: where ranks start, and how one group of them is started there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from perfsearch.core.hardware import Hardware
from perfsearch.workers.failures import ProcessEnd
from perfsearch.workers.messages import RankError
from perfsearch.workers.preload import Preloaded

Say = Callable[[str], None]
"""Shows one line to the user."""


class CannotStartError(Exception):
    """There is no such command, or it cannot be run."""


class Process(Protocol):
    """The first process of a group, which ends when the ranks have; of several nodes, all first
    processes together.
    """

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; ``None`` while it runs."""

    def wait(self, timeout: float | None = None, /) -> int:
        """Wait for its end, and raise ``subprocess.TimeoutExpired`` if it does not come."""


@dataclass(frozen=True)
class NodeReport:
    """What another node says of the share of a failed group that it had.

    Attributes:
        lost: why nothing is to be heard of the node any more, its name first; empty where it is.
        errors: exceptions that its ranks wrote down.
        ends: its ranks that ended by themselves or by a signal.
        launcher_error: why its launcher failed, when not for a rank.
        log_tails: end of each of its ranks' logs, by rank.
        places: lines at which its ranks stood, by rank, where they were asked.
        oom_kills: processes that its OOM killer ended meanwhile.
        memory: what its kernel says of the memory.

    """

    lost: str = ""
    errors: Sequence[RankError] = ()
    ends: Sequence[ProcessEnd] = ()
    launcher_error: str = ""
    log_tails: Mapping[int, str] = field(default_factory=dict)
    places: Mapping[int, str] = field(default_factory=dict)
    oom_kills: int = 0
    memory: str = ""


class Launch(ABC):
    """How one group is started: by a fork, a command, or a fork on each of several nodes.

    Attributes:
        nnodes: nodes that it is started on.

    """

    nnodes: int = 1

    @property
    @abstractmethod
    def token(self) -> str:
        """The mark in the environment of each of the group's processes on this node."""

    @property
    def outliving(self) -> Sequence[int]:
        """Processes that bear the mark and are there before and after the group."""
        return ()

    @abstractmethod
    def record(self, directory: Path) -> None:
        """Note the group, before it is started, for whoever has to end what is left of it."""

    @abstractmethod
    def forget(self) -> None:
        """Strike it, as nothing is left."""

    @abstractmethod
    def start(
        self, directory: Path, environment: Mapping[str, str], log: Path, limit_s: float
    ) -> Process:
        """Start it.

        Args:
            directory: the group's own.
            environment: of its processes.
            log: where the first process writes.
            limit_s: longest wait until it runs.

        Raises:
            LauncherGone: the process that it is forked from ended.
            TimeoutError: it took longer.
            CannotStartError: the command cannot be run.

        """

    def await_nodes(self) -> None:  # noqa: B027 - one node is always there
        """Wait until every other node is there.

        Raises:
            NodesGoneError: one did not come.

        """

    def log_to(self, logs: Path) -> None:  # noqa: B027 - one node sees them itself
        """Tell other nodes that a trial begins whose ranks log there."""

    def reports(self, logs: Path, world_size: int, stacks: bool) -> Sequence[NodeReport]:
        """What other nodes say of a group that failed.

        Args:
            logs: where its ranks log.
            world_size: number of ranks over all nodes.
            stacks: whether they are asked where they stand.

        """
        return ()

    def end_elsewhere(self) -> None:  # noqa: B027 - there is nothing elsewhere
        """End what other nodes have of the group, and wait until it is gone."""


class Launcher(ABC):
    """Where the ranks of a search start, from its beginning to its end.

    A subclass lives in its own module ``perfsearch.workers.launchers.NAME``, with its keys in
    ``conf/launcher/NAME.yaml``.

    Args:
        options: the ``launcher.*`` keys.
        nnodes: number of nodes.

    """

    several_nodes: bool = False

    @dataclass(frozen=True)
    class Options:
        """Options of the launcher, as keys ``launcher.*``."""

    def __init__(self, options: Any, nnodes: int) -> None:
        self.options: Any = options
        self.nnodes = nnodes

    def open(self, hardware: Hardware, say: Say) -> None:  # noqa: B027 - this node is there
        """Have every node join.

        Args:
            hardware: what each of them must have.
            say: tells the user what to do, and what is waited for.

        Raises:
            NodesGoneError: one did not come.
            BadInputError: what was asked for cannot be done here.

        """

    @abstractmethod
    def launch(
        self, preloaded: Preloaded, arguments: Callable[[Path], list[str]] | None = None
    ) -> Launch:
        """How a group is started.

        Args:
            preloaded: the process to fork it from on this node.
            arguments: of the fork, which may name the group's directory; ``None``: it has none.

        """

    def sample(self, interval_s: float) -> None:  # noqa: B027 - this node is sampled by itself
        """Have other nodes sample their system metrics from now on."""

    def windows(self, begin_monotonic: float, end_monotonic: float) -> list[dict[str, float]]:
        """What other nodes sampled meanwhile, as ``SystemSampler.window`` gives it.

        Args:
            begin_monotonic: on this node's monotonic clock.
            end_monotonic: the same.

        """
        return []

    def close(self) -> None:  # noqa: B027 - nothing was opened
        """Let the other nodes go."""
