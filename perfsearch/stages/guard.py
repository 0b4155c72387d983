"""Between a stage and its runner: nothing that a runner raises ends a search."""

from __future__ import annotations

import contextlib
import traceback

from perfsearch.core.knob import Configuration
from perfsearch.core.trial import Status
from perfsearch.runners.base import Outcome, Plan, Runner

LOG = "controller.log"
"""File of a trial's log directory with the traceback of what the runner itself raised."""


def measure(runner: Runner, configuration: Configuration, plan: Plan) -> Outcome:
    """What came of the trial; an exception of the runner is a failed trial with its traceback.

    A system call that failed says nothing of the configuration; anything else may.
    """
    try:
        return runner.measure(configuration, plan)
    except Exception as error:
        log = plan.log_directory / LOG
        with contextlib.suppress(OSError):  # a full disk may be the very cause
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("a") as file:
                traceback.print_exc(file=file)
        lines = str(error).strip().splitlines() or [""]
        status = Status.INFRASTRUCTURE if isinstance(error, OSError) else Status.CRASH
        reason = f"the runner raised {type(error).__name__}: {lines[0]}"
        return Outcome(status, reason=reason, log_path=str(log), fresh_process=plan.fresh)
