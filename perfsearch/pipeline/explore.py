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
from perfsearch.pipeline.lanes import Lanes
from perfsearch.pipeline.session import BreakerError, Running, Session
from perfsearch.runners.base import Screens
from perfsearch.strategies.base import StrategyError

MAX_SERVED = 200
"""Proposals answered from the record, or screened, in a row before the search ends."""

_NOTHING_MORE = "the strategy has nothing more to propose"

_ALIKE = 0.03
"""Readings of the baseline that differ by less are alike, however exact they are."""

CHAIN_LINES = 20
"""Lines on the terminal for a chain over simulated configurations."""


def run(session: Session) -> str:
    """Search until something says stop, and return what did.

    With several lanes a trial is proposed for each that is free; the strategy is told of trials in
    the order in which they end.

    Raises:
        BreakerError: too many failures in a row, any failure with ``on_failure=stop``, or a
            strategy that cannot go on. What was under way is measured to its end.

    """
    session.view.stage("search", session.proposals.describe())
    _check_breakers(session)
    _sentinel(session)
    with Lanes(session, range(session.lanes)) as lanes:
        return _Exploration(session, lanes).run()


class _Exploration:
    """The loop over trials, as many at a time as there are lanes."""

    def __init__(self, session: Session, lanes: Lanes) -> None:
        self._session, self._lanes = session, lanes
        self._served = 0
        self._over = ""  # why no further trial is started, for good
        self._broken: BreakerError | None = None
        self._waits = False  # whether the strategy must be told more before it is asked again
        self._sentinel_is_due = False
        self._charged_s = time.monotonic()

    def run(self) -> str:
        """Go on until nothing more is to be started, and what was started has ended."""
        session = self._session
        while True:
            why = self._fill()
            if self._lanes.count:
                self._take(self._lanes.wait())
            elif self._broken is not None:
                raise self._broken
            elif self._sentinel_is_due:  # alone on the devices
                _sentinel(session)
                self._sentinel_is_due = False
                self._charged_s = time.monotonic()
            else:
                return why

    def _fill(self) -> str:
        """Start trials while a lane is free; return why no more may be started at present."""
        session = self._session
        while self._lanes.free and not self._waits and not self._sentinel_is_due:
            if self._over or self._broken is not None:
                return self._over
            if session.proposals.failure:  # of being told
                self._broken = BreakerError(session.proposals.failure)
                return ""
            why = self._spent()
            if why:
                return why
            try:
                configuration, number = _next(session)
            except BreakerError as error:
                self._broken = error
                return ""
            if configuration is None and self._lanes.count:
                # What is under way may change its mind. It is on record, as asking changes it.
                session.journal.append("asked", configuration=None)
                self._waits = True
            elif configuration is None:
                self._over = session.strategy.stop_reason or _NOTHING_MORE
            else:
                self._over = self._start(configuration, number)
        return self._over

    def _spent(self) -> str:
        """Why nothing more may be proposed now; trials that are under way count as started."""
        session = self._session
        budget, started = session.settings.budget, len(session.search_trials) + self._lanes.count
        self._charge()
        reason = budget.spent(started, session.search_seconds, session.devices)
        reason = reason or _out_of_patience(session, budget.patience)
        if reason and not session.only_rerun:
            return reason
        if session.only_rerun and not session.rerun:
            return "the failed trials were run again"
        if self._served >= MAX_SERVED:
            return f"the last {MAX_SERVED} proposals brought nothing new"
        return ""

    def _start(self, configuration: dict[str, Value], number: int | None) -> str:
        """Measure it, or answer it without; return why it is neither, as it does not pay."""
        session = self._session
        unprofitable = "" if number is not None else _no_longer_pays(session)
        if unprofitable:
            return unprofitable
        if number is None and _answered_without_running(session, configuration):
            self._served += 1
            return ""
        self._served = 0
        self._charge()
        left = session.settings.budget.seconds_left(session.search_seconds, session.devices)
        number = session.next_number if number is None else number
        self._lanes.start(Running(number, configuration, Purpose.SEARCH, seconds_left=left))
        return ""

    def _take(self, trial: Trial) -> None:
        """Tell the strategy of a trial that ended, and see what follows."""
        session, self._waits = self._session, False
        self._charge()
        if trial.status is Status.INTERRUPTED:
            return  # cut off, which the budget says in its turn
        session.proposals.tell(trial)
        session.told(trial=trial.number)
        try:
            _check_breakers(session, trial)
        except BreakerError as error:
            self._broken = self._broken or error
        self._sentinel_is_due = _sentinel_is_due(session)

    def _charge(self) -> None:
        """Charge the budget with the time since the last call."""
        now = time.monotonic()
        self._session.search_seconds += now - self._charged_s
        self._charged_s = now


def _next(session: Session) -> tuple[dict[str, Value] | None, int | None]:
    """The trial that a kill left unfinished, or else a new proposal."""
    if session.rerun:
        return session.rerun.pop(0)
    try:
        configuration = session.proposals.ask()
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
        session.proposals.tell(known)
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
    session.proposals.tell(screened_trial(configuration, refusal))
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


def _sentinel_is_due(session: Session) -> bool:
    """Whether so many trials have ended that the baseline is measured again."""
    every, count = session.settings.sentinel_every, len(session.search_trials)
    done = [t for t in session.sentinels if t.status is not Status.INTERRUPTED]
    return every > 0 and session.baseline_cost is not None and count // every > len(done)


def _sentinel(session: Session) -> None:
    """Measure the baseline again every so often; drift beyond the noise recycles the processes."""
    before = session.baseline_cost
    if before is None or not _sentinel_is_due(session):
        return
    trial = session.measure_baseline_again()
    if trial.cost is None:
        session.recycle_all()
        return
    first = session.baseline
    error = max(trial.cost_error or 0.0, (first.cost_error if first else None) or 0.0)
    drift = math.log(trial.cost / before)
    if abs(drift) > allowed_change(math.sqrt(2) * error):
        session.view.warning(
            f"the baseline now reads {100 * (math.exp(-drift) - 1):+.1f}% against before: "
            "the processes are started anew, and only the confirmation decides"
        )
        session.recycle_all()


def allowed_change(error: float) -> float:
    """The most that two readings of the same may differ by chance, as a difference of logarithms.

    Args:
        error: standard error of their difference.

    """
    return max(_ALIKE, 4 * error)
