"""The ranks of one start of a script, as the controller holds them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from perfsearch.core.hardware import Environment, Gpu
from perfsearch.core.trial import Status
from perfsearch.instrument.launch import (
    ENTRY,
    FORKED,
    SET_BY_TORCHRUN,
    LaunchConfig,
    python_arguments,
    socket_path,
    torchrun_arguments,
)
from perfsearch.runners._script.ways import Way
from perfsearch.workers import launchers
from perfsearch.workers.failures import ProcessEnd
from perfsearch.workers.group import (
    POLL_S,
    GroupGone,
    RankGroup,
    RankProcesses,
)
from perfsearch.workers.messages import ChannelClosed, Message, rank_log
from perfsearch.workers.preload import Preloaded, early_variables

IMPORTED = "left_out"
"""What only a process says that has imported what a script imports."""


def base_environment(way: Way, variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of a script's processes, apart from what a single start is told.

    Args:
        way: how they are started.
        variables: beside those of this process.

    """
    environ = {**os.environ, **variables}
    if way.by_torchrun:
        return {**environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return {name: value for name, value in environ.items() if name not in SET_BY_TORCHRUN}


class EndedError(Exception):
    """The script came to its own end before it was measured, its ranks part, or it cannot be
    measured at all.

    Attributes:
        status: what it counts as.

    """

    def __init__(self, message: str, status: Status = Status.INVALID) -> None:
        super().__init__(message)
        self.status = status


class ScriptGroup(RankGroup):
    """One start of the script; every rank speaks for itself.

    Args:
        orders: what each rank is told; the places of this start are filled in here.
        arguments: the script's own.
        variables: environment of its processes, beside that of this one.
        way: how it is started.
        environment: where it is on record, and time limits.
        gpus: GPUs that it uses.
        logs: where ranks log.
        forked_from: gives the process to fork torch's launcher from, which outlives the start; told
            where it may log.
        undo: gives the place where the start records what it does to files; told its mark.
            By default it records nothing.
        plainly: whether its ranks must be processes that import everything anew.

    Attributes:
        forked: whether its ranks are forks of a process that has imported what the script imports.
        steps: steps that each rank is known to have made.
        ended: ranks whose script has come to its own end.

    """

    def __init__(
        self,
        orders: LaunchConfig,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        way: Way,
        environment: Environment,
        gpus: tuple[Gpu, ...],
        logs: Path,
        forked_from: Callable[[Path], Preloaded],
        undo: Callable[[str], str] = lambda token: "",
        plainly: bool = False,
    ) -> None:
        log = logs.absolute() / "launcher.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log_begins = log.stat().st_size if log.exists() else 0
        self._environment = base_environment(way, variables)
        source = forked_from(log)
        same = source.early == early_variables(self._environment)
        self.forked = IMPORTED in source.said and same and not plainly
        launch = launchers.of(environment).launch(source, self._words)
        self.nproc = way.ranks * launch.nnodes
        super().__init__(launch, self.nproc, environment.limits, gpus)
        self.steps = [0] * self.nproc
        self.ended: list[int] = []
        self._ranks = RankProcesses()
        self._way = way
        self._arguments = arguments
        self.log_to(logs)
        self._orders = replace(orders, undo=undo(self.token))  # from here on it is to be ended

    def _words(self, directory: Path) -> list[str]:
        """What torch's launcher is given, or Python itself."""
        ranks = self._way.by_torchrun
        options = torchrun_arguments(self._way.ranks) if ranks else python_arguments()
        options = [FORKED, *options] if self.forked else options
        return [*options, "-m", ENTRY, self._orders.script, *self._arguments]

    def _environ(self, directory: Path) -> dict[str, str]:
        whole = replace(
            self._orders,
            directory=str(directory),
            log_directory=str(self.logs),
        )
        return {**self._environment, **whole.to_environment()}

    def join(self) -> None:
        """Start the script, and wait until every rank is there, about to run it.

        Raises:
            GroupGone: one is not.

        """
        self.launch(self._environ, [socket_path("", rank).name for rank in range(self.nproc)])
        self._ranks = RankProcesses(self.receive("hello", self._limits.startup_s))

    @property
    def log(self) -> Path:
        """The log of rank 0."""
        return rank_log(self.logs, 0)

    def tails(self) -> dict[int, str]:
        """The end of each rank's log."""
        return self.failure_files.tails()

    def receive(self, event: str, limit_s: float) -> list[Message]:
        """One message of each rank, in order; ``ended`` may come in place of what was expected.

        Raises:
            GroupGone: one is gone, or some did not answer within ``limit_s`` while none ended.
            EndedError: one says that the script cannot be measured, and why.

        """
        deadline = time.monotonic() + limit_s
        found: dict[int, Message] = {}
        while len(found) < self.nproc:
            for rank, channel in enumerate(self.channels):
                if rank in found:
                    continue
                try:
                    message = channel.receive(0.001 if found else POLL_S / self.nproc)
                except TimeoutError:
                    continue
                except ChannelClosed as error:
                    raise GroupGone() from error
                if message["event"] not in (event, "ended"):
                    raise ValueError(f"a rank said {message['event']!r} where {event!r} was due")
                self.steps[rank] = message.get("step", self.steps[rank])
                found[rank] = message
                if message.get("reason") and message["event"] == "ended":
                    raise EndedError(message["reason"])
                if message["event"] == "ended":
                    self.ended.append(rank)
            if len(found) == self.nproc:
                break
            self.watch(deadline, limit_s)
            if self.ended:
                # the others may be waiting for it in a collective, for ever
                deadline = min(deadline, time.monotonic() + self._limits.grace_s)
        return [found[rank] for rank in range(self.nproc)]

    def _ask_to_end(self) -> None:
        """At the boundary where the script waits."""
        self.send({"op": "end"})

    def _ended(self) -> list[ProcessEnd]:
        """Ranks that are gone and have not said that the script came to its end."""
        return [end for end in self._ranks.ended() if end.rank not in self.ended]

    def _some_run(self) -> bool:
        return self._ranks.some_run()

    def _is_starting(self) -> bool:
        return not self.channels

    def _launcher_words(self) -> str:
        """The last line that the launcher has written in this start, if no rank was ever there."""
        if self.channels:
            return ""
        with self.launcher_log.open("rb") as log:
            log.seek(self._log_begins)
            lines = log.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
