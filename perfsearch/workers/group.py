"""One group of ranks, as the controller holds it."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from perfsearch.core import hardware
from perfsearch.core.hardware import Gpu, GroupSpec
from perfsearch.core.objective import Limits
from perfsearch.workers import failures, processes
from perfsearch.workers.failures import (
    Evidence,
    Failure,
    Leavings,
    ProcessEnd,
    classify,
    launcher_report,
    oom_kills,
)
from perfsearch.workers.messages import (
    NCCL_LOG_FILE,
    SOCKET_FILE,
    TOKEN_VARIABLE,
    Channel,
    ChannelClosed,
    Listener,
    RankError,
    Startup,
    TrialRequest,
    socket_directory,
)
from perfsearch.workers.preload import ForkedLauncher, LauncherGone, Preloaded

_POLL_S = 0.25


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


class WorkerGroup:
    """Ranks that were started together and serve one request after another.

    ``end`` must be called however it went; it leaves no process, and no file but logs.

    Args:
        spec: what to start.
        limits: time limits.
        preloaded: the process to fork the group from; it outlives the group.
        gpus: GPUs that it uses.

    """

    def __init__(
        self,
        spec: GroupSpec,
        limits: Limits,
        preloaded: Preloaded,
        gpus: tuple[Gpu, ...] = (),
    ) -> None:
        self.spec = spec
        self.info: dict[str, Any] = {}
        self.requests = 0
        self._limits = limits
        self._preloaded = preloaded
        self._gpus = gpus
        self._token = preloaded.token
        self._launcher: ForkedLauncher | None = None
        self._channel: Channel | None = None
        self._directory: Path | None = None
        self._log_directory = Path()
        self._roster = Roster()
        self._gone: ProcessEnd | None = None
        self._gone_until = math.inf
        self._used_before: list[float] = []
        self._oom_kills_before = oom_kills()

    @property
    def alive(self) -> bool:
        """Whether the launcher and the channel are still there."""
        launcher = self._launcher
        return self._channel is not None and launcher is not None and launcher.poll() is None

    @property
    def pids(self) -> frozenset[int]:
        """Processes of the group now."""
        found = processes.members(self._token, exclude=[self._preloaded.pid])
        return frozenset(p.pid for p in found)

    def start(self, log_directory: Path, first: TrialRequest) -> Failure | None:
        """Start the ranks and wait until each is ready; on failure say why, nothing left.

        Args:
            log_directory: where they log until the first trial.
            first: what they will be asked first; the process group is made to fit it.

        """
        self._log_directory = log_directory.absolute()
        self._log_directory.mkdir(parents=True, exist_ok=True)
        Leavings(self._log_directory, self.spec.world_size).clear()
        self._used_before = hardware.used_gib(self._gpus)
        self._directory = socket_directory()
        listener = Listener(self._directory / SOCKET_FILE)
        try:
            self._spawn(first)
            deadline = time.monotonic() + self._limits.startup_s
            self._channel = listener.accept(self._limits.startup_s, self._launcher_runs)
            while True:
                message = self._receive(deadline)
                if message["event"] == "ready":
                    break
        except (ChannelClosed, LauncherGone, TimeoutError) as error:
            timed_out = self._limits.startup_s if isinstance(error, TimeoutError) else None
            return self._fail(timed_out, starting=True)
        except BaseException:
            self.end(kill=True)
            raise
        finally:
            listener.close()
        self.info = message["info"]
        self._roster = Roster(message["ranks"])
        return self._shared_device()

    def _spawn(self, first: TrialRequest) -> None:
        assert self._directory is not None
        startup = Startup(
            spec=self.spec,
            token=self._token,
            controller_pid=os.getpid(),
            controller_started=processes.started_at(os.getpid()),
            log_directory=str(self._log_directory),
            group_values=first.group_values,
            group_env=first.group_env,
        )
        startup.write(self._directory)
        environment = {**os.environ, **self.spec.env, TOKEN_VARIABLE: self._token}
        if self.spec.capture_nccl:
            environment["NCCL_DEBUG"] = "INFO"
            environment["NCCL_DEBUG_SUBSYS"] = "TUNING"
            environment["NCCL_DEBUG_FILE"] = str(self._directory / NCCL_LOG_FILE)
        log = self._log_directory / "launcher.log"
        self._launcher = self._preloaded.fork(
            self._directory, environment, log, self._limits.startup_s
        )

    def _launcher_runs(self) -> bool:
        return self._launcher is not None and self._launcher.poll() is None

    def _shared_device(self) -> Failure | None:
        shared = None if self.spec.device == "cpu" else self._roster.shared_device()
        if shared is None:
            return None
        from perfsearch.core.trial import Status

        self.end(kill=True)
        reason, rank = shared
        return Failure(Status.INFRASTRUCTURE, reason, rank)

    def run(self, request: TrialRequest, timeout_s: float) -> Reply:
        """Have one configuration measured, within ``timeout_s``.

        A failed trial leaves the group usable when its ranks recovered within the grace time;
        otherwise the group is ended here.
        """
        assert self._channel is not None and self._directory is not None
        self._log_directory = Path(request.log_directory).absolute()
        Leavings(self._log_directory, self.spec.world_size).clear()
        options = dict(request.recipe_options)
        if self.spec.capture_nccl:
            options["nccl_log"] = str(self._directory / NCCL_LOG_FILE)
        request = replace(
            request,
            serial=self.requests,
            log_directory=str(self._log_directory),
            recipe_options=options,
        )
        self.requests += 1
        self._oom_kills_before = oom_kills()
        deadline = time.monotonic() + timeout_s
        failing_since: float | None = None
        try:
            self._channel.send({"op": "trial", "request": request.to_json()})
            while True:
                message = self._receive(deadline)
                if message["event"] == "outcome":
                    break
                failing_since = time.monotonic()
                deadline = min(deadline, failing_since + self._limits.grace_s)
        except (ChannelClosed, TimeoutError) as error:
            timed_out = timeout_s if isinstance(error, TimeoutError) else None
            return Reply(failure=self._fail(timed_out), alive=False)
        except BaseException:
            self.end(kill=True)
            raise
        if message["errors"]:
            errors = [RankError(**e) for e in message["errors"]]
            left = Leavings(self._log_directory, self.spec.world_size)
            evidence = Evidence(
                errors=errors,
                log_tails=left.tails(),
                oom_kills=self._new_kills(),
                disk_full=left.cannot_be_written(),
            )
            return Reply(failure=classify(evidence))
        return Reply(message=message)

    def _receive(self, deadline: float) -> dict[str, Any]:
        assert self._channel is not None
        while True:
            left = min(deadline, self._gone_until) - time.monotonic()
            if left <= 0:
                raise TimeoutError
            try:
                return self._channel.receive(min(left, _POLL_S))
            except TimeoutError:
                if not self._launcher_runs():
                    raise ChannelClosed("the launcher is gone") from None
                if self._gone is None and (ended := self._roster.ended()):
                    self._gone = ended[0]
                    self._gone_until = time.monotonic() + self._limits.grace_s

    def _fail(self, timed_out: float | None, starting: bool = False) -> Failure:
        """Gather what can be known of the failure, and end what is left."""
        assert self._directory is not None
        launcher = self._launcher
        gone = self._gone if timed_out is not None else None
        if gone is not None:
            timed_out = None
        if launcher is not None and timed_out is None and not (gone and self._roster.some_run()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(self._limits.grace_s)
        places = {}
        if timed_out is not None:
            places = failures.ask_for_stacks(
                self._directory, self._log_directory, self.spec.world_size
            )
        left = Leavings(self._log_directory, self.spec.world_size)
        code = launcher.poll() if launcher is not None and timed_out is None else None
        ends, launcher_error = launcher_report(self._directory, code)
        if gone is not None and not ends:
            ends = [gone]
        if launcher is None and timed_out is None:
            launcher_error = f"it ended while importing torch; see {self._log_directory.parent}"
        evidence = Evidence(
            errors=left.errors(),
            ends=ends,
            launcher_error=launcher_error,
            log_tails=left.tails(),
            oom_kills=self._new_kills(),
            timed_out=timed_out,
            starting=starting,
            places=places,
            disk_full=left.cannot_be_written(),
        )
        self.end(kill=True)
        return classify(evidence)

    def _new_kills(self) -> int:
        return max(0, oom_kills() - self._oom_kills_before)

    def end(self, kill: bool = False) -> None:
        """End every process of the group and wait until its devices are free.

        Args:
            kill: whether to skip asking the ranks to end by themselves.

        """
        if self._launcher is None:
            self._remove_directory()
            return
        if not kill and self.alive and self._channel is not None:
            with contextlib.suppress(ChannelClosed, subprocess.TimeoutExpired):
                self._channel.send({"op": "close"})
                self._launcher.wait(self._limits.grace_s)
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        grace_s = self._limits.grace_s if not kill else 1.0
        processes.end_all(self._token, grace_s, exclude=[self._preloaded.pid])
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(self._limits.grace_s)
        self._launcher = None
        if self._gpus:
            hardware.wait_until_free(self._gpus, self._used_before, self._limits.grace_s)
        self._remove_directory()

    def _remove_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


# -----------------------------------------------------------------------------
# The ranks of a group as each told of itself: where it runs, on which device, as which process.


class Roster:
    """Ranks that have reported.

    Args:
        ranks: of each, ``host``, ``device``, ``pid`` and ``started``.

    """

    def __init__(self, ranks: Sequence[Mapping[str, Any]] = ()) -> None:
        self._ranks = ranks

    def shared_device(self) -> tuple[str, int] | None:
        """What is wrong where two ranks are on one device, and the second of them."""
        places = [(r["host"], r["device"]) for r in self._ranks]
        for rank, place in enumerate(places):
            if place in places[:rank]:
                first = places.index(place)
                return f"ranks {first} and {rank} are on the same device {place[1]}", rank
        return None

    def ended(self) -> list[ProcessEnd]:
        """Ranks on this host whose processes are gone, though the launcher still runs.

        The launcher looks away from one that ended with 0, and sees another only when the last of
        the processes that it started has ended, too.
        """
        ended = []
        for rank, process in enumerate(self._ranks):
            place = process["pid"], process["started"]
            if process["host"] == os.uname().nodename and not processes.is_alive(*place):
                # Had its launcher taken note of another code, it would have ended the group.
                code = processes.exit_code(*place)
                ended.append(ProcessEnd(rank, 0 if code is None else code, time.time()))
        return ended

    def some_run(self) -> bool:
        """Whether another rank still runs, so that the launcher will not end soon."""
        return len(self.ended()) < len(self._ranks)
