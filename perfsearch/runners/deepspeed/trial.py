"""One start of the user's command, from its launch to what its ranks left behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from perfsearch.core.hardware import Gpu
from perfsearch.core.objective import Limits
from perfsearch.core.trial import Measurement, Outcome, Status
from perfsearch.instrument.user_files import UserFiles
from perfsearch.runners.deepspeed import request
from perfsearch.runners.deepspeed.request import Request
from perfsearch.workers.failures import Evidence, Failure, ProcessEnd, classify, refusal
from perfsearch.workers.group import GroupGone, RankGroup
from perfsearch.workers.launchers.base import CannotStartError
from perfsearch.workers.launchers.local import Command
from perfsearch.workers.messages import TORCH_LOGS, rank_log
from perfsearch.workers.results import combine

_POLL_S = 0.1
_OF_THE_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_HOOK = Path(__file__).parent / "path"
_BUILDING = (
    "an operator was still being compiled. Start the job once by hand, so that it is kept, or set "
    "limits.startup_s to more"
)


@dataclass(frozen=True)
class Start:
    """What is started.

    Attributes:
        words: the command.
        request: what its ranks are request.
        ranks: how many report.
        run_dir: where it is put on record.
        limits: time limits.
        gpus: that it uses.
        variables: environment beside the controller's own.
        files: keeps what the job changes of the user's files; ``None``: nothing does.

    """

    words: Sequence[str]
    request: Request
    ranks: int
    run_dir: Path
    limits: Limits
    gpus: tuple[Gpu, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    files: UserFiles | None = None


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class DeepSpeedGroup(RankGroup):
    """The ranks of one start; they say nothing on the way, and leave files at their end.

    Args:
        start: the command.

    """

    def __init__(self, start: Start) -> None:
        launch = Command(start.words, start.run_dir)
        super().__init__(launch, start.ranks, start.limits, start.gpus)
        self._start = start
        self.log_to(Path(start.request.log_directory))
        for rank in range(start.ranks):
            request.result_file(self.logs, rank).unlink(missing_ok=True)
            request.ended_file(self.logs, rank).unlink(missing_ok=True)

    def results(self, limit_s: float) -> list[dict[str, Any]]:
        """Start the command, and wait until every rank has left what it measured.

        Raises:
            GroupGone: one is gone without, or the time is over.
            CannotStartError: there is no such command.

        """
        self.launch(self._prepare)
        deadline = time.monotonic() + limit_s
        while True:
            runs = self.runs  # whatever one that has ended wanted to leave is there
            files = [request.result_file(self.logs, rank) for rank in range(self._world_size)]
            if all(file.exists() for file in files):
                return [json.loads(file.read_text()) for file in files]
            if not runs:
                raise GroupGone()
            self.watch(deadline, limit_s)
            time.sleep(_POLL_S)

    def _prepare(self, directory: Path) -> dict[str, str]:
        files, request = self._start.files, self._start.request
        if files is not None:
            request = replace(request, undo=files.begin(self.token))
        request.write(directory)
        return environment_of(self._start)

    def _ask_to_end(self) -> None:
        """They end by themselves once their results are there."""

    def _is_starting(self) -> bool:
        return False

    def _ended(self) -> list[ProcessEnd]:
        ended = []
        for rank in range(self._world_size):
            record = request.ended(self.logs, rank)
            # a process that a rank has started, as to compile an operator, ends at its own start
            if record is not None and record["phase"] == "train":
                ended.append(ProcessEnd(rank, 0, time.time()))
        return ended

    def _classify(self, evidence: Evidence, code: int | None) -> Failure:
        return failure_of(evidence, code, self.logs, self._world_size)


def run(start: Start, time_limit_s: float) -> Outcome:
    """Start the command, wait for its ranks' results, and leave no process behind.

    Args:
        start: the command.
        time_limit_s: seconds from the first step's start to the last one's end; ``startup_s`` is
            given on top of it.

    """
    group, begin = DeepSpeedGroup(start), time.time()
    logs = Path(start.request.log_directory)
    launcher_log = logs / group.launcher_log.name
    try:
        results = group.results(time_limit_s + start.limits.startup_s)
        group.end()
        return _measured(results, logs)
    except CannotStartError as error:
        return Outcome(Status.INVALID, None, str(error), str(launcher_log), True)
    except GroupGone as gone:
        failure, timed_out = group.why_gone(gone), gone.limit_s is not None
    finally:
        group.end(kill=True)
        if start.files is not None:
            start.files.end()
        _remove_torch_logs(logs)
    if _break_build_locks(begin) and timed_out:
        failure = replace(failure, reason=f"{failure.reason}; {_BUILDING}")
    rank_file = rank_log(logs, failure.rank or 0)
    where = rank_file if rank_file.exists() else launcher_log
    return Outcome(failure.status, None, failure.reason, str(where), True)


def train(words: Sequence[str]) -> int:
    """Run a command in the foreground, as its user would; return its exit code."""
    process = subprocess.Popen(list(words))
    try:
        code = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    return code if code >= 0 else 128 - code


def environment_of(start: Start) -> dict[str, str]:
    """The environment of the command."""
    environment = {**os.environ, **start.variables}
    for name in _OF_THE_LAUNCHER:
        environment.pop(name, None)
    path = [str(_HOOK), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(path)
    environment[request.VARIABLE] = str(start.request.path.absolute())
    # torchrun's --log-dir; without it torch leaves a new directory behind at every start.
    environment.setdefault("PET_LOG_DIR", str(Path(start.request.log_directory) / TORCH_LOGS))
    own = str(Path(sys.executable).parent)
    found = environment.get("PATH", os.defpath).split(os.pathsep)
    if own not in found:  # an environment that was not activated; its launcher is found there
        environment["PATH"] = os.pathsep.join([*found, own])
    return environment


def _break_build_locks(begin: float) -> bool:
    """Remove locks on compiled operators that ended ranks may have left.

    torch keeps such a lock while an operator is built or loaded. One that outlives its process
    would stop every later start for good. Only those made since ``begin`` can be this trial's.

    Returns:
        Whether there was one.

    """
    found = False
    default = os.path.expanduser("~/.cache/torch_extensions")
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or default)
    for lock in [*root.glob("*/lock"), *root.glob("*/*/lock")]:
        with contextlib.suppress(FileNotFoundError):
            if lock.stat().st_mtime >= begin:
                lock.unlink()
                found = True
    return found


def _remove_torch_logs(logs: Path) -> None:
    """Remove the directory that torch's launcher makes, unless the user named one for it.

    A launcher around torch's own, such as Accelerate's, has it made among the temporary files.
    """
    shutil.rmtree(logs / TORCH_LOGS, ignore_errors=True)
    told = request.torch_logs_file(logs)
    if told.exists():
        made = Path(json.loads(told.read_text())["directory"])
        told.unlink()
        if made.parent == Path(tempfile.gettempdir()).resolve() and made.name.startswith(
            "torchelastic_"
        ):
            shutil.rmtree(made, ignore_errors=True)


def _measured(results: Sequence[dict[str, Any]], logs: Path) -> Outcome:
    combined = combine(list(results))
    measurement = Measurement(**combined["measurement"])
    log = str(rank_log(logs, 0))
    return Outcome(Status(combined["status"]), measurement, combined["reason"], log, True)


# -----------------------------------------------------------------------------
# What a start of a DeepSpeed job failed of, told from its exit code and its ranks' logs.

_TOO_SHORT = (
    "the script ended after {steps} steps, before enough of them were scored. Let it run for "
    "longer, or set autotuning.start_profile_step and end_profile_step to less"
)

_FATAL = tuple(
    getattr(signal, f"SIG{name}") for name in ("ILL", "ABRT", "BUS", "FPE", "KILL", "SEGV", "TERM")
)
_OF_REFUSALS = (2, -signal.SIGTERM)
"""argparse's exit code, and that of a rank which its launcher ended when another had refused."""


def failure_of(evidence: Evidence, code: int | None, logs: Path, ranks: int) -> Failure:
    """Name what a start that was not measured failed of.

    Args:
        evidence: what is known of any group's end.
        code: exit code of the command; ``None``: it has none, as it did not end by itself.
        logs: where its ranks left what they had to say.
        ranks: how many there were to be.

    """
    tails, errors = evidence.log_tails, evidence.errors
    timed_out = evidence.timed_out is not None
    if not (errors or timed_out or code or evidence.disk_full):
        return _ended_early(logs, ranks)
    known = errors or timed_out or not tails
    ends = (
        [] if known or code is None else [ProcessEnd(_guilty(tails), own_code(code), time.time())]
    )
    failure = classify(replace(evidence, ends=ends, launcher_error=""))
    refused = refusal(tails.get(failure.rank or 0, ""))
    if refused and ends and ends[0].exit_code in _OF_REFUSALS:
        reason = f"rank {ends[0].rank} refused its arguments: {refused}"
        return Failure(Status.CRASH, reason, ends[0].rank)
    if tails or evidence.disk_full:
        return failure
    if timed_out:
        return replace(failure, reason=f"{failure.reason}, and no rank of it was ever seen")
    return Failure(Status.CRASH, f"the command ended with exit code {code} before any rank began")


def own_code(code: int) -> int:
    """The exit code of a rank that its launcher passed on; negative for a signal.

    Shells add 128 to a signal's number; DeepSpeed's launcher ends itself with -15, which gives 241.
    """
    if 256 - code in _FATAL:
        return code - 256
    return 128 - code if 128 < code <= 128 + signal.SIGRTMAX else code


def _guilty(tails: Mapping[int, str]) -> int:
    """The rank whose log speaks of an error or a refusal, or the first."""
    speaks = (r for r, text in sorted(tails.items()) if "Error" in text or refusal(text))
    return next(speaks, min(tails, default=0))


def _ended_early(logs: Path, ranks: int) -> Failure:
    records = [(rank, request.ended(logs, rank)) for rank in range(ranks)]
    seen = [(rank, record) for rank, record in records if record is not None]
    for rank, record in seen:
        if record["phase"] == "train":
            return Failure(Status.INVALID, _TOO_SHORT.format(steps=record["steps"]), rank)
    if seen:
        reason = "the script ended without calling deepspeed.initialize"
        return Failure(Status.INVALID, reason, seen[0][0])
    return Failure(Status.CRASH, "the command ended well, but no rank of it was ever seen")
