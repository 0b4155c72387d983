"""The five stages of a search, in their order."""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from perfsearch.config import default_run_dir
from perfsearch.core.errors import BadInputError
from perfsearch.core.hints import Hints
from perfsearch.core.journal import JOURNAL, Journal, JournalWriteError
from perfsearch.core.objective import Objective
from perfsearch.core.space import Space
from perfsearch.core.trial import Status, Trial
from perfsearch.exits import ExitCode, deferred
from perfsearch.lock import device_lock, run_directory_lock
from perfsearch.runners.base import Runner
from perfsearch.stages import (
    adopt,
    baseline,
    confirm,
    gains,
    opening,
    record,
    run_directory,
    warm_start,
)
from perfsearch.stages import search as searching
from perfsearch.stages.search import BreakerError
from perfsearch.stages.session import Result, Session, Verdict, View
from perfsearch.stages.warm_start import TakenOver
from perfsearch.strategies.base import Strategy
from perfsearch.tracking import open_tracker

if TYPE_CHECKING:
    from perfsearch.config import Settings
    from perfsearch.metrics.system import SystemSampler
    from perfsearch.tracking import Tracker


PROFILED = "mode=profile: the baseline was measured, and nothing searched"


def search(
    settings: Settings,
    runner: Runner,
    strategy_factory: Callable[[Space, Hints], Strategy],
    view: View,
    tracker_factory: Callable[[Settings, Path, str], Tracker] = open_tracker,
) -> Result:
    """Run a search from its start, or from where an earlier run of it ended, to its record.

    Args:
        settings: the checked configuration; after a finished search in its ``run_dir`` a
            numbered neighbour is used.
        runner: what measures; closed when this returns or raises.
        strategy_factory: builds the strategy from space and hints.
        view: what shows progress.
        tracker_factory: builds the MLflow view from the settings, the directory and the
            search's identifier.

    Raises:
        BadInputError: it may not start; nothing was started.
        Interrupted: a signal came; finished trials are recorded first.
    """
    begin = time.monotonic()
    with ExitStack() as stack:
        stack.callback(_close, runner)
        asked = settings.run_dir or default_run_dir(settings)
        named = settings.run_dir is not None
        directory, resuming = run_directory.choose_run_dir(asked.absolute(), settings.resume, named)
        if directory != asked.absolute():
            view.note(f"{asked} holds a finished search; this one is in {directory}")
        directory.mkdir(parents=True, exist_ok=True)
        stack.enter_context(run_directory_lock(directory))
        stack.enter_context(device_lock(runner.device_set(), view.note))
        runner.open(directory)
        taken_over = warm_start.take_over(
            settings,
            runner,
            opening.definition(settings, runner),
            directory / JOURNAL if resuming else None,
        )
        journal = opening.open_journal(directory, settings, runner, resuming)
        stack.callback(journal.close)
        if journal.dropped_line:
            view.warning(f"{journal.path}: dropped a line that was torn: {journal.dropped_line!r}")
        tracker = tracker_factory(settings, directory, str(journal.header["search_id"]))
        session = _session(
            settings, runner, strategy_factory, view, directory, journal, tracker, taken_over
        )
        session.sampler = _start_sampler(settings, runner)
        if session.sampler is not None:
            stack.callback(session.sampler.stop)
        try:
            record.open_record(session)
            result = _stages(session)
            result.seconds = time.monotonic() - begin
            record.close_record(session, result)
            journal.append("ended", exit_code=result.exit_code, reason=result.reason)
        except BaseException as error:
            _close(runner)  # no process waits for the view to be finished
            if isinstance(error, BadInputError):  # the same command would be refused again
                session.tracker.close("FAILED")
                raise
            if not _is_full_disk(error):
                record.interrupted(session)
                raise
            view.warning(f"{error}. Free some space, then give the same command to go on.")
            record.interrupted(session)
            result = Result(ExitCode.CIRCUIT_BREAKER, directory, session.trials, reason=str(error))
        return result


def _close(runner: Runner) -> None:
    with deferred():
        runner.close()


def _is_full_disk(error: BaseException) -> bool:
    """Whether the run directory cannot be written any more: nothing is wrong with the search."""
    causes = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
    is_written = isinstance(error, OSError) and error.errno in causes
    return is_written or isinstance(error, JournalWriteError)


def _session(
    settings: Settings,
    runner: Runner,
    strategy_factory: Callable[[Space, Hints], Strategy],
    view: View,
    directory: Path,
    journal: Journal,
    tracker: Tracker,
    taken_over: TakenOver,
) -> Session:
    trials: list[Trial] = []
    hints = replace(runner.hints(trials), earlier=taken_over.earlier)
    strategy = strategy_factory(runner.space, hints)
    objective = Objective(settings.objective.metric)
    return Session(
        settings,
        runner,
        strategy,
        journal,
        view,
        tracker,
        directory,
        objective,
        trials,
        taken_over,
    )


def _start_sampler(settings: Settings, runner: Runner) -> SystemSampler | None:
    """Sample this node while real devices are used; a replay has none."""
    devices = [name for name in runner.device_set().split(",") if name]
    if not devices:
        return None
    from perfsearch.metrics.system import SystemSampler

    uuids = [name for name in devices if name != "cpu"]
    sampler = SystemSampler(settings.metrics.interval_s, uuids, [os.getpid()])
    sampler.start()
    return sampler


def _stages(session: Session) -> Result:
    for remark in session.runner.remarks:
        session.view.note(remark)
    if session.taken_over.line:
        session.view.note(session.taken_over.line)
    if session.taken_over.warning:
        session.view.warning(session.taken_over.warning)
    line = adopt.adopt(session)
    if line:
        session.view.note(line)
    exit_code, verdict = ExitCode.DONE, Verdict()
    profiled = session.settings.mode == "profile"
    try:
        baseline.run(session)
        reason = PROFILED if profiled else gains.reason_to_stop(session) or searching.run(session)
    except BreakerError as error:
        exit_code, reason = ExitCode.CIRCUIT_BREAKER, str(error)
        session.view.warning(f"search ended: {reason}")
    else:
        if not profiled:  # the verdict says the same
            session.view.note(f"search ended: {reason}")
    if any(t.status is Status.OK for t in session.trials):
        verdict = Verdict(reason=PROFILED) if profiled else confirm.run(session)
    else:
        exit_code = ExitCode.NO_TRIAL_SUCCEEDED
        advice = session.runner.advice(session.trials)
        reason_why = _nothing_succeeded(session.trials)
        verdict.reason = f"{reason_why}. {advice}" if advice else reason_why
    best = session.runner.baseline
    if verdict.winner is not None:
        best = session.numbered(verdict.winner).configuration
    whole: dict[str, object] = {**session.runner.pinned, **best}
    return Result(exit_code, session.run_dir, session.trials, verdict, whole, dict(best), reason)


def _nothing_succeeded(trials: list[Trial]) -> str:
    if not trials:
        return "no trial succeeded: none was started"
    counts = Counter(str(t.status) for t in trials)
    causes = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    first = next((t for t in trials if t.log_path), trials[0])
    log = f"; full log of trial {first.number}: {first.log_path}" if first.log_path else ""
    return f"no trial succeeded: {causes}; the first: {first.reason}{log}"
