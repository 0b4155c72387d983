"""One group of ranks, as the controller holds it: started, bounded in time, watched, and ended."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from perfsearch.core import hardware
from perfsearch.core.cgroup import KernelMemory
from perfsearch.core.files import remove_temporary_directory, write_text
from perfsearch.core.hardware import Gpu, GroupSpec
from perfsearch.core.objective import Limits
from perfsearch.core.trial import Status
from perfsearch.workers import processes
from perfsearch.workers.failures import (
    Evidence,
    Failure,
    FailureFiles,
    ProcessEnd,
    classify,
    launcher_report,
)
from perfsearch.workers.launchers.base import Launch, NodeReport, Process
from perfsearch.workers.messages import (
    NCCL_LOG_FILE,
    SOCKET_FILE,
    TOKEN_VARIABLE,
    Channel,
    ChannelClosed,
    Listener,
    Message,
    Place,
    RankError,
    Startup,
    TrialRequest,
    rank_error_file,
    rank_log,
    socket_directory,
)
from perfsearch.workers.preload import LauncherGone
from perfsearch.workers.stack_dumps import ask_for_stacks

POLL_S = 0.25
"""How often a group that says nothing is checked."""

_LOOK_S = 0.05

_NOTICES_S = 1.0
"""Time in which a launcher sees that a rank has ended with another code than 0."""

_TERM_S = 1.0
"""How long what is left of a group has for SIGTERM, before SIGKILL."""


class GroupGone(Exception):
    """A rank is gone, or does not answer in time.

    Attributes:
        limit_s: the time limit that was exceeded; ``None``: a process ended.

    """

    def __init__(self, limit_s: float | None = None) -> None:
        super().__init__("a rank ended" if limit_s is None else f"no answer in {limit_s:g} s")
        self.limit_s = limit_s


@dataclass
class Devices:
    """GPUs that a group uses on one node.

    Attributes:
        gpus: which.

    """

    gpus: Sequence[Gpu]
    _used_before: list[float] = field(default_factory=list)

    def note(self) -> None:
        """Note how much of their memory is in use before the group is there."""
        self._used_before = hardware.used_gib(self.gpus)

    def await_memory(self, timeout_s: float) -> None:
        """Wait until the group that is gone has given it back."""
        if self.gpus:
            hardware.wait_until_free(self.gpus, self._used_before, timeout_s)


def report_of(
    directory: Path, files: FailureFiles, code: int | None, memory: KernelMemory, stacks: bool
) -> NodeReport:
    """What a node knows of a failed group, of which it has a share.

    Args:
        directory: of the share.
        files: of the failure.
        code: exit code of the share's first process; ``None`` where it runs.
        memory: what the kernel said when the trial began.
        stacks: whether ranks are asked where they stand.

    """
    ends, error = launcher_report(directory, code)
    now = KernelMemory.read()
    asked = ask_for_stacks(directory, files.directory, files.world_size) if stacks else {}
    return NodeReport(
        errors=files.errors(),
        ends=ends,
        launcher_error=error,
        log_tails=files.tails(),
        places=asked,
        oom_kills=now.kills_since(memory),
        memory=str(now),
    )


class RankGroup(ABC):
    """Ranks that are started together; ``end`` must be called however it went.

    It leaves no process, and no file but logs. What a kind of group has of its own is what is said
    between it and its ranks, and what it knows of their end besides what all leave: errors, logs,
    exit codes, and where they stand.

    Args:
        launch: how it is started.
        world_size: number of ranks.
        limits: time limits.
        gpus: GPUs that it uses.

    Attributes:
        token: the mark in the environment of each of its processes.
        directory: its own, from start to end: sockets, and what its processes tell of themselves.
        logs: where ranks log now.
        channels: to the ranks that have connected.

    """

    def __init__(
        self, launch: Launch, world_size: int, limits: Limits, gpus: tuple[Gpu, ...] = ()
    ) -> None:
        self.token = launch.token
        self.directory: Path | None = None
        self.logs = Path()
        self.channels: list[Channel] = []
        self.process: Process | None = None
        self._launch = launch
        self._world_size = world_size
        self._limits = limits
        self._devices = Devices(gpus)
        self._gone: ProcessEnd | None = None
        self._gone_until = math.inf
        self._memory_before = KernelMemory.read()

    @property
    def runs(self) -> bool:
        """Whether the first process has not ended."""
        return self.process is not None and self.process.poll() is None

    @property
    def pids(self) -> frozenset[int]:
        """Processes of the group now."""
        found = processes.members(self.token, exclude=self._launch.outliving)
        return frozenset(p.pid for p in found)

    @property
    def launcher_log(self) -> Path:
        """Where the first process logs, start after start."""
        return self.logs / "launcher.log"

    @property
    def failure_files(self) -> FailureFiles:
        """Files of a failure beside the present logs."""
        return FailureFiles(self.logs, self._world_size)

    def log_to(self, logs: Path) -> None:
        """Begin a trial whose ranks log there; errors of an earlier attempt are removed."""
        self.logs = logs.absolute()
        self.logs.mkdir(parents=True, exist_ok=True)
        self.failure_files.clear()
        self._launch.log_to(self.logs)
        self._memory_before = KernelMemory.read()

    def launch(
        self, environment: Callable[[Path], Mapping[str, str]], sockets: Sequence[str] = ()
    ) -> float:
        """Start the group, and wait until somebody has connected to each socket.

        Args:
            environment: of its processes, given the group's directory; their mark is added.
            sockets: names in that directory.

        Returns:
            The monotonic time at which the start-up has taken too long.

        Raises:
            GroupGone: it ended, or takes too long.
            CannotStartError: there is no such command; nothing is left.
            NodesGoneError: another node did not come; nothing was started.

        """
        self._launch.await_nodes()
        limit_s = self._limits.startup_s
        deadline = time.monotonic() + limit_s
        self._devices.note()
        directory = self.directory = socket_directory()
        self._launch.record(directory)
        listeners = [Listener(directory / name) for name in sockets]
        try:
            self._place(directory).write(directory)
            marked = {**environment(directory), TOKEN_VARIABLE: self.token}
            self.process = self._launch.start(directory, marked, self.launcher_log, limit_s)
            for listener in listeners:
                left = max(0.0, deadline - time.monotonic())
                self.channels.append(listener.accept(left, lambda: self.runs))
        except (ChannelClosed, LauncherGone) as error:
            raise GroupGone() from error
        except TimeoutError as error:
            raise GroupGone(limit_s) from error
        except BaseException:
            self.end(kill=True)
            raise
        finally:
            for listener in listeners:
                listener.close()
        return deadline

    def _place(self, directory: Path) -> Place:
        """What its processes on this node are told of it."""
        me = os.getpid()
        return Place(
            group=directory.name,
            token=self.token,
            owner_pid=me,
            owner_started=processes.started_at(me),
            forked_from=next(iter(self._launch.outliving), 0),
            nnodes=self._launch.nnodes,
            host=os.uname().nodename,
        )

    def send(self, message: Message) -> None:
        """Say the same to all who have connected.

        Raises:
            GroupGone: one is gone.

        """
        for channel in self.channels:
            try:
                channel.send(message)
            except ChannelClosed as error:
                raise GroupGone() from error

    def watch(self, deadline: float, limit_s: float) -> None:
        """See whether the group still goes on; asked whenever it is silent.

        A rank that is gone gives the others, which may wait for it for ever, the grace time.

        Args:
            deadline: monotonic time at which it has taken too long.
            limit_s: the limit that this is told as.

        Raises:
            GroupGone: it does not.

        """
        if not self.runs:
            raise GroupGone
        if self._gone is None and (ended := self._ended()):
            self._gone = ended[0]
            self._gone_until = time.monotonic() + self._limits.grace_s
        if time.monotonic() >= min(deadline, self._gone_until):
            raise GroupGone(limit_s)

    def why_gone(self, gone: GroupGone) -> Failure:
        """Gather what can be known of the failure, and end what is left."""
        process, directory = self.process, self.directory
        assert directory is not None
        self._ended()  # so that the first to be gone is seen before the others follow
        missed = self._gone if gone.limit_s is not None else None
        timed_out = gone.limit_s if missed is None else None
        if process is not None and timed_out is None and not (missed and self._some_run()):
            missed = self._wait_for_launcher(process) or missed
        places = {}
        if timed_out is not None:
            places = ask_for_stacks(directory, self.logs, self._world_size)
        code = process.poll() if process is not None and timed_out is None else None
        ends, launcher_error = launcher_report(directory, code)
        if missed is not None and not ends:
            ends = [missed]
        if timed_out is None and not (ends or launcher_error):
            launcher_error = self._launcher_words()
        evidence = self._evidence(
            ends=ends, launcher_error=launcher_error, timed_out=timed_out, places=places
        )
        reports = self._launch.reports(self.logs, self._world_size, timed_out is not None)
        self._gather(reports)
        evidence = with_reports(evidence, reports)
        if evidence.ends and not evidence.own_ends:
            evidence = replace(evidence, ends=[*evidence.ends, *self._unreported()])
        self.end(kill=True)
        return self._classify(evidence, code)

    def _gather(self, reports: Sequence[NodeReport]) -> None:
        """Keep the ends of other nodes' logs here, unless their files are here already."""
        for report in reports:
            for rank, tail in report.log_tails.items():
                if not rank_log(self.logs, rank).exists():
                    write_text(rank_log(self.logs, rank), tail)
            for error in report.errors:
                if not rank_error_file(self.logs, error.rank).exists():
                    write_text(rank_error_file(self.logs, error.rank), json.dumps(asdict(error)))

    def _wait_for_launcher(self, process: Process) -> ProcessEnd | None:
        """Wait until the first process has ended; the rank that ended before, where one has.

        It takes no notice of a rank that ended with 0, and ends the others at once for any other:
        while those go on, there is nothing to wait for. Where it ended by itself, so did they.
        """
        deadline, seen = time.monotonic() + self._limits.grace_s, math.inf
        ended: list[ProcessEnd] = []
        while process.poll() is None and time.monotonic() < min(deadline, seen + _NOTICES_S):
            ended = ended or self._ended()
            if ended and seen == math.inf and self._some_run():
                seen = time.monotonic()
            time.sleep(_LOOK_S)
        return ended[0] if ended and not process.poll() else None

    def _evidence(self, errors: Sequence[RankError] | None = None, **more: Any) -> Evidence:
        """What ranks and the kernel have left, and what else is known."""
        files, memory = self.failure_files, KernelMemory.read()
        return Evidence(
            errors=files.errors() if errors is None else errors,
            log_tails=files.tails(),
            oom_kills=memory.kills_since(self._memory_before),
            memory=str(memory),
            starting=self._is_starting(),
            disk_full=files.cannot_be_written(),
            **more,
        )

    def end(self, kill: bool = False) -> None:
        """End every process of the group and wait until its devices are free.

        Args:
            kill: whether to skip asking the ranks to end by themselves.

        """
        process, directory = self.process, self.directory
        if directory is None:
            return
        if process is not None and not kill and process.poll() is None:
            with contextlib.suppress(GroupGone, subprocess.TimeoutExpired):
                self._ask_to_end()
                process.wait(self._limits.grace_s)
        for channel in self.channels:
            channel.close()
        self.channels = []
        self._launch.end_elsewhere()
        processes.end_all(self.token, _TERM_S, exclude=self._launch.outliving)
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self._limits.grace_s)
            self._devices.await_memory(self._limits.grace_s)
        self._launch.forget()
        remove_temporary_directory(directory)
        self.process = self.directory = None  # only now: an interrupt leaves it to be ended again

    @abstractmethod
    def _ask_to_end(self) -> None:
        """Tell the ranks that nothing more will be asked of them."""

    @abstractmethod
    def _is_starting(self) -> bool:
        """Whether a failure now would be one of the start-up."""

    def _ended(self) -> list[ProcessEnd]:
        """Ranks that are known to have ended though the first process runs."""
        return []

    def _unreported(self) -> list[ProcessEnd]:
        """Ranks that ended and that the launcher did not end: it takes no notice of code 0."""
        return [end for end in self._ended() if end.exit_code != -signal.SIGTERM]

    def _some_run(self) -> bool:
        """Whether ranks still run after one has ended, so that no exit code is to come soon."""
        return True

    def _launcher_words(self) -> str:
        """What the first process says of its end, where it has left no report; empty if nothing."""
        return ""

    def _classify(self, evidence: Evidence, code: int | None) -> Failure:
        """Name the kind and the cause.

        Args:
            evidence: what is known.
            code: exit code of the first process; ``None`` where it did not end by itself.

        """
        return classify(evidence)


def with_reports(evidence: Evidence, reports: Sequence[NodeReport]) -> Evidence:
    """What is known on this node, and what the other nodes of the group say."""
    lost = [report.lost for report in reports if report.lost]
    told = [report.launcher_error for report in reports if report.launcher_error]
    errors = {error.rank: error for report in reports for error in report.errors}
    errors |= {error.rank: error for error in evidence.errors}
    return replace(
        evidence,
        lost="; ".join(lost),
        errors=list(errors.values()),
        ends=[*evidence.ends, *(end for report in reports for end in report.ends)],
        launcher_error=evidence.launcher_error or next(iter(told), ""),
        log_tails={**evidence.log_tails, **{k: v for r in reports for k, v in r.log_tails.items()}},
        places={**evidence.places, **{k: v for r in reports for k, v in r.places.items()}},
        oom_kills=evidence.oom_kills + sum(report.oom_kills for report in reports),
    )


@dataclass
class Reply:
    """What came of a request.

    Attributes:
        message: the ranks' outcome, when they got through.
        failure: otherwise, what happened.
        alive: whether the group can take another request.

    """

    message: dict[str, Any] = field(default_factory=dict)
    failure: Failure | None = None
    alive: bool = True


class WorkerGroup(RankGroup):
    """Warm ranks of a built-in job, which serve one request after another.

    The leading rank speaks for all of them.

    Args:
        spec: what to start.
        limits: time limits.
        launch: how it is started.
        gpus: GPUs that it uses.

    Attributes:
        info: what the ranks said of the job when they started.
        requests: how many were made.

    """

    def __init__(
        self,
        spec: GroupSpec,
        limits: Limits,
        launch: Launch,
        gpus: tuple[Gpu, ...] = (),
    ) -> None:
        super().__init__(launch, spec.world_size, limits, gpus)
        self.spec = spec
        self.info: dict[str, Any] = {}
        self.requests = 0
        self._ranks = RankProcesses()
        self._is_ready = False

    @property
    def alive(self) -> bool:
        """Whether the launcher and the channel are still there."""
        return bool(self.channels) and self.runs

    def start(self, log_directory: Path, first: TrialRequest) -> Failure | None:
        """Start the ranks and wait until each is ready; on failure say why, nothing left.

        Args:
            log_directory: where they log until the first trial.
            first: what they will be asked first; the process group is made to fit it.

        """
        self.log_to(log_directory)
        try:
            deadline = self.launch(lambda directory: self._prepare(directory, first), [SOCKET_FILE])
            while True:
                message = self._receive(deadline, self._limits.startup_s)
                if message["event"] == "ready":
                    break
        except GroupGone as gone:
            return self.why_gone(gone)
        except BaseException:
            self.end(kill=True)
            raise
        self._is_ready = True
        self.info = message["info"]
        self._ranks = RankProcesses(message["ranks"])
        return self._shared_device()

    def _prepare(self, directory: Path, first: TrialRequest) -> dict[str, str]:
        """Leave word of the start, and give the environment of the ranks."""
        startup = Startup(
            spec=self.spec,
            log_directory=str(self.logs),
            group_values=first.group_values,
            group_env=first.group_env,
        )
        startup.write(directory)
        environment = {**os.environ, **self.spec.env}
        if self.spec.capture_nccl:
            environment["NCCL_DEBUG"] = "INFO"
            environment["NCCL_DEBUG_SUBSYS"] = "TUNING"
            environment["NCCL_DEBUG_FILE"] = str(directory / NCCL_LOG_FILE)
        return environment

    def _shared_device(self) -> Failure | None:
        shared = None if self.spec.device == "cpu" else self._ranks.shared_device()
        if shared is None:
            return None
        self.end(kill=True)
        reason, rank = shared
        return Failure(Status.INFRASTRUCTURE, reason, rank)

    def run(self, request: TrialRequest, timeout_s: float) -> Reply:
        """Have one configuration measured, within ``timeout_s``.

        A failed trial leaves the group usable when its ranks recovered within the grace time;
        otherwise the group is ended here.
        """
        assert self.directory is not None
        self.log_to(Path(request.log_directory))
        options = dict(request.recipe_options)
        if self.spec.capture_nccl:
            options["nccl_log"] = str(self.directory / NCCL_LOG_FILE)
        request = replace(
            request, serial=self.requests, log_directory=str(self.logs), recipe_options=options
        )
        self.requests += 1
        deadline = time.monotonic() + timeout_s
        try:
            self.send({"op": "trial", "request": request.to_json()})
            while True:
                message = self._receive(deadline, timeout_s)
                if message["event"] == "outcome":
                    break
                deadline = min(deadline, time.monotonic() + self._limits.grace_s)
        except GroupGone as gone:
            return Reply(failure=self.why_gone(gone), alive=False)
        except BaseException:
            self.end(kill=True)
            raise
        if message["errors"]:
            errors = [RankError(**e) for e in message["errors"]]
            return Reply(failure=classify(self._evidence(errors)))
        return Reply(message=message)

    def _receive(self, deadline: float, limit_s: float) -> dict[str, Any]:
        while True:
            left = min(deadline, self._gone_until) - time.monotonic()
            try:
                return self.channels[0].receive(max(0.0, min(left, POLL_S)))
            except TimeoutError:
                self.watch(deadline, limit_s)
            except ChannelClosed as error:
                raise GroupGone() from error

    def _ask_to_end(self) -> None:
        self.send({"op": "close"})

    def _is_starting(self) -> bool:
        return not self._is_ready

    def _ended(self) -> list[ProcessEnd]:
        return self._ranks.ended()

    def _some_run(self) -> bool:
        return self._ranks.some_run()

    def _launcher_words(self) -> str:
        if self.process is not None:
            return ""
        return f"it ended while importing torch; see {self.logs.parent}"


class RankProcesses:
    """The ranks of a group as each told of itself: host, device and process.

    Args:
        ranks: of each, ``host``, ``device``, ``pid`` and ``started``, and ``node`` where it is on
            another one than this.

    """

    def __init__(self, ranks: Sequence[Mapping[str, Any]] = ()) -> None:
        self._ranks = ranks
        self._ends: dict[int, ProcessEnd] = {}

    def shared_device(self) -> tuple[str, int] | None:
        """What is wrong where two ranks are on one device, and the second of them."""
        places = [(r["host"], r["device"]) for r in self._ranks]
        for rank, place in enumerate(places):
            if place in places[:rank]:
                first = places.index(place)
                return f"ranks {first} and {rank} are on the same device {place[1]}", rank
        return None

    def ended(self) -> list[ProcessEnd]:
        """Ranks on this node whose processes are gone, though the launcher still runs.

        The launcher takes no notice of one that ended with 0, and sees another only when the last
        of the processes that it started has ended, too. It ends the others by SIGTERM: those come
        last, for they are not the cause. The system forgets a code once the launcher has asked for
        it, so that what was seen first is kept.
        """
        for rank, process in enumerate(self._ranks):
            place = process["pid"], process["started"]
            if rank in self._ends or process.get("node") or processes.is_alive(*place):
                continue
            # Had its launcher taken note of another code, it would have ended the group.
            code = processes.exit_code(*place)
            self._ends[rank] = ProcessEnd(rank, 0 if code is None else code, time.time())
        return sorted(self._ends.values(), key=lambda end: end.exit_code == -signal.SIGTERM)

    def some_run(self) -> bool:
        """Whether another rank still runs, so that the launcher will not end soon."""
        return len(self.ended()) < len(self._ranks)
