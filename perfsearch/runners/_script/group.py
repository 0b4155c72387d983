"""The ranks of one start of a script, as the controller holds them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from perfsearch.core import hardware
from perfsearch.core.hardware import Environment, Gpu
from perfsearch.instrument.facts import ENTRY, Orders, socket_path
from perfsearch.instrument.launch import torchrun_arguments
from perfsearch.workers import failures, processes
from perfsearch.workers import processes as registry
from perfsearch.workers.failures import (
    Evidence,
    Failure,
    Leavings,
    classify,
    launcher_report,
    oom_kills,
)
from perfsearch.workers.messages import (
    TOKEN_VARIABLE,
    Channel,
    ChannelClosed,
    Listener,
    rank_log,
    socket_directory,
)
from perfsearch.workers.preload import ForkedLauncher, LauncherGone, Preloaded

_POLL_S = 0.25

Message = dict[str, Any]


class ScriptGone(Exception):
    """A rank is gone, or does not answer in time.

    Attributes:
        limit_s: the time limit that was exceeded; ``None``: a rank ended.

    """

    def __init__(self, limit_s: float | None = None) -> None:
        super().__init__("a rank ended" if limit_s is None else f"no answer in {limit_s:g} s")
        self.limit_s = limit_s


class ScriptGroup:
    """One start of the script; ``end`` must be called however it went.

    Args:
        orders: what each rank is told; the places of this start are filled in here.
        arguments: the script's own.
        variables: environment of its processes, beside that of this one.
        nproc: ranks.
        environment: where it is on record, and time limits.
        gpus: GPUs that it uses.
        logs: where ranks log.
        launchers: gives the process to fork torch's launcher from, which outlives the start; told
            where it may log.

    Attributes:
        steps: steps that each rank is known to have made.
        ended: ranks whose script has come to its own end.

    """

    def __init__(
        self,
        orders: Orders,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        nproc: int,
        environment: Environment,
        gpus: tuple[Gpu, ...],
        logs: Path,
        launchers: Callable[[Path], Preloaded],
    ) -> None:
        self.nproc = nproc
        self.logs = logs.absolute()
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.launcher_log
        self._log_begins = log.stat().st_size if log.exists() else 0
        self._launchers = launchers(log)
        self.steps = [0] * nproc
        self.ended: list[int] = []
        self._environment = environment
        self._gpus = gpus
        self._oom_kills_before = oom_kills()
        self._used_before = hardware.used_gib(gpus)
        self._token = self._launchers.token
        self._channels: list[Channel] = []
        self._process: ForkedLauncher | None = None
        self._directory = socket_directory()
        Leavings(self.logs, nproc).clear()
        registry.record_group(environment.run_dir, self._token, self._directory)
        self._listeners = [Listener(socket_path(self._directory, r)) for r in range(nproc)]
        whole = replace(
            orders,
            directory=str(self._directory),
            log_directory=str(self.logs),
            token=self._token,
            controller_pid=os.getpid(),
            controller_started=processes.started_at(os.getpid()),
        )
        self._words = torchrun_arguments(self._directory, self.nproc)
        self._words += ["-m", ENTRY, orders.script, *arguments]
        self._environ = {**os.environ, **variables, **whole.to_environment()}
        self._environ[TOKEN_VARIABLE] = self._token
        self._environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"

    def _start(self, limit_s: float) -> None:
        try:
            self._process = self._launchers.fork(
                self._directory, self._environ, self.launcher_log, limit_s, arguments=self._words
            )
        except LauncherGone as error:
            raise ScriptGone from error
        except TimeoutError as error:
            raise ScriptGone(limit_s) from error

    def join(self) -> None:
        """Start the script, and wait until every rank is there, about to run it.

        Raises:
            ScriptGone: one is not.

        """
        limit_s = self._environment.limits.startup_s
        deadline = time.monotonic() + limit_s
        self._start(limit_s)
        for listener in self._listeners:
            try:
                left = max(0.0, deadline - time.monotonic())
                self._channels.append(listener.accept(left, self._runs))
            except ChannelClosed as error:
                raise ScriptGone from error
            except TimeoutError as error:
                raise ScriptGone(limit_s) from error
        self.receive("hello", limit_s)

    @property
    def pids(self) -> frozenset[int]:
        """Processes of the group now."""
        found = processes.members(self._token, exclude=[self._launchers.pid])
        return frozenset(p.pid for p in found)

    @property
    def log(self) -> Path:
        """The log of rank 0."""
        return rank_log(self.logs, 0)

    @property
    def launcher_log(self) -> Path:
        """Where torch's launcher logs, start after start."""
        return self.logs / "launcher.log"

    def tails(self) -> dict[int, str]:
        """The end of each rank's log."""
        return Leavings(self.logs, self.nproc).tails()

    def _runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def send(self, order: Message) -> None:
        """Tell every rank the same.

        Raises:
            ScriptGone: one is gone.

        """
        for channel in self._channels:
            try:
                channel.send(order)
            except ChannelClosed as error:
                raise ScriptGone from error

    def receive(self, event: str, limit_s: float) -> list[Message]:
        """One message of each rank, in order; ``ended`` may come in place of what was expected.

        Raises:
            ScriptGone: one is gone, or some did not answer within ``limit_s`` while none ended.

        """
        deadline = time.monotonic() + limit_s
        found: dict[int, Message] = {}
        while len(found) < self.nproc:
            for rank, channel in enumerate(self._channels):
                if rank in found:
                    continue
                try:
                    message = channel.receive(0.001 if found else _POLL_S / self.nproc)
                except TimeoutError:
                    continue
                except ChannelClosed as error:
                    raise ScriptGone from error
                if message["event"] not in (event, "ended"):
                    raise ValueError(f"a rank said {message['event']!r} where {event!r} was due")
                self.steps[rank] = message.get("step", self.steps[rank])
                found[rank] = message
                if message["event"] == "ended":
                    self.ended.append(rank)
            if len(found) == self.nproc:
                break
            if not self._runs():
                raise ScriptGone
            if time.monotonic() >= deadline:
                raise ScriptGone(limit_s)
            if self.ended:
                # the others may be waiting for it in a collective, for ever
                deadline = min(deadline, time.monotonic() + self._environment.limits.grace_s)
        return [found[rank] for rank in range(self.nproc)]

    def why_gone(self, gone: ScriptGone) -> Failure:
        """Gather what can be known of the failure, and end what is left."""
        process = self._process
        if process is not None and gone.limit_s is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self._environment.limits.grace_s)
        places = {}
        if gone.limit_s is not None:
            places = failures.ask_for_stacks(self._directory, self.logs, self.nproc)
        left = Leavings(self.logs, self.nproc)
        code = process.poll() if process is not None and gone.limit_s is None else None
        ends, launcher_error = launcher_report(self._directory, code)
        if not (ends or launcher_error or self._channels):
            launcher_error = self._last_words()
        evidence = Evidence(
            errors=left.errors(),
            ends=ends,
            launcher_error=launcher_error,
            log_tails=left.tails(),
            oom_kills=max(0, oom_kills() - self._oom_kills_before),
            timed_out=gone.limit_s,
            starting=not self._channels,
            places=places,
        )
        self.end(kill=True)
        return classify(evidence)

    def _last_words(self) -> str:
        """The last line that the launcher has written in this start."""
        with self.launcher_log.open("rb") as log:
            log.seek(self._log_begins)
            lines = log.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def end(self, kill: bool = False) -> None:
        """End every process, and wait until its devices are free.

        Args:
            kill: whether to skip asking the script to end at the boundary where it waits.

        """
        process, self._process = self._process, None
        grace_s = self._environment.limits.grace_s
        if process is not None and not kill and process.poll() is None:
            with contextlib.suppress(ScriptGone, subprocess.TimeoutExpired):
                self.send({"op": "end"})
                process.wait(grace_s)
        for channel in self._channels:
            channel.close()
        for listener in self._listeners:
            listener.close()
        processes.end_all(self._token, 1.0, exclude=[self._launchers.pid])
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
            if self._gpus:
                hardware.wait_until_free(self._gpus, self._used_before, grace_s)
        registry.record_group(self._environment.run_dir, self._token, Path())
        shutil.rmtree(self._directory, ignore_errors=True)


# -----------------------------------------------------------------------------
# The process that starts of a script are forked from: torch's launcher, imported once.

_MODULE = "perfsearch.instrument.launch"


class Launchers:
    """Made when it is first needed, and anew where it has ended.

    Args:
        variables: environment of the script's processes as it is today.

    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        self._process: Preloaded | None = None

    def process(self, environment: Environment, log: Path) -> Preloaded:
        """The process; where it must be made, it is put on record, and ``log`` gets its output."""
        if self._process is None or not self._process.alive:
            self.close(environment)
            environ = {**os.environ, **self._variables}
            self._process = Preloaded(environ, environment.run_dir, log, _MODULE)
        return self._process

    def close(self, environment: Environment) -> None:
        """End it."""
        process, self._process = self._process, None
        if process is not None:
            process.close(environment.limits.grace_s)
