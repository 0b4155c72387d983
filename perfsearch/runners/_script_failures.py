"""Why a script did not get as far as a measurement, in words that say what to do."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from perfsearch.core.knob import Value
from perfsearch.core.trial import Measurement, Status
from perfsearch.instrument.mapping import Mapped
from perfsearch.runners._script_group import ScriptGone, ScriptGroup
from perfsearch.runners._script_window import EndedError, disagreement
from perfsearch.runners.base import Outcome
from perfsearch.workers.failures import Failure, refusal
from perfsearch.workers.messages import rank_log

UNCOUNTED = (
    "no batch of a DataLoader was seen, so that samples cannot be counted. Give "
    "workload.samples_per_step=N, the samples of a step over all ranks"
)

_LAUNCHER_REFUSED = re.compile(r"launcher: UsageError: (.*)")
"""How torchrun's own parser ends."""


def outcome(
    group: ScriptGroup,
    error: ScriptGone | EndedError,
    changed: Mapping[str, Value],
    maps: Sequence[Mapped],
) -> Outcome:
    """The outcome of a start that failed; what is left of it is ended.

    Args:
        group: the start.
        error: how it was noticed.
        changed: knobs that were not as the script has them.
        maps: where knobs go in the script's arguments.

    """
    log = str(group.log)
    if isinstance(error, EndedError):
        return Outcome(error.status, None, str(error), log)
    steps, ended, tails = list(group.steps), list(group.ended), group.tails()
    failure = group.why_gone(error)
    if ended and len(ended) < group.nproc:
        return Outcome(Status.INVALID, None, disagreement(steps, ended), log)
    refused = _LAUNCHER_REFUSED.match(failure.reason)
    if refused:
        variables = ", ".join(sorted(n for n in os.environ if n.startswith("PET_")))
        reason = f"torchrun refused its options: {refused[1]}"
        reason += f" (it takes options from the environment, too: {variables})" * bool(variables)
        return Outcome(Status.INVALID, None, reason, str(group.launcher_log))
    path = rank_log(group.logs, failure.rank or 0)
    log = str(path if path.exists() or failure.rank is not None else group.launcher_log)
    tail = tails.get(failure.rank or 0, "") or next(iter(group.tails().values()), "")
    return Outcome(*_status_and_reason(failure, tail, steps, changed, maps, error), log_path=log)


def _status_and_reason(
    failure: Failure,
    tail: str,
    steps: Sequence[int],
    changed: Mapping[str, Value],
    maps: Sequence[Mapped],
    error: ScriptGone,
) -> tuple[Status, None, str]:
    reason = failure.reason
    if "exit code" in reason:
        refused = refusal(tail)
        if refused:
            blamed = [m for m in maps if m.argument and m.argument in refused]
            reason += f": {refused}"
            if blamed:
                reason += f" (from --map {blamed[0].name}={blamed[0].argument})"
            return Status.INVALID, None, reason
    if failure.status is Status.TIMEOUT:
        made = ", ".join(f"rank {rank} made {n} steps" for rank, n in enumerate(steps))
        reason = f"no answer in {round(error.limit_s or 0.0, 1):g} s: {made}"
        if failure.standing:
            reason += f"; {failure.standing}"
        if not any(steps):
            reason += ". A step is counted when a torch optimizer has stepped; if the script only "
            reason += "begins slowly, raise limits.trial_s"
        return failure.status, None, reason
    if not any(steps) and failure.status in (Status.CRASH, Status.INVALID):
        reason += " (before the first step)"
    return failure.status, None, reason


def judge(
    measurement: Measurement, losses: Sequence[float] | None, lost: Mapping[str, str]
) -> tuple[Status, str]:
    """Status and reason of a script that got as far as a measurement.

    Args:
        measurement: what was measured.
        losses: of the first steps; ``None`` where none were seen.
        lost: knobs that are not in force, and why.

    """
    if not measurement.samples_per_step:
        return Status.INVALID, UNCOUNTED
    bad = next((loss for loss in losses or () if not math.isfinite(loss)), None)
    if bad is not None:
        return Status.DIVERGED, f"the loss is {bad} in one of the first steps"
    if lost:
        return Status.NOT_APPLIED, "; ".join(lost.values())
    return Status.OK, ""


def require_ranks_together(first: Sequence[Mapping[str, Any]], world_size: int) -> None:
    """Refuse a script whose ranks each train alone.

    Raises:
        EndedError: they do.

    """
    joined = first[0]["joined"]
    if world_size > 1 and joined == 1 and not first[0]["facts"]["wrappers"]:
        raise EndedError(
            f"its {world_size} ranks train apart from each other: no process group was made, and "
            "the model is wrapped in no DistributedDataParallel or FSDP. Wrap it "
            "(init_process_group, DistributedDataParallel(model)), or search one rank: nproc=1"
        )
