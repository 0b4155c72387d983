"""What failed ranks leave, and from it the status of a trial and its cause in one line.

``FailureFiles`` and ``launcher_report`` read what ranks and their launcher leave behind, and
``KernelMemory`` what the kernel does; ``classify`` is a pure function of all of that.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from perfsearch.core.trial import Status
from perfsearch.workers.messages import (
    AFTER_PEER,
    LAUNCHER_REPORT,
    PROFILING,
    RankError,
    rank_error_file,
    rank_log,
)
from perfsearch.workers.stack_dumps import in_words

_LOADER_TAIL = 4000  # characters of a log in which a loader process has left its last words

_TAIL_BYTES = 16_384
_PROBE_BYTES = 8_192  # what a rank may need to write down why it failed

SHARED_MEMORY = "shared memory of dataloader workers is used up"

_OOM = (
    r"OutOfMemoryError",
    r"(?:CUDA|HIP|XPU|MPS)(?: error)?:? out of memory",
    r"out of memory\b.*\b(?:cuda|hip|gpu)",
    r"CUBLAS_STATUS_ALLOC_FAILED",
    r"CUDNN_STATUS_ALLOC_FAILED",
    r"CUSPARSE_STATUS_ALLOC_FAILED|CUSOLVER_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED",
    r"hipErrorOutOfMemory|cudaErrorMemoryAllocation",
    r"(?:CUDACachingAllocator|HIPCachingAllocator).{0,200}INTERNAL ASSERT",
    r"INTERNAL ASSERT.{0,200}(?:CUDACachingAllocator|HIPCachingAllocator)",
    r"DefaultCPUAllocator: (?:can't|not enough) (?:allocate )?memory",
    r"Cuda failure.{0,8}'?out of memory",
    r"\bMemoryError\b",
    r"Cannot allocate memory|std::bad_alloc",
)
_HANDLE = (
    r"Create cublas handle failed|CUBLAS_STATUS_NOT_INITIALIZED|CUDNN_STATUS_NOT_INITIALIZED",
    r"CUDA driver error: device not ready",
)
_SHARED_MEMORY = (
    r"killed by signal: Bus error",
    r"insufficient shared memory",
    r"unable to (?:open|resize|allocate|mmap) .*shared memory|unable to write to file </torch_",
)
_USED_UP = (
    r"Too many open files|received 0 items of ancdata",
    r"can't start new thread|Resource temporarily unavailable",
)
"""Descriptors, processes or threads that the machine or its limits have no more of."""

_INFRASTRUCTURE = (
    *_USED_UP,
    r"EADDRINUSE|[Aa]ddress already in use",
    r"Rendezvous\w*(?:Error|Exception)",
    r"DistNetworkError|DistStoreError",
    r"The server socket has failed to (?:listen|bind)",
    r"TCPStore.{0,80}(?:timed out|Connection refused|failed)",
    r"No space left on device|\[Errno 28\]|Disk quota exceeded|database or disk is full",
    r"PytorchStreamWriter failed writing|inline_container.*unexpected pos",  # so says torch.save
    r"Read-only file system|\[Errno 30\]",
)
_ARGUMENTS_REFUSED = re.compile(r"^.*\berror: .*$", re.MULTILINE)

_PEER_LOST = (
    r"Connection closed by peer|Connection reset by peer|Connection refused",
    r"NCCL communicator was aborted|remote process exited|ncclRemoteError",
    r"Broken pipe|Socket closed|recvValue failed",
)
_REFUSAL_TYPES = frozenset(
    {"ValueError", "TypeError", "NotImplementedError", "AssertionError", "KeyError"}
)
_NO_ALGORITHM = re.compile(r"no algorithm/protocol available[^\n]*", re.IGNORECASE)
"""What NCCL says, or only its log, where its variables leave no way for an operation."""

_UNUSED = "Expected to have finished reduction"
UNUSED_REASON = (
    "DistributedDataParallel waits for gradients of parameters that the loss does not use. Freeze "
    "them (requires_grad_(False)), or take them out of the model"
)
_REFUSAL_TEXT = (
    _UNUSED,
    r"Expected to mark a variable ready only once",
    r"static[_ ]graph",
    r"is not supported|not implemented|unsupported|does not support|doesn't support",
    r"requires all the params|fused=True|foreach=True|`?fused`? (?:requires|and)",
    r"invalid (?:usage|argument)",
)


@dataclass(frozen=True)
class ProcessEnd:
    """How the launcher saw one rank end.

    Attributes:
        rank: which.
        exit_code: negative for a signal.
        time: seconds since the epoch.

    """

    rank: int
    exit_code: int
    time: float


@dataclass(frozen=True)
class Evidence:
    """Everything that is known of a failed trial.

    Attributes:
        errors: exceptions that ranks wrote down.
        ends: ranks that ended by themselves or by a signal.
        launcher_error: why the launcher failed, when not for a rank.
        log_tails: end of each rank's log, by rank.
        oom_kills: processes that the host's OOM killer ended meanwhile.
        memory: what the kernel says of the host's memory: peak and limit of the control group.
        timed_out: seconds of the limit that was exceeded.
        starting: whether it was still starting up.
        disk_full: why nothing can be written beside the logs; empty if it can. The cause may then
            be missing, or be another than what is left says.
        places: lines at which ranks stood when the time was over, by rank.
        lost: nodes of which nothing is to be heard any more, and why; empty where there is none.

    """

    errors: Sequence[RankError] = ()
    ends: Sequence[ProcessEnd] = ()
    launcher_error: str = ""
    log_tails: dict[int, str] = field(default_factory=dict)
    oom_kills: int = 0
    memory: str = ""
    timed_out: float | None = None
    starting: bool = False
    disk_full: str = ""
    places: dict[int, str] = field(default_factory=dict)
    lost: str = ""

    @property
    def own_ends(self) -> Sequence[ProcessEnd]:
        """Ends of ranks that did not say that they ended for want of another one."""
        echoes = {error.rank for error in self.errors if is_echo(error)}
        return [end for end in self.ends if end.rank not in echoes]


@dataclass(frozen=True)
class Failure:
    """What a failed trial is recorded as.

    Attributes:
        status: the kind.
        reason: the cause in one line, with the rank.
        rank: the first rank that failed, if one did.
        while_profiling: whether it was no part of the trial, but of the profile after it.
        stack_dump: what the reason says of where the ranks stood.

    """

    status: Status
    reason: str
    rank: int | None = None
    while_profiling: bool = False
    stack_dump: str = ""


def classify(evidence: Evidence) -> Failure:
    """Name the kind and the cause, from the first failing rank.

    Where a node is gone, all else follows from that.
    """
    if evidence.lost:
        return Failure(Status.INFRASTRUCTURE, evidence.lost)
    first = first_error(evidence.errors)
    if first is not None and not is_echo(first):
        return replace(_of_error(first, evidence), while_profiling=first.phase == PROFILING)
    if evidence.disk_full:
        reason = f"the ranks' logs cannot be written: {evidence.disk_full}"
        return Failure(Status.INFRASTRUCTURE, reason)
    if evidence.timed_out is not None:
        what = "start-up" if evidence.starting else "the trial"
        status = Status.INFRASTRUCTURE if evidence.starting else Status.TIMEOUT
        reason, stack_dump = f"{what} took longer than {evidence.timed_out:g} s", ""
        reason += _cause_in_logs(evidence.log_tails)
        if evidence.places:
            stack_dump = in_words(evidence.places)
            reason += f"; {stack_dump}"
        return Failure(status, reason, stack_dump=stack_dump)
    ends = evidence.own_ends or evidence.ends
    end = min(ends, key=lambda e: (e.time, e.exit_code == -signal.SIGTERM), default=None)
    if end is not None:
        return _of_end(end, evidence)
    if evidence.launcher_error:
        return _of_launcher(evidence)
    if first is not None:
        return _of_error(first, evidence)
    return _of_logs(evidence)


def is_echo(error: RankError) -> bool:
    """Whether a rank only says that another one is gone."""
    return error.phase == AFTER_PEER or _matches(_PEER_LOST, error.message)


def first_error(errors: Sequence[RankError]) -> RankError | None:
    """The earliest exception that is not the echo of another rank's; failing that, the earliest."""
    own = [e for e in errors if not is_echo(e)]
    return min(own or list(errors), key=lambda e: e.time, default=None)


def is_out_of_memory(error: BaseException, nearly_full: bool | None = None) -> bool:
    """Whether an exception tells of memory running out; asked where it was raised.

    Args:
        error: torch has a type for its own; those of cuBLAS, cuDNN, NCCL and its allocator on the
            host are ``RuntimeError``, and told by their text.
        nearly_full: whether the device had almost no memory left, where that could be read: failing
            to create a library's handle counts only then.

    """
    # nothing of torch's is there where a script fails before it has imported it, or in doing so
    of_torch = getattr(sys.modules.get("torch"), "OutOfMemoryError", MemoryError)
    if isinstance(error, MemoryError | of_torch):
        return True
    text = f"{type(error).__name__}: {error}"
    return is_oom(text) or (bool(nearly_full) and _matches(_HANDLE, text))


def is_oom(text: str) -> bool:
    """Whether the last words of a process tell of memory running out."""
    return _matches(_OOM, text)


def _of_error(error: RankError, evidence: Evidence) -> Failure:
    text = f"{error.type}: {error.message}"
    reason = f"rank {error.rank}: {one_line(text)}"
    if error.type == "KeyboardInterrupt":
        return Failure(Status.KILLED, f"rank {error.rank} was ended by SIGINT", error.rank)
    if _matches(_USED_UP, text):  # before shared memory, which a descriptor is needed for, too
        return Failure(Status.INFRASTRUCTURE, reason, error.rank)
    of_loader = "DataLoader worker" in text
    # the signal that ended a loader process stands in the cause, not in the message
    if _matches(_SHARED_MEMORY, f"{text}\n{error.traceback}" if of_loader else text):
        return Failure(Status.OOM, f"rank {error.rank}: {SHARED_MEMORY}", error.rank)
    if error.out_of_memory:
        return Failure(Status.OOM, reason, error.rank)
    if of_loader and re.search(r"by signal: |exited unexpectedly", text + error.traceback):
        return _of_loader(error, evidence, text + error.traceback, reason)
    if _matches(_INFRASTRUCTURE, text):
        return Failure(Status.INFRASTRUCTURE, reason, error.rank)
    if _matches(_PEER_LOST, error.message):
        connecting = evidence.starting or error.phase == "connect"
        kind = Status.INFRASTRUCTURE if connecting else Status.CRASH
        return Failure(kind, reason, error.rank)
    if unheard := _NO_ALGORITHM.search(f"{text}\n{evidence.log_tails.get(error.rank, '')}"):
        return Failure(Status.INVALID, f"rank {error.rank}: NCCL: {unheard[0]}", error.rank)
    if error.phase in ("build", "train") and (
        (error.phase == "build" and error.type in _REFUSAL_TYPES)
        or (error.type in ("RuntimeError", *_REFUSAL_TYPES) and _refused(error))
    ):
        if _UNUSED in error.message:
            reason = f"rank {error.rank}: {UNUSED_REASON}"
        return Failure(Status.INVALID, reason, error.rank)
    return Failure(Status.CRASH, reason, error.rank)


def _of_loader(error: RankError, evidence: Evidence, told: str, reason: str) -> Failure:
    """The end of a loader process."""
    if is_oom(evidence.log_tails.get(error.rank, "")[-_LOADER_TAIL:]):
        return Failure(Status.OOM, reason, error.rank)
    if not re.search(r"by signal: (?:Killed|Terminated|Interrupt|Hangup)", told):
        return Failure(Status.CRASH, reason, error.rank)
    if evidence.oom_kills:
        return Failure(Status.OOM, f"{reason}; {_oom_killer(evidence)}", error.rank)
    return Failure(Status.KILLED, reason, error.rank)


def _refused(error: RankError) -> bool:
    return _matches(_REFUSAL_TEXT, error.message) and not re.search(
        r"CUDA error|NCCL error|INTERNAL ASSERT", error.message
    )


def _of_end(end: ProcessEnd, evidence: Evidence) -> Failure:
    tail = evidence.log_tails.get(end.rank, "")
    if evidence.oom_kills and end.exit_code in _SIGKILLED:
        reason = f"rank {end.rank} was ended by {_oom_killer(evidence)}"
        return Failure(Status.OOM, reason, end.rank)
    if _matches(_USED_UP, last_words(tail)):  # to write down why takes a descriptor, too
        reason = f"rank {end.rank} ended{last_words(tail)}"
        return Failure(Status.INFRASTRUCTURE, reason, end.rank)
    if end.exit_code in _SIGABRT and (uncaught := _uncaught(tail)):
        return _of_uncaught(end, uncaught)
    if end.exit_code >= 0:
        if is_oom(tail):
            line = one_line(_line_of(tail, _OOM))
            return Failure(Status.OOM, f"rank {end.rank}: {line}", end.rank)
        reason = f"rank {end.rank} ended with exit code {end.exit_code}{last_words(tail)}"
        return Failure(Status.CRASH, reason, end.rank)
    name = signal_name(-end.exit_code)
    if end.exit_code == -signal.SIGBUS and _matches(_SHARED_MEMORY, tail):
        return Failure(Status.OOM, f"rank {end.rank}: {SHARED_MEMORY}", end.rank)
    if end.exit_code in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP):
        return Failure(Status.KILLED, f"rank {end.rank} was ended by {name}", end.rank)
    if is_oom(tail[-4000:]):
        line = one_line(_line_of(tail, _OOM))
        return Failure(Status.OOM, f"rank {end.rank}: {line}", end.rank)
    return Failure(Status.CRASH, f"rank {end.rank} died of {name}", end.rank)


_TERMINATED = re.compile(r"^terminate called after throwing.*\n\s*what\(\):\s*(.+)$", re.MULTILINE)
"""What the C++ runtime prints of an exception that nobody caught, before it aborts."""


def _uncaught(tail: str) -> str:
    """The exception of C++ that a rank was aborted for; empty: it was not."""
    found = _TERMINATED.findall(tail)
    return one_line(found[-1]) if found else ""


def _of_uncaught(end: ProcessEnd, uncaught: str) -> Failure:
    reason = f"rank {end.rank} died of SIGABRT: {uncaught}"
    if is_oom(uncaught):
        return Failure(Status.OOM, reason, end.rank)
    kind = Status.INFRASTRUCTURE if _matches(_INFRASTRUCTURE, uncaught) else Status.CRASH
    return Failure(kind, reason, end.rank)


_SIGKILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit codes of what the kernel has ended, by itself or below a shell."""

_SIGABRT = (-signal.SIGABRT, 128 + signal.SIGABRT)
"""Exit codes of what has aborted, by itself or below a shell."""


def _oom_killer(evidence: Evidence) -> str:
    memory = f" ({evidence.memory})" if evidence.memory else ""
    return f"the host's OOM killer{memory}"


def _of_launcher(evidence: Evidence) -> Failure:
    text = one_line(evidence.launcher_error)
    if evidence.oom_kills and text.endswith(signal_name(signal.SIGKILL)):
        return Failure(Status.OOM, f"launcher: it was ended by {_oom_killer(evidence)}")
    if text.startswith("UsageError: "):
        return Failure(Status.INVALID, f"launcher: {text}")  # the next start would end the same
    if _matches(_INFRASTRUCTURE, text) or evidence.starting:
        return Failure(Status.INFRASTRUCTURE, f"launcher: {text}")
    return Failure(Status.KILLED, f"launcher: {text}")


def _of_logs(evidence: Evidence) -> Failure:
    for rank, tail in sorted(evidence.log_tails.items()):
        if is_oom(tail):
            return Failure(Status.OOM, f"rank {rank}: {one_line(_line_of(tail, _OOM))}", rank)
    for rank, tail in sorted(evidence.log_tails.items()):
        words = last_words(tail)
        if _matches(_INFRASTRUCTURE, words):  # a full disk takes no word of the failure itself
            return Failure(Status.INFRASTRUCTURE, f"rank {rank} ended{words}", rank)
    kind = Status.INFRASTRUCTURE if evidence.starting else Status.CRASH
    return Failure(kind, "the ranks ended without a word")


def signal_name(number: int) -> str:
    """The name of a signal, as in ``SIGKILL``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def refusal(tail: str) -> str:
    """The line of a log with which a script refused its arguments, as argparse does; or empty."""
    return one_line((_ARGUMENTS_REFUSED.findall(tail) or [""])[-1])


_NO_WORDS = re.compile(
    r"^\[(?:rank\d+\]:)?\[?[WIE]\d|ScriptExitError: |^\[\d+\.\d+ s\] |^request \{"
)
"""Lines of a log that a job has not written itself: torch's warnings, and our own."""


def last_words(tail: str) -> str:
    """The last line that a job has written into its log, to go after a cause; or empty."""
    lines = (line.strip() for line in reversed(tail.splitlines()))
    line = next((line for line in lines if line and not _NO_WORDS.search(line)), "")
    return f'; its last line: "{one_line(line)}"' if line else ""


_RAISED = re.compile(r"^\s*((?:[\w.]+\.)?\w*(?:Error|Exception): .+)$", re.MULTILINE)


def _cause_in_logs(tails: Mapping[int, str]) -> str:
    """The last error that a rank has logged, to go after what it led to; or empty.

    A thread or a worker process that ends with one leaves its rank waiting.
    """
    for rank, tail in sorted(tails.items()):
        if "Traceback" in tail and (found := _RAISED.findall(tail)):
            return f"; rank {rank}'s log says: {one_line(found[-1])}"
    return ""


def one_line(text: str, limit: int = 300) -> str:
    """The first telling line of a message, cut to ``limit`` characters."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = lines[0] if lines else ""
    if line.endswith(":") and len(lines) > 1:
        line = f"{line} {lines[1]}"
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _line_of(text: str, patterns: Sequence[str]) -> str:
    for line in text.splitlines():
        if _matches(patterns, line):
            return line
    return text


def _matches(patterns: Sequence[str], text: str) -> bool:
    return any(re.search(pattern, text, re.IGNORECASE | re.DOTALL) for pattern in patterns)


@dataclass(frozen=True)
class FailureFiles:
    """Files in a trial's log directory from which a failure is told.

    Attributes:
        directory: the log directory.
        world_size: number of ranks.

    """

    directory: Path
    world_size: int

    def clear(self) -> None:
        """Remove the errors of an earlier attempt."""
        for rank in range(self.world_size):
            rank_error_file(self.directory, rank).unlink(missing_ok=True)

    def errors(self) -> list[RankError]:
        """Exceptions that ranks wrote down."""
        found = []
        for rank in range(self.world_size):
            path = rank_error_file(self.directory, rank)
            if path.exists():
                with contextlib.suppress(ValueError):  # its rank died while writing
                    found.append(RankError(**json.loads(path.read_text())))
        return found

    def cannot_be_written(self) -> str:
        """Why nothing more can be written beside the logs, such as a full disk; empty if it can."""
        try:
            with tempfile.TemporaryFile(dir=self.directory) as file:
                file.write(b"0" * _PROBE_BYTES)
                file.flush()
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def tails(self) -> dict[int, str]:
        """The end of each rank's log."""
        tails = {}
        for rank in range(self.world_size):
            path = rank_log(self.directory, rank)
            if path.exists():
                with path.open("rb") as log:
                    log.seek(max(0, path.stat().st_size - _TAIL_BYTES))
                    tails[rank] = log.read().decode(errors="replace")
        return tails


def launcher_report(directory: Path, code: int | None) -> tuple[list[ProcessEnd], str]:
    """How ranks ended, and why the launcher failed where it was not for a rank.

    Args:
        directory: the group's directory.
        code: the launcher's exit code; ``None`` where it still runs.

    """
    path = directory / LAUNCHER_REPORT
    if path.exists():
        report: dict[str, Any] = json.loads(path.read_text())
        ends = [ProcessEnd(**end) for end in report["failures"]]
        error = report["error"]
        return ends, f"{error['type']}: {error['message']}" if error else ""
    if code is not None and code < 0:
        return [], f"it was ended by {signal_name(-code)}"
    return [], ""
