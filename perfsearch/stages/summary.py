"""The numbers by which whole searches are compared, and lines about a search as a whole."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from perfsearch.core.space import key_of
from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.stages import gains
from perfsearch.stages.session import BASELINE, Session, Verdict

if TYPE_CHECKING:
    from perfsearch.stages.session import Result


def summarise(session: Session, verdict: Verdict) -> dict[str, float]:
    """The numbers by which whole searches are compared, by MLflow metric name."""
    numbers: dict[str, float] = {}
    handed_over = _handed_over_cost(session, verdict)
    if handed_over is not None:  # the UI's views begin with the first one
        numbers["objective/value"] = session.objective.from_cost(handed_over)
    numbers |= {
        "search/seconds": session.search_seconds,
        "search/trials": len(session.search_trials),
        "search/failed_trials": sum(t.status.has_failed for t in session.search_trials),
        "search/screened": session.screened,
        "confirm/seconds": sum(t.seconds for t in verdict.trials),
    }
    within = trials_until_within(session.search_trials, 0.02)
    if within is not None:
        numbers["search/trials_until_within_2_percent"] = within
    interval = verdict.interval
    if interval is not None:
        numbers["search/speed_up"] = interval.ratio
        if interval.is_told:
            numbers["search/speed_up_low"] = interval.low
            numbers["search/speed_up_high"] = interval.high
    bound = gains.bound(session)
    if bound is not None and math.isfinite(bound):
        numbers["search/speed_up_bound"] = 1 + bound
    warm = [t.overhead_seconds for t in session.search_trials if not t.fresh_process]
    if warm:
        numbers["search/warm_trial_overhead_s"] = statistics.median(warm)
    return numbers


def trials_until_within(trials: list[Trial], fraction: float) -> int | None:
    """Number of search trials after which the best reading was within ``fraction`` of the last."""
    best, history = None, []
    for trial in trials:
        if trial.status is Status.OK and trial.cost is not None:
            best = trial.cost if best is None else min(best, trial.cost)
        history.append(best)
    if best is None:
        return None
    limit = best * (1 + fraction)
    return next(i for i, cost in enumerate(history, start=1) if cost is not None and cost <= limit)


def break_even_line(session: Session, verdict: Verdict) -> str:
    """After how many steps of training the search has paid for itself; empty without a gain."""
    if verdict.winner is None or BASELINE not in verdict.costs:
        return ""
    measured = {
        arm: [
            t.measurement
            for t in verdict.trials
            if t.measurement is not None and key_of(t.configuration) == key_of(configuration)
        ]
        for arm, configuration in (
            (BASELINE, session.runner.baseline),
            (verdict.winner, session.numbered(verdict.winner).configuration),
        )
    }
    steps = {arm: statistics.median(m.step_time_s for m in each) for arm, each in measured.items()}
    samples = {arm: each[0].samples_per_step for arm, each in measured.items()}
    # with batch=free a step of the one may train more than a step of the other
    share = samples[BASELINE] / samples[verdict.winner]
    saved_s = steps[BASELINE] - share * steps[verdict.winner]
    spent_s = sum(t.seconds for t in session.trials)
    if saved_s <= 0:
        return ""
    which = "steps" if share == 1 else f"steps of {samples[BASELINE]} samples"
    return (
        f"the search took {spent_s:.0f} s of trials and has paid for itself after "
        f"{math.ceil(spent_s / saved_s)} {which}"
    )


def trial_cost_lines(trials: list[Trial]) -> list[str]:
    """What a trial cost beside its scored steps, warm and with new processes."""
    lines = []
    for fresh, label in ((False, "a warm trial"), (True, "a trial in new processes")):
        chosen = [
            t
            for t in trials
            if t.fresh_process is fresh
            and t.status is Status.OK
            and t.purpose is not Purpose.BASELINE
        ]
        if not chosen:
            continue
        overheads = sorted(t.overhead_seconds for t in chosen)
        discarded = [t.measurement.discarded_seconds for t in chosen if t.measurement]
        p90 = overheads[min(len(overheads) - 1, int(0.9 * len(overheads)))]
        lines.append(
            f"{label} cost {statistics.median(overheads):.2f} s (90th percentile {p90:.2f} s) "
            f"beside its scored steps and {statistics.median(discarded):.2f} s of discarded ones "
            f"({len(chosen)} trials)"
        )
    return lines


def batch_line(session: Session, result: Result) -> str:
    """What became of the global batch, which ``batch=free`` lets change."""
    numbers = (0, result.verdict.winner or 0)
    trials = [session.find(n) for n in numbers]
    sizes = [t.measurement.samples_per_step if t and t.measurement else None for t in trials]
    if None in sizes or sizes[0] == sizes[1]:
        return "batch=free: the global batch may differ from the baseline's"
    return f"batch=free: the global batch is {sizes[1]}, the baseline's is {sizes[0]}"


def _handed_over_cost(session: Session, verdict: Verdict) -> float | None:
    arm = BASELINE if verdict.winner is None else verdict.winner
    costs = verdict.costs.get(arm)
    if costs:
        return statistics.median(costs)
    return session.baseline_cost
