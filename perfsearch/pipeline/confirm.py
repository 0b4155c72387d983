"""Stage 4: the finalists and the baseline, interleaved, in fresh processes."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from perfsearch.config.schema import ConfirmSettings
from perfsearch.core import command
from perfsearch.core.figures import decimals, show_number
from perfsearch.core.knob import Value
from perfsearch.core.space import key_of
from perfsearch.core.steps import ALIKE, TIMES_SEEN, Statistic, step_time_s
from perfsearch.core.trial import Measurement, Purpose, Status, Trial
from perfsearch.core.verdict import (
    Answer,
    Expectation,
    Plan,
    Reading,
    expect,
    leader,
    plan_of_starts,
    told,
    too_few,
    two_kinds,
)
from perfsearch.pipeline.blocks import Blocks
from perfsearch.pipeline.session import BASELINE, LOSSES_UNSEEN, Session, Verdict

_READ_AGAIN = 5
"""Of so many of the best readings the finalists are chosen."""

_READINGS = 2
"""How often each of them is read again, at most."""

_AS_LONG_AS = 2.0
"""Fresh starts that this may take as long as: another finalist would take several."""

_AMPLE = 1.1
"""Time that is allowed for starts, as a multiple of what those before took."""

_QUIET = 0.01
"""Relative standard deviation between starts on a quiet machine: the least that is expected."""

_NORMAL = 1.4826
"""Standard deviation of normal readings, as a multiple of their median deviation."""

_SURE = 1.645
"""Standard errors that a reading exceeds by chance in 5%."""

_PROBABLE = 0.5
"""Share of such comparisons that show the gain, below which it is said that this one will not."""


def caution(session: Session) -> None:
    """Warn, before anything costs time, of so few repeats that they can hardly show a gain."""
    settings = session.settings.confirm
    why = too_few(settings.max_repeats) if settings.max_repeats and settings.finalists else None
    if why and session.settings.mode == "search":
        session.view.warning(f"confirm.max_repeats={settings.max_repeats}: {why}")


def run(session: Session) -> Verdict:
    """Choose the finalists, and measure them beside the baseline until the question is decided.

    Search readings of the finalists are not used: they were chosen for being small. An arm that
    fails once is out. A baseline that ran in the search and fails here leaves nothing to compare
    with: it is handed over, and nothing is claimed. Where it did not run in the search either, the
    best finalist that runs is handed over, with no speed-up stated.
    """
    settings = session.settings.confirm
    for key in ("finalists", "max_repeats"):
        if getattr(settings, key) == 0:
            return _unconfirmed(session, f"not confirmed (confirm.{key}=0)")
    found = candidates(session)
    if not found:
        ran = any(t.status is Status.OK for t in session.search_trials)
        why = "no trial was faster than the baseline" if ran else "no search trial succeeded"
        if not session.search_trials:
            why = "nothing was tried beside the baseline"
        scattered = _scattered(session) if ran else ""
        if scattered:
            return Verdict(reason=f"inconclusive: {why}, but {scattered}", is_open=True)
        return Verdict(reason=f"{why}: no gain")
    if session.baseline_cost is None:
        return _rescue(session, found)
    return _compare(session, found)


def _unconfirmed(session: Session, why: str) -> Verdict:
    """Nothing is claimed; what ran in the search is handed over where the baseline does not run."""
    best = session.best
    if session.baseline_cost is not None or best is None:
        return Verdict(reason=f"{why}, so no gain is claimed", is_open=True)
    return Verdict(winner=best.number, reason=f"{_rescued(session, best, best.cost)}; {why}")


def _scattered(session: Session) -> str:
    """By how much the baseline's own readings lie apart, where they may hide a gain that matters;
    empty where they do not.

    The spread is by the median deviation, as is the reading they are compared by: one slow reading
    of many hides nothing.
    """
    costs = [t.cost for t in _of_the_baseline(session) if t.cost]
    best = min((t.cost for t in session.search_trials if t.cost), default=None)
    if len(costs) < 2 or best is None:
        return ""
    logs = [math.log(cost) for cost in costs]
    middle = statistics.median(logs)
    spread = _NORMAL * statistics.median(abs(log - middle) for log in logs)
    hidden = middle - math.log(best) + _SURE * spread * math.sqrt(1 + 1 / len(costs))
    if hidden <= math.log1p(session.settings.objective.min_gain):
        return ""
    low, high = sorted(map(session.objective.from_cost, (min(costs), max(costs))))
    ends = " and ".join(show_number(end, decimals(high)) for end in (low, high))
    return (
        f"the baseline's own {len(costs)} readings lie between {ends} {session.unit}, so that a "
        f"gain of {math.expm1(hidden):.0%} is not excluded; repeat it where nothing else runs"
    )


# -----------------------------------------------------------------------------
# Who is a finalist.


def candidates(session: Session) -> list[Trial]:
    """Distinct search trials that could be faster than the baseline, the fastest first."""
    valid = [t for t in session.search_trials if t.status is Status.OK and t.cost is not None]
    reference = session.baseline_cost
    baseline_key = key_of(session.runner.baseline)
    found = [t for t in valid if key_of(t.configuration) != baseline_key]
    if reference is not None:
        found = [t for t in found if t.cost is not None and t.cost <= reference * 1.01]
    return sorted(found, key=lambda t: t.cost or 0.0)


def _choose(session: Session, found: Sequence[Trial], verdict: Verdict) -> dict[int, float]:
    """The finalists and what each is thought to cost, the fastest first.

    The smallest of many readings is small by chance, too. Reading the best few again, where that
    takes little beside a fresh start, tells which of them is the best.
    """
    count, best = session.settings.confirm.finalists, found[:_READ_AGAIN]
    costs = {t.number: [t.cost or 0.0] for t in best}
    rounds = _rounds(session, best) if len(best) > count else 0
    for number, trial in itertools.product(range(rounds), best):
        if trial.number not in costs:
            continue
        again = _measured(session, trial.configuration, number, Purpose.REPEAT, verdict)
        verdict.chosen_by.append(again)
        if again.status is Status.INTERRUPTED:
            break
        if again.cost is None:
            del costs[trial.number]
        else:
            costs[trial.number].append(again.cost)
    means = {arm: statistics.fmean(readings) for arm, readings in costs.items()}
    chosen = sorted(means, key=means.__getitem__)
    chosen += [t.number for t in found[_READ_AGAIN:]]
    return {arm: means.get(arm) or session.numbered(arm).cost or 0.0 for arm in chosen[:count]}


def _what_comes(session: Session, found: Sequence[Trial]) -> str:
    """One line on the starts that follow."""
    count = min(session.settings.confirm.finalists, len(found))
    best = "the best" if count == 1 else f"the best {count}"
    started = f"{best} and the baseline are started anew, block by block"
    close = found[:_READ_AGAIN]
    rounds = _rounds(session, close) if len(close) > count else 0
    if not rounds:
        return started
    again = f"the {len(close)} fastest are read up to {rounds} times more, to choose {best}"
    return f"{again}; then {started}"


def _rounds(session: Session, best: Sequence[Trial]) -> int:
    """How often the best are read again."""
    searched = [t for t in session.trials if t.purpose.is_of_search and t.status is Status.OK]
    fresh = [t.seconds for t in searched if t.fresh_process]
    round_s = sum(t.seconds for t in best)
    if not fresh or round_s <= 0:
        return 0
    return min(_READINGS, int(_AS_LONG_AS * statistics.median(fresh) / round_s))


# -----------------------------------------------------------------------------
# The finalists against the baseline.


def _compare(session: Session, found: Sequence[Trial]) -> Verdict:
    settings, verdict = session.settings.confirm, Verdict()
    session.view.stage("confirm", _what_comes(session, found))
    finalists = _choose(session, found, verdict)
    if not finalists:
        verdict.reason = "the best failed when they were measured again: no gain is claimed"
        return verdict
    arms: dict[int, dict[str, Value]] = {BASELINE: dict(session.runner.baseline)}
    arms |= {number: session.numbered(number).configuration for number in finalists}
    since, endings = _on_record(session, arms)
    plan = None
    if settings.max_repeats > 1:
        plan = plan_of_starts(
            settings.max_repeats,
            comparisons=len(finalists) * 2**endings,
            either_way=False,
            sharpness=settings.sharpness,
        )
        cost = next(iter(finalists.values()))
        assert session.baseline_cost is not None
        gain = max(session.baseline_cost / cost - 1, _QUIET)
        _announce(session, plan, gain, len(arms))

    def measure(arm: int, block: int) -> Trial:
        return _measured(session, arms[arm], block, Purpose.CONFIRM, verdict, since)

    blocks = Blocks(
        list(arms),
        plan,
        session.settings.seed,
        measure,
        lambda: _seconds_left(session, verdict) == 0.0,
        verdict.costs,
        verdict.trials,
    )

    def when_read(count: int) -> None:
        found = {str(arm): vars(reading.interval) for arm, reading in blocks.readings.items()}
        session.journal.append("confirmed", blocks=count, intervals=found)

    blocks.run(lambda arm, trial: _tell_failed(session, arm, trial), when_read)
    verdict.intervals = {arm: reading.interval for arm, reading in blocks.readings.items()}
    tell_two_kinds(session, {_name(arm): costs for arm, costs in verdict.costs.items()})
    if BASELINE in blocks.failed:
        verdict.reason, verdict.is_open = _without_reference(blocks.failed[BASELINE]), True
    elif len(blocks.arms) < 2:
        verdict.reason = "every finalist failed in fresh processes: no gain is claimed"
    elif not blocks.readings:
        verdict.reason, verdict.is_open = "inconclusive: too few repeats for an interval", True
    else:
        _decide(session, verdict, blocks.readings)
    return verdict


def _on_record(session: Session, arms: Mapping[int, Mapping[str, Value]]) -> tuple[int, int]:
    """From which trial on the confirmation's starts are of these very arms, and how often they were
    judged at the end of the search before.

    Starts of one arm that ran when others did are in no pair with these: where a search that goes
    on has found another finalist, all of it is measured anew. Whoever goes on until a gain is shown
    is wrong more often than he thinks, so that each further judgement may err half as often.
    """
    keys = sorted(key_of(configuration) for configuration in arms.values())
    since, endings, known = 0, 0, None
    for event in session.journal.of("finalists", "ended"):
        if event.name == "ended":
            endings += known == keys
        elif event.data["arms"] != known:
            known, since, endings = event.data["arms"], int(event.data["since"]), 0
    if known is not None and known != keys:
        since, endings = session.next_number, 0
    session.journal.append("finalists", arms=keys, since=since)
    return since, endings


def _announce(session: Session, plan: Plan, gain: float, arms: int) -> None:
    """Say what the comparison will come to, and warn where that is probably nothing."""
    noise = _noise(session)
    expected = expect(plan, noise, gain)
    session.view.note(_told(session, expected, noise, arms))
    session.view.expects(round(expected.mean_pairs * arms))
    if expected.power < _PROBABLE:
        warning = (
            f"this will probably be inconclusive: {plan.most} pairs show a gain of {gain:.1%} in "
            f"{expected.power:.0%} of such cases"
        )
        if most := _shows(plan, noise, gain):
            needed, limit = _seconds_for(session, most, arms), session.settings.confirm.seconds
            also = f" confirm.seconds={needed}" if limit is not None and needed > limit else ""
            warning += f"; confirm.max_repeats={most}{also} probably shows it"
        session.view.warning(warning)
        return
    needed, limit = _seconds_for(session, expected.pairs, arms), session.settings.confirm.seconds
    if limit is not None and needed > limit:
        keys = command.given().key(f"confirm.seconds={needed}")
        session.view.warning(
            f"confirm.seconds={limit:g} is too short for the {expected.pairs} pairs that half of "
            f"such comparisons take: {keys} would do"
        )


def _shows(plan: Plan, noise: float, gain: float) -> int:
    """Twice or four times the pairs of a plan where these probably show ``gain``; 0 where not."""
    for most in (2 * plan.most, 4 * plan.most):
        larger = replace(plan, looks=plan_of_starts(most).looks)
        if expect(larger, noise, gain).power >= _PROBABLE:
            return most
    return 0


def _start_s(session: Session) -> float | None:
    """How long a fresh start takes; ``None`` before there was one."""
    fresh = [t.seconds for t in session.trials if t.fresh_process and t.status is Status.OK]
    return statistics.median(fresh) if fresh else None


def _seconds_for(session: Session, pairs: int, arms: int) -> int:
    """What ``confirm.seconds`` has to be for so many pairs: a tenth more than the starts take."""
    return math.ceil(_AMPLE * pairs * arms * (_start_s(session) or 0.0))


def skipped(session: Session) -> dict[str, float]:
    """The limits by which a confirmation that was left out takes place; empty where none was."""
    chosen, usual = session.settings.confirm, ConfirmSettings()
    return {
        f"confirm.{key}": getattr(usual, key)
        for key in ("finalists", "max_repeats")
        if getattr(chosen, key) == 0
    }


def larger_limits(session: Session, verdict: Verdict) -> dict[str, float]:
    """Limits by which a confirmation that has ended goes on, by what its own pairs vary by.

    The number of pairs is twice the one there was, or four times where only that will probably show
    what was seen; the seconds are those that so many starts take, with those that were spent.
    """
    settings = session.settings.confirm
    keys: dict[str, float] = {"confirm.max_repeats": 2 * max(settings.max_repeats, 2)}
    interval = verdict.interval
    if verdict.winner is not None:
        keys["confirm.sharpness"] = settings.sharpness / 2
    elif interval is not None:
        first = leader(verdict.intervals)
        pairs = zip(verdict.costs[BASELINE], verdict.costs[first], strict=True)
        logs = [math.log(a / b) for a, b in pairs]
        noise = max(_QUIET, statistics.stdev(logs) / math.sqrt(2))
        gain = max(interval.ratio - 1, session.settings.objective.min_gain, _QUIET)
        plan = plan_of_starts(max(settings.max_repeats, 2), either_way=False)
        keys["confirm.max_repeats"] = _shows(plan, noise, gain) or 4 * plan.most
    if settings.seconds is not None:
        arms = 1 + max(len(verdict.intervals), 1)
        chosen_s = sum(t.seconds for t in verdict.chosen_by)
        needed = _seconds_for(session, int(keys["confirm.max_repeats"]), arms) + chosen_s
        keys["confirm.seconds"] = max(math.ceil(needed), settings.seconds)
    return keys


def expectation(session: Session, plan: Plan, gain: float, arms: int) -> str:
    """What a comparison of starts will come to, as far as that can be told before it.

    Args:
        session: with readings of the baseline.
        plan: of the comparison.
        gain: relative, that is hoped for.
        arms: that are started in each block.

    """
    noise = _noise(session)
    return _told(session, expect(plan, noise, gain), noise, arms)


def _noise(session: Session) -> float:
    """By how much starts vary at least, relative, as far as readings of the baseline tell."""
    readings = _of_the_baseline(session)
    logs = [math.log(t.cost or 1.0) for t in readings]
    errors = [t.cost_error for t in readings if t.cost_error is not None]
    return max([_QUIET, *errors, *([statistics.stdev(logs)] if len(logs) > 1 else [])])


def _of_the_baseline(session: Session) -> list[Trial]:
    """What was measured of it in the search."""
    purposes = (Purpose.BASELINE, Purpose.SENTINEL)
    return [t for t in session.trials if t.purpose in purposes and t.cost is not None]


def _told(session: Session, expected: Expectation, noise: float, arms: int) -> str:
    start_s = _start_s(session)
    lasts = "" if start_s is None else f", {expected.seconds(start_s, arms):.0f} s"
    return f"to be expected where starts vary by {noise:.1%}: {expected}{lasts}"


def _measured(
    session: Session,
    configuration: dict[str, Value],
    number: int,
    purpose: Purpose,
    verdict: Verdict,
    since: int = 0,
) -> Trial:
    """The trial for this purpose and of this number: from an earlier run of the same search, where
    its trials from ``since`` on have it, or run now.
    """
    done = [t for t in session.trials if t.purpose is purpose and t.number >= since]
    same = [t for t in done if key_of(t.configuration) == key_of(configuration)]
    whole = [t for t in same if t.status is not Status.INTERRUPTED]
    if len(whole) > number:
        return whole[number]
    torn = [t.number for t in same if t.status is Status.INTERRUPTED]
    confirms = purpose is Purpose.CONFIRM
    return session.run(
        configuration,
        purpose,
        fresh=confirms,
        number=torn[0] if torn else None,
        seconds_left=_seconds_left(session, verdict),
        profiled=confirms and number == 0,
    )


def _seconds_left(session: Session, verdict: Verdict) -> float | None:
    """What the stage may still spend, earlier runs of the same search included."""
    limit = session.settings.confirm.seconds
    spent = sum(t.seconds for t in (*verdict.chosen_by, *verdict.trials))
    return None if limit is None else max(0.0, limit - spent)


def _tell_failed(session: Session, arm: int, trial: Trial) -> None:
    session.view.warning(f"{_name(arm)} ended {trial.status} in fresh processes: {trial.reason}")


def _name(arm: int) -> str:
    return "the baseline" if arm == BASELINE else f"finalist {arm}"


def tell_two_kinds(session: Session, costs: Mapping[str, Sequence[float]]) -> None:
    """Name the arms whose starts fall into two kinds, of which a few starts cannot tell enough."""
    for name, each in costs.items():
        kinds = two_kinds(each)
        if kinds is not None:
            session.view.warning(f"{name}: {kinds}")


def _without_reference(failed: Trial) -> str:
    cause = failed.reason.partition(". ")[0]  # what to do about it was said when it failed
    return (
        f"the baseline failed in a fresh start ({failed.status}: {cause}), though it ran in the "
        "search: no speed-up can be stated, and the configuration of today is handed over"
    )


def _decide(session: Session, verdict: Verdict, readings: dict[int, Reading]) -> None:
    first = leader(verdict.intervals)
    reading, interval = readings[first], verdict.intervals[first]
    matters = 1 + session.settings.objective.min_gain
    verdict.is_open = not interval.is_told or interval.high > matters
    said = told(reading, "the baseline")
    if not interval.is_gain:
        verdict.reason = f"{said}{_cut_short(session, verdict, reading)}"
        return
    disputed = _disputed(session, verdict, first)
    if disputed:
        verdict.reason = f"no gain is claimed: trial {first} is {said}, {disputed}"
        return
    unseen = f"; {LOSSES_UNSEEN}" if session.sees_no_losses else ""
    verdict.winner, verdict.is_open = first, False
    verdict.reason = f"trial {first} is {said}{unseen}"


def _cut_short(session: Session, verdict: Verdict, reading: Reading) -> str:
    """Which limit left open whether there is a gain; empty where it reads as none."""
    settings = session.settings.confirm
    if reading.answer is not Answer.OPEN or reading.mean <= 0:
        return ""
    if _seconds_left(session, verdict) == 0.0:
        return f"; confirm.seconds={settings.seconds:g} was over, and more time would tell more"
    return f"; more than confirm.max_repeats={settings.max_repeats} pairs would tell more"


def _disputed(session: Session, verdict: Verdict, finalist: int) -> str:
    """Why a gain is none: the other statistic says that steps became longer; empty where not.

    Where slow steps recurred in every window of both, they are a part of the job that the median
    does not see, and nothing is disputed.
    """
    scored = session.objective.statistic
    other = Statistic.RATE if scored is Statistic.MEDIAN else Statistic.MEDIAN
    windows = session.confirmed(verdict, finalist)
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


# -----------------------------------------------------------------------------
# Where the baseline does not run, and there is nothing to compare with.


def _rescue(session: Session, found: Sequence[Trial]) -> Verdict:
    """Hand over the best that runs in fresh processes: as many are started as there are finalists,
    and where none of these runs, the next best, until one does.
    """
    session.view.stage("confirm", "the baseline does not run: what does, is started anew")
    verdict, over = Verdict(), False
    for place, trial in enumerate(found):
        if place >= session.settings.confirm.finalists and verdict.costs:
            break
        over = place > 0 and _seconds_left(session, verdict) == 0.0
        if over:
            break
        again = _measured(session, trial.configuration, 0, Purpose.CONFIRM, verdict)
        verdict.trials.append(again)
        over = again.status is Status.INTERRUPTED
        if over:
            break
        if again.cost is None:
            _tell_failed(session, trial.number, again)
        else:
            verdict.costs[trial.number] = [again.cost]
    if verdict.costs:
        verdict.winner = min(verdict.costs, key=lambda arm: verdict.costs[arm][0])
        cost = verdict.costs[verdict.winner][0]
        verdict.reason = _rescued(session, session.numbered(verdict.winner), cost)
        return verdict
    untried = found[len(verdict.trials) - 1 :] if over else []
    if not untried:
        verdict.reason = "every finalist failed in fresh processes: no gain is claimed"
        return verdict
    verdict.winner = untried[0].number
    why = _rescued(session, untried[0], untried[0].cost)
    verdict.reason = f"{why}; not confirmed in confirm.seconds"
    return verdict


def _rescued(session: Session, trial: Trial, cost: float | None) -> str:
    """What was found in the place of a baseline that does not run."""
    failed = session.baseline
    how = f" ({failed.status})" if failed is not None else ""
    rate = f"{session.objective.from_cost(cost):.4g} {session.unit}" if cost else "?"
    return (
        f"the baseline does not run{how}; trial {trial.number} does, at {rate}, and is handed "
        "over (no speed-up can be stated)"
    )
