"""One start of the user's command, from its launch to what its ranks left behind."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from perfsearch.core import hardware
from perfsearch.core.hardware import Gpu
from perfsearch.core.objective import Limits
from perfsearch.core.trial import Measurement, Status
from perfsearch.runners.base import Outcome
from perfsearch.runners.deepspeed import hook as asked
from perfsearch.runners.deepspeed import path as hook_path
from perfsearch.runners.deepspeed.hook import Request
from perfsearch.workers import processes
from perfsearch.workers import processes as registry
from perfsearch.workers.failures import (
    Evidence,
    Failure,
    Leavings,
    ProcessEnd,
    classify,
    oom_kills,
    refusal,
)
from perfsearch.workers.messages import TOKEN_VARIABLE, TORCH_LOGS, rank_log
from perfsearch.workers.results import combine

_POLL_S = 0.1
_LAUNCHER_LOG = "launcher.log"
_OF_THE_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_HOOK = Path(hook_path.__file__).parent
_BUILDING = (
    "an operator was still being compiled. Start the job once by hand, so that it is kept, or set "
    "limits.startup_s to more"
)


@dataclass(frozen=True)
class Start:
    """What is started.

    Attributes:
        words: the command.
        request: what its ranks are asked.
        ranks: how many report.
        run_dir: where it is put on record.
        limits: time limits.
        gpus: that it uses.
        variables: environment beside the controller's own.

    """

    words: Sequence[str]
    request: Request
    ranks: int
    run_dir: Path
    limits: Limits
    gpus: tuple[Gpu, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(start: Start, time_limit_s: float) -> Outcome:
    """Start the command, wait for its ranks' results, and leave no process behind.

    Args:
        start: the command.
        time_limit_s: seconds from the first step's start to the last one's end; ``startup_s`` is
            given on top of it.

    """
    logs = Path(start.request.log_directory)
    logs.mkdir(parents=True, exist_ok=True)
    _clear(logs, start.ranks)
    start.request.write()
    token = uuid.uuid4().hex
    registry.record_group(start.run_dir, token, Path())
    used = hardware.used_gib(start.gpus)
    kills, begin = oom_kills(), time.time()
    with (logs / _LAUNCHER_LOG).open("ab") as log:
        log.write(f"{shlex.join(start.words)}\n".encode())
        log.flush()
        try:
            process = subprocess.Popen(
                list(start.words),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(start, token),
                start_new_session=True,
            )
        except OSError as error:
            registry.forget_group(start.run_dir, token)
            reason = f"{start.words[0]}: {error.strerror}"
            return Outcome(Status.INVALID, None, reason, str(logs / _LAUNCHER_LOG), True)
    try:
        limit_s = time_limit_s + start.limits.startup_s
        timed_out = _wait(process, logs, start.ranks, limit_s)
    finally:
        _end(process, token, start)
        registry.forget_group(start.run_dir, token)
        _remove_torch_logs(logs)
        if start.gpus:
            hardware.wait_until_free(start.gpus, used, start.limits.grace_s)
    results = _results(logs, start.ranks)
    if results is not None:
        return _measured(results, logs)
    was_building = _break_build_locks(begin)
    failure = failure_of(
        Path(start.request.log_directory),
        start.ranks,
        process.returncode,
        limit_s if timed_out else None,
        oom_kills() - kills,
    )
    if timed_out and was_building:
        failure = replace(failure, reason=f"{failure.reason}; {_BUILDING}")
    rank_file = rank_log(logs, failure.rank or 0)
    where = rank_file if rank_file.exists() else logs / _LAUNCHER_LOG
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


def _environment(start: Start, token: str) -> dict[str, str]:
    environment = {**os.environ, **start.variables}
    for name in _OF_THE_LAUNCHER:
        environment.pop(name, None)
    path = [str(_HOOK), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(path)
    environment[asked.VARIABLE] = str(start.request.path.absolute())
    environment[TOKEN_VARIABLE] = token
    # torchrun's --log-dir; without it torch leaves a new directory behind at every start.
    environment.setdefault("PET_LOG_DIR", str(Path(start.request.log_directory) / TORCH_LOGS))
    own = str(Path(sys.executable).parent)
    found = environment.get("PATH", os.defpath).split(os.pathsep)
    if own not in found:  # an environment that was not activated; its launcher is found there
        environment["PATH"] = os.pathsep.join([*found, own])
    return environment


def _wait(process: subprocess.Popen[bytes], logs: Path, ranks: int, limit_s: float) -> bool:
    """Wait for the end, or for every rank's result; whether the time was over before."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if process.poll() is not None or _results(logs, ranks) is not None:
            return False
        time.sleep(_POLL_S)
    return True


def _end(process: subprocess.Popen[bytes], token: str, start: Start) -> None:
    """Let it end by itself where its ranks are done, and end what is left."""
    if _results(Path(start.request.log_directory), start.ranks) is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(start.limits.grace_s)
    processes.end_all(token, 1.0)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(start.limits.grace_s)


def _break_build_locks(begin: float) -> bool:
    """Remove locks on compiled operators that ended ranks may have left.

    torch keeps such a lock while an operator is built or loaded. One that outlives its process
    would stop every later start for good. Only those made since ``begin`` can be this trial's.

    Returns:
        Whether there was one.

    """
    found = False
    default = Path.home() / ".cache" / "torch_extensions"
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or default)
    for lock in [*root.glob("*/lock"), *root.glob("*/*/lock")]:
        with contextlib.suppress(FileNotFoundError):
            if lock.stat().st_mtime >= begin:
                lock.unlink()
                found = True
    return found


def _clear(logs: Path, ranks: int) -> None:
    Leavings(logs, ranks).clear()
    for rank in range(ranks):
        asked.result_file(logs, rank).unlink(missing_ok=True)
        asked.ended_file(logs, rank).unlink(missing_ok=True)


def _remove_torch_logs(logs: Path) -> None:
    """Remove the directory that torch's launcher makes, unless the user named one for it.

    A launcher around torch's own, such as Accelerate's, has it made among the temporary files.
    """
    shutil.rmtree(logs / TORCH_LOGS, ignore_errors=True)
    told = asked.torch_logs_file(logs)
    if told.exists():
        made = Path(json.loads(told.read_text())["directory"])
        told.unlink()
        if made.parent == Path(tempfile.gettempdir()) and made.name.startswith("torchelastic_"):
            shutil.rmtree(made, ignore_errors=True)


def _results(logs: Path, ranks: int) -> list[dict[str, Any]] | None:
    files = [asked.result_file(logs, rank) for rank in range(ranks)]
    if not all(file.exists() for file in files):
        return None
    return [json.loads(file.read_text()) for file in files]


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


def failure_of(
    logs: Path, ranks: int, code: int | None, timed_out: float | None, kills: int
) -> Failure:
    """Name what a start that was not measured failed of.

    Args:
        logs: where its ranks left what they had to say.
        ranks: how many there were to be.
        code: exit code of the command; ``None``: it has none.
        timed_out: seconds after which it was ended, where it was.
        kills: by the host's OOM killer, meanwhile.

    """
    left = Leavings(logs, ranks)
    tails, errors = left.tails(), left.errors()
    if not errors and timed_out is None and code == 0:
        return _ended_early(logs, ranks)
    known = errors or timed_out is not None or not tails
    ends = (
        [] if known or code is None else [ProcessEnd(_guilty(tails), own_code(code), time.time())]
    )
    failure = classify(
        Evidence(
            errors=errors,
            ends=ends,
            log_tails=tails,
            oom_kills=max(0, kills),
            timed_out=timed_out,
        )
    )
    refused = refusal(tails.get(failure.rank or 0, ""))
    if refused and ends and ends[0].exit_code in _OF_REFUSALS:
        reason = f"rank {ends[0].rank} refused its arguments: {refused}"
        return Failure(Status.CRASH, reason, ends[0].rank)
    if tails:
        return failure
    return Failure(Status.CRASH, f"the command ended with exit code {code} before any rank began")


def own_code(code: int) -> int:
    """The exit code of a rank that its launcher passed on; negative for a signal.

    Shells add 128 to a signal's number; DeepSpeed's launcher ends itself with -15, which gives 241.
    """
    if 256 - code in _FATAL:
        return code - 256
    return 128 - code if 128 < code <= 128 + signal.SIGRTMAX else code


def _guilty(tails: Mapping[int, str]) -> int:
    """The rank whose log speaks of an error, or the first."""
    return next((r for r, text in sorted(tails.items()) if "Error" in text), min(tails, default=0))


def _ended_early(logs: Path, ranks: int) -> Failure:
    for rank in range(ranks):
        file = asked.ended_file(logs, rank)
        if not file.exists():
            continue
        record = json.loads(file.read_text())
        if record["phase"] != "train":
            reason = "the script ended without calling deepspeed.initialize"
            return Failure(Status.INVALID, reason, rank)
        return Failure(Status.INVALID, _TOO_SHORT.format(steps=record["steps"]), rank)
    return Failure(Status.CRASH, "the command ended well, but no rank of it was ever seen")
