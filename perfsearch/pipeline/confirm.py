"""Stage 4: the finalists and the baseline, interleaved, in fresh processes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from perfsearch.core.knob import Value
from perfsearch.core.space import key_of
from perfsearch.core.steps import ALIKE, TIMES_SEEN, Statistic, step_time_s
from perfsearch.core.trial import Measurement, Purpose, Status, Trial
from perfsearch.core.verdict import decided, interim_analyses, leader, paired_interval
from perfsearch.pipeline.session import BASELINE, Session, Verdict


def run(session: Session) -> Verdict:
    """Re-measure until the interval is narrow or the repeats are spent, and decide.

    Search readings of the finalists are not used: they were chosen for being small. An arm that
    fails once is out. A baseline that ran in the search and fails here leaves nothing to compare
    with: it is handed over, and nothing is claimed. Where it did not run in the search either, the
    best finalist that runs is handed over, with no speed-up stated.
    """
    settings = session.settings.confirm
    for key in ("finalists", "max_repeats"):
        if getattr(settings, key) == 0:
            return _unconfirmed(session, f"not confirmed (confirm.{key}=0)")
    finalists = choose_finalists(session)
    if not finalists:
        ran = any(t.status is Status.OK for t in session.search_trials)
        why = "no trial was faster than the baseline" if ran else "no search trial succeeded"
        if not session.search_trials:
            why = "nothing was tried beside the baseline"
        return Verdict(reason=f"{why}: no gain")
    return _compare(session, finalists)


def _compare(session: Session, finalists: Sequence[Trial]) -> Verdict:
    """Measure blocks of baseline and finalists, and compute the intervals when that is planned."""
    settings = session.settings.confirm
    many = "one finalist" if len(finalists) == 1 else f"{len(finalists)} finalists"
    session.view.stage("confirm", f"{many} against the baseline")
    arms: dict[int, dict[str, Value]] = {t.number: t.configuration for t in finalists}
    if session.baseline_cost is not None:
        arms[BASELINE] = dict(session.runner.baseline)
    verdict = Verdict(costs={arm: [] for arm in arms})
    planned = interim_analyses(settings.max_repeats)
    for block in range(settings.max_repeats):
        whole = _run_block(session, verdict, arms, block)
        if BASELINE in verdict.costs and BASELINE not in arms:
            return _without_reference(verdict)
        alive = _alive(session, verdict, arms)
        if not alive:
            verdict.reason = "every finalist failed in fresh processes: no gain is claimed"
            return verdict
        if BASELINE not in arms:
            break
        out_of_time = _seconds_left(session, verdict) == 0.0
        blocks = min(len(verdict.costs[arm]) for arm in arms)
        for arm in arms:
            del verdict.costs[arm][blocks:]  # of a block that was cut off
        if blocks < 2 and not whole:
            break
        if blocks < 2:
            continue  # one pair has no spread
        if blocks not in planned and not (out_of_time and blocks >= 2):
            continue
        verdict.intervals = {
            arm: paired_interval(
                verdict.costs[BASELINE], verdict.costs[arm], len(planned), len(finalists)
            )
            for arm in alive
        }
        intervals = {str(arm): vars(i) for arm, i in verdict.intervals.items()}
        session.journal.append("confirmed", blocks=blocks, intervals=intervals)
        if out_of_time or decided(verdict.intervals, settings.precision):
            break
    _decide(session, verdict, arms)
    return verdict


def _without_reference(verdict: Verdict) -> Verdict:
    """Nothing is claimed, as the baseline's repeat, which is the last trial, has failed."""
    failed = verdict.trials[-1]
    cause = failed.reason.partition(". ")[0]  # what to do about it was said when it failed
    verdict.intervals = {}
    verdict.reason = (
        f"the baseline failed in a fresh start ({failed.status}: {cause}), though it ran in the "
        "search: no speed-up can be stated, and the configuration of today is handed over"
    )
    return verdict


def _alive(session: Session, verdict: Verdict, arms: dict[int, dict[str, Value]]) -> list[int]:
    """Finalists that have not failed; without a baseline the next best where all have."""
    alive = [arm for arm in arms if arm != BASELINE]
    if not alive and BASELINE not in arms and session.baseline_cost is None:
        alive = _next_best(session, verdict, arms)
    return alive


def choose_finalists(session: Session, every: bool = False) -> list[Trial]:
    """The fastest distinct search trials that could be faster than the baseline.

    Args:
        session: the search.
        every: all of them, not as many as ``confirm.finalists`` says.

    """
    valid = [t for t in session.search_trials if t.status is Status.OK and t.cost is not None]
    reference = session.baseline_cost
    baseline_key = key_of(session.runner.baseline)
    candidates = [t for t in valid if key_of(t.configuration) != baseline_key]
    if reference is not None:
        candidates = [t for t in candidates if t.cost is not None and t.cost <= reference * 1.01]
    candidates.sort(key=lambda t: t.cost or 0.0)
    return candidates if every else candidates[: session.settings.confirm.finalists]


def _next_best(session: Session, verdict: Verdict, arms: dict[int, dict[str, Value]]) -> list[int]:
    """Go on down the list until one runs: without a baseline there is nothing to fall back on."""
    for trial in choose_finalists(session, every=True):
        if trial.number in verdict.costs:
            continue
        if _seconds_left(session, verdict) == 0.0:
            break
        verdict.costs[trial.number] = []
        arms[trial.number] = trial.configuration
        _run_block(session, verdict, arms, 0)
        if trial.number in arms:
            return [trial.number]
    return []


def _unconfirmed(session: Session, why: str) -> Verdict:
    """Nothing is claimed; what ran in the search is handed over where the baseline does not run."""
    best = session.best
    if session.baseline_cost is not None or best is None:
        return Verdict(reason=f"{why}, so no gain is claimed")
    return Verdict(winner=best.number, reason=f"{_rescued(session, best, best.cost)}; {why}")


def _rescued(session: Session, trial: Trial, cost: float | None) -> str:
    """What was found in the place of a baseline that does not run."""
    failed = session.baseline
    how = f" ({failed.status})" if failed is not None else ""
    rate = f"{session.objective.from_cost(cost):.4g} {session.unit}" if cost else "?"
    return (
        f"the baseline does not run{how}; trial {trial.number} does, at {rate}, and is handed "
        "over (no speed-up can be stated)"
    )


def _run_block(
    session: Session, verdict: Verdict, arms: dict[int, dict[str, Value]], block: int
) -> bool:
    """One process for each arm; the order is drawn, and reversed in every other block.

    Returns:
        Whether there was time for all of it.

    """
    generator = np.random.default_rng([session.settings.seed, 7, block // 2])
    order = [list(arms)[i] for i in generator.permutation(len(arms))]
    if block % 2:
        order.reverse()
    for arm in order:
        trial = _measured(session, arms[arm], block, _seconds_left(session, verdict))
        verdict.trials.append(trial)
        if trial.status is Status.INTERRUPTED:
            return False
        if trial.status is Status.OK and trial.cost is not None:
            verdict.costs[arm].append(trial.cost)
            continue
        session.view.warning(
            f"{'the baseline' if arm == BASELINE else f'finalist {arm}'} ended {trial.status} "
            f"in fresh processes: {trial.reason}"
        )
        del arms[arm]
        verdict.intervals.pop(arm, None)
        if arm == BASELINE:
            break  # whatever the others read, there is nothing to compare it with
    return True


def _seconds_left(session: Session, verdict: Verdict) -> float | None:
    """What the stage may still spend, earlier runs of the same search included."""
    limit = session.settings.confirm.seconds
    return None if limit is None else max(0.0, limit - sum(t.seconds for t in verdict.trials))


def _measured(
    session: Session, configuration: dict[str, Value], block: int, seconds_left: float | None
) -> Trial:
    """The trial of this arm and block: from an earlier run of the same search, or run now."""
    done = [t for t in session.trials if t.purpose is Purpose.CONFIRM]
    same = [t for t in done if key_of(t.configuration) == key_of(configuration)]
    whole = [t for t in same if t.status is not Status.INTERRUPTED]
    if len(whole) > block:
        return whole[block]
    torn = [t.number for t in same if t.status is Status.INTERRUPTED]
    return session.run(
        configuration,
        Purpose.CONFIRM,
        fresh=True,
        number=torn[0] if torn else None,
        seconds_left=seconds_left,
        profiled=block == 0,
    )


def _decide(session: Session, verdict: Verdict, arms: dict[int, dict[str, Value]]) -> None:
    alive = [arm for arm in arms if arm != BASELINE]
    if BASELINE not in arms and not any(verdict.costs[arm] for arm in alive):
        untried = session.numbered(alive[0])
        verdict.winner = untried.number
        why = _rescued(session, untried, untried.cost)
        verdict.reason = f"{why}; not confirmed in confirm.seconds"
        return
    if BASELINE not in arms:
        alive = [arm for arm in alive if verdict.costs[arm]]
        best = min(alive, key=lambda arm: min(verdict.costs[arm]))
        verdict.winner = best
        verdict.intervals = {}
        cost = statistics.median(verdict.costs[best])
        verdict.reason = _rescued(session, session.numbered(best), cost)
        return
    if not verdict.intervals:
        verdict.reason = "too few repeats for an interval: no gain is claimed"
        return
    first = leader(verdict.intervals)
    interval = verdict.intervals[first]
    disputed = _disputed(session, verdict, first) if interval.is_gain else ""
    if disputed:
        verdict.reason = f"no gain is claimed: trial {first} is {interval} as fast, {disputed}"
    elif interval.is_gain:
        verdict.winner = first
        verdict.reason = f"trial {first} is {interval} as fast as the baseline"
    else:
        said = "no gain beyond the noise" if interval.is_told else "no gain is claimed"
        verdict.reason = f"{said}: the best finalist is {interval}{_cut_short(session, verdict)}"


def _disputed(session: Session, verdict: Verdict, finalist: int) -> str:
    """Why a gain is none: the other statistic says that steps became longer; empty where not.

    Where slow steps recurred in every window of both, they are a part of the job that the median
    does not see, and nothing is disputed.
    """
    scored = session.objective.statistic
    other = Statistic.RATE if scored is Statistic.MEDIAN else Statistic.MEDIAN
    windows = {
        arm: [
            t.measurement
            for t in verdict.trials
            if t.measurement is not None and key_of(t.configuration) == key_of(configuration)
        ]
        for arm, configuration in (
            (BASELINE, session.runner.baseline),
            (finalist, session.numbered(finalist).configuration),
        )
    }
    if scored is Statistic.RATE and all(_recurs(m) for found in windows.values() for m in found):
        return ""
    before_s, after_s = (
        statistics.median(
            step_time_s(m.step_seconds, other) / (m.samples_per_step or 1) for m in windows[arm]
        )
        for arm in (BASELINE, finalist)
    )
    if after_s <= before_s * (1 + ALIKE):
        return ""
    return f"but by the {other} of its steps {after_s / before_s:.3g} times as slow"


def _recurs(measurement: Measurement) -> bool:
    """Whether a window has no slow steps but those that it has whole periods of."""
    return all(kind.times >= TIMES_SEEN for kind in measurement.reading.slow)


def _cut_short(session: Session, verdict: Verdict) -> str:
    """Which limit left open whether the best finalist is a gain; empty where it reads as none."""
    settings = session.settings.confirm
    interval = verdict.interval
    assert interval is not None
    if interval.half_width <= settings.precision or interval.ratio <= 1.0 + settings.precision:
        return ""
    if _seconds_left(session, verdict) == 0.0:
        return f"; confirm.seconds={settings.seconds:g} was over, and more time would tell more"
    return f"; more than confirm.max_repeats={settings.max_repeats} pairs would tell more"
