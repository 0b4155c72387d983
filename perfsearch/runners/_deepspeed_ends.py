"""What a start of a DeepSpeed job failed of, told from its exit code and its ranks' logs."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from perfsearch.core.trial import Status
from perfsearch.deepspeed_hook import request as asked
from perfsearch.workers.failures import Evidence, Failure, ProcessEnd, classify, refusal
from perfsearch.workers.leavings import Leavings

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
