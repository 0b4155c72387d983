"""Stage 3: ask, screen, measure, record, tell, until the budget ends."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Sequence

from perfsearch.core.hints import ChainResult
from perfsearch.core.journal import Journal
from perfsearch.core.knob import Value
from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.pipeline.session import BreakerError, Session
from perfsearch.runners.base import Screens
from perfsearch.strategies.base import StrategyError

MAX_SERVED = 200
"""Proposals answered from the record, or screened, in a row before the search ends."""

CHAIN_LINES = 20
"""Lines on the terminal for a chain over simulated configurations."""


def run(session: Session) -> str:
    """Search until something says stop, and return what did.

    Raises:
        BreakerError: too many failures in a row, any failure with ``on_failure=stop``, or a
            strategy that cannot go on.

    """
    session.view.stage("search", session.strategy.describe())
    budget, served = session.settings.budget, 0
    _check_breakers(session)
    _sentinel(session)
    while True:
        begin = time.monotonic()
        reason = budget.spent(
            len(session.search_trials), session.search_seconds, session.runner.devices
        )
        reason = reason or _out_of_patience(session, budget.patience)
        if reason and not session.only_rerun:
            return reason
        if session.only_rerun and not session.rerun:
            return "the failed trials were run again"
        if served >= MAX_SERVED:
            return f"the last {MAX_SERVED} proposals brought nothing new"
        configuration, number = _next(session)
        if configuration is None:
            return session.strategy.stop_reason or "the strategy has nothing more to propose"
        unprofitable = "" if number is not None else _no_longer_pays(session)
        if unprofitable:
            return unprofitable
        if number is None and _answered_without_running(session, configuration):
            served += 1
            session.search_seconds += time.monotonic() - begin
            continue
        served = 0
        left = budget.seconds_left(session.search_seconds, session.runner.devices)
        if left is not None:
            left = max(0.0, left - (time.monotonic() - begin))
        trial = session.run(configuration, Purpose.SEARCH, number=number, seconds_left=left)
        session.search_seconds += time.monotonic() - begin
        if trial.status is Status.INTERRUPTED:
            continue  # cut off, which the budget says in its turn
        session.strategy.tell(trial)
        session.told(trial=trial.number)
        _check_breakers(session, trial)
        _sentinel(session)


def _next(session: Session) -> tuple[dict[str, Value] | None, int | None]:
    """The trial that a kill left unfinished, or else a new proposal."""
    if session.rerun:
        return session.rerun.pop(0)
    try:
        configuration = session.strategy.ask()
    except StrategyError as error:
        raise BreakerError(str(error)) from error
    _show_chains(session)
    if configuration is not None:
        session.journal.append("asked", configuration=configuration)
    return configuration, None


def _show_chains(session: Session) -> None:
    """Show chains over simulated configurations: some of their points here, all in MLflow."""
    while session.strategy.chain_results:
        chain = session.strategy.chain_results.pop(0)
        if session.simulated:
            session.simulated -= 1  # one that a resumed search has in its journal already
        else:
            _record_chain(session.journal, chain)
        every = -(-len(chain.series) // CHAIN_LINES) or 1
        for row, (iteration, current, proposed, best) in enumerate(chain.series, start=1):
            if row % every == 0:
                session.view.note(
                    f"iter({iteration}) cur({1e3 * current:.4g}) next({1e3 * proposed:.4g}) "
                    f"best({1e3 * best:.4g})"
                )
        session.view.note(chain.note)


def _record_chain(journal: Journal, chain: ChainResult) -> None:
    """Keep a chain's points in the journal, from which MLflow has its series."""
    series: dict[str, list[tuple[int, float]]] = {}
    for iteration, *seconds in chain.series:
        for name, value in zip(("cur", "next", "best"), seconds, strict=True):
            if math.isfinite(value):
                series.setdefault(f"simulated/{name}_ms", []).append((iteration, 1e3 * value))
    journal.append("simulated", unix_s=time.time(), series=series)


def _no_longer_pays(session: Session) -> str:
    """Why the next trial would cost more time than its promised gain can save; or empty.

    Over ``budget.remaining_steps`` steps of training, by the gain that the strategy expects of its
    last proposal.
    """
    steps, gain, best = (
        session.settings.budget.remaining_steps,
        session.strategy.expected_gain,
        session.best,
    )
    if steps is None or gain is None or best is None or best.measurement is None:
        return ""
    cost_s = statistics.median(t.seconds for t in session.search_trials)
    saving_s = steps * best.measurement.step_time_s * gain
    if saving_s >= cost_s:
        return ""
    return (
        f"budget.remaining_steps={steps}: the next trial would cost {cost_s:.1f} s and promises "
        f"to save {saving_s:.1f} s"
    )


def _out_of_patience(session: Session, patience: int | None) -> str:
    """Whether the last trials brought no new best, the baseline being the first one."""
    if patience is None:
        return ""
    best, since = session.baseline_cost, 0
    for trial in session.search_trials:
        valid = trial.status is Status.OK and trial.cost is not None
        if valid and (best is None or (trial.cost or 0.0) < best):
            best, since = trial.cost, 0
        else:
            since += 1
    return f"budget.patience={patience}: no new best in {since} trials" if since >= patience else ""


def _answered_without_running(session: Session, configuration: dict[str, Value]) -> bool:
    """Tell a repeated or impossible proposal from the record, free of budget."""
    known = session.recorded(configuration)
    if known is not None:
        session.strategy.tell(known)
        session.told(trial=known.number, served=True)
        return True
    return screened(session, configuration) is not None


def screened(session: Session, configuration: dict[str, Value]) -> str | None:
    """Why a rule or arithmetic refuses it, which is then on record; ``None`` where it may run."""
    runner = session.runner
    refusal = "; ".join(runner.space.broken(configuration)) or None
    if refusal is None and isinstance(runner, Screens):
        refusal = runner.screen(configuration)
    if refusal is None:
        return None
    session.screened += 1
    session.journal.append("screened", configuration=configuration, reason=refusal)
    session.strategy.tell(screened_trial(configuration, refusal))
    session.view.note(f"screened: {refusal}")
    return refusal


def screened_trial(configuration: dict[str, Value], reason: str) -> Trial:
    """What the strategy is told of a configuration that arithmetic refused."""
    return Trial(-1, configuration, Purpose.SEARCH, Status.INVALID, reason=reason)


def failures_in_a_row(trials: Sequence[Trial]) -> int:
    """How many of the latest baseline and search trials failed, whoever is to blame."""
    latest_first = filter(_counts, reversed(trials))
    return sum(1 for _ in itertools.takewhile(lambda t: t.status.has_failed, latest_first))


def _counts(trial: Trial) -> bool:
    of_search = trial.purpose in (Purpose.BASELINE, Purpose.SEARCH)
    return of_search and trial.status is not Status.INTERRUPTED


def _check_breakers(session: Session, trial: Trial | None = None) -> None:
    """Stop after too many failures; without ``trial`` by what an earlier run left."""
    if trial is None:
        if session.only_rerun:
            return  # their failures are what is being run again
        session.consecutive_failures = failures_in_a_row(session.trials)
        trial = next((t for t in reversed(session.trials) if _counts(t)), None)
        if trial is None:
            return
    else:
        failed = trial.status.has_failed
        session.consecutive_failures = session.consecutive_failures + 1 if failed else 0
    if trial.status.has_failed and session.settings.on_failure == "stop":
        raise BreakerError(f"on_failure=stop: trial {trial.number} ended {trial.status}")
    limit = session.settings.limits.consecutive_failures
    if session.consecutive_failures >= limit:
        raise BreakerError(
            f"{limit} trials failed in a row (limits.consecutive_failures={limit}); "
            f"the last: {trial.status}, {trial.reason}"
        )


def _sentinel(session: Session) -> None:
    """Measure the baseline again every so often; drift beyond the noise recycles the processes."""
    every, count = session.settings.sentinel_every, len(session.search_trials)
    before = session.baseline_cost
    sentinels = [t for t in session.trials if t.purpose is Purpose.SENTINEL]
    done = [t for t in sentinels if t.status is not Status.INTERRUPTED]
    if not every or before is None or count // every <= len(done):
        return
    trial = session.measure_baseline_again()
    if trial.cost is None:
        session.recycle = True
        return
    first = session.baseline
    error = max(trial.cost_error or 0.0, (first.cost_error if first else None) or 0.0)
    drift = math.log(trial.cost / before)
    if abs(drift) > max(0.03, 4 * math.sqrt(2) * error):
        session.view.warning(
            f"the baseline now reads {100 * (math.exp(-drift) - 1):+.1f}% against before: "
            "the processes are started anew, and only the confirmation decides"
        )
        session.recycle = True
