"""How much trials at the same time disturb each other, measured before any is searched so."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from perfsearch.core.journal import legible
from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.pipeline.explore import allowed_change
from perfsearch.pipeline.lanes import Lanes
from perfsearch.pipeline.session import Running, Session
from perfsearch.runners.base import MeasuresBeside


@dataclass(frozen=True)
class Disturbance:
    """What neighbours do to the baseline.

    Attributes:
        alone: its costs by lane, where nothing else ran, a list over rounds.
        beside: the same where it ran on every lane at a time.
        change: the largest relative change of the cost among the lanes.
        allowed: the largest that is taken for noise.
        lanes: how many trials are run at a time because of it.

    """

    alone: list[list[float]]
    beside: list[list[float]]
    change: float
    allowed: float
    lanes: int

    @property
    def is_seen(self) -> bool:
        """Whether it is more than noise."""
        return abs(math.log1p(self.change)) > math.log1p(self.allowed)


_TELLING = 0.25
"""Noise above which nothing is known of neighbours."""


_ALL_OF_THEM = "parallel_trials=1 gives it all of them"


def run(session: Session) -> None:
    """Settle how many trials run at a time: as many as the runner has lanes, or one where they
    disturb each other by more than the noise, where so much is noise that it cannot be told, or
    where the runner knows why not.

    An earlier run of the same search that has it on record is believed.
    """
    runner = session.runner
    session.lanes = 1
    if not isinstance(runner, MeasuresBeside) or runner.lanes == 1:
        return
    if not runner.shares_host:
        session.lanes = runner.lanes
        return
    found = None
    why = runner.why_alone()
    if not why:
        found = _recorded(session, runner.lanes) or _measured(session, runner.lanes)
        why = runner.why_alone()
    if found is None and not why:
        why = (
            "the baseline does not run beside itself, so that it is not known how much trials at "
            "the same time would disturb each other"
        )
    share = f"on one of {runner.lanes} shares of the devices"
    if found is None or why:
        session.view.warning(f"one trial at a time, {share}: {why}. {_ALL_OF_THEM}")
        return
    session.lanes = found.lanes
    told = (
        f"the baseline's cost changes by {found.change:+.1%} with {runner.lanes - 1} more beside "
        f"it, where noise alone may make {found.allowed:.1%}"
    )
    if found.lanes > 1:
        session.view.note(f"{told}: {found.lanes} trials at a time")
        return
    why = "they disturb each other" if found.is_seen else "a disturbance would not be seen in it"
    session.view.warning(f"{told}: {why}, so one trial runs at a time, {share}. {_ALL_OF_THEM}")


def _recorded(session: Session, lanes: int) -> Disturbance | None:
    for event in reversed(session.journal.events):
        if event.name == "neighbours" and len(event.data["alone"]) == lanes:
            with legible(session.journal.path, event):
                return Disturbance(**event.data)
    return None


def _measured(session: Session, lanes: int) -> Disturbance | None:
    """Measure it: alone on each lane, twice on all at a time, alone again, so that what drifts
    meets both alike; ``None`` where a trial failed.
    """
    session.view.note(f"how much {lanes} trials at a time disturb each other:")
    alone: list[list[Trial]] = [[] for _ in range(lanes)]
    beside: list[list[Trial]] = [[] for _ in range(lanes)]
    together, apart = [range(lanes)], [[lane] for lane in range(lanes)]
    for groups, kept in ((apart, alone), (together, beside), (together, beside), (apart, alone)):
        for group in groups:
            for trial in _at_once(session, group):
                if trial.status is not Status.OK or trial.cost is None:
                    return None
                kept[trial.lane].append(trial)
    found = judge(
        [[(t.cost or 0.0, t.cost_error or 0.0) for t in trials] for trials in alone],
        [[(t.cost or 0.0, t.cost_error or 0.0) for t in trials] for trials in beside],
    )
    session.journal.append("neighbours", **asdict(found))
    return found


def _at_once(session: Session, group: Sequence[int]) -> list[Trial]:
    """Measure the baseline on each of these lanes, at the same time."""
    with Lanes(session, group) as lanes:
        for _ in group:
            baseline = dict(session.runner.baseline)
            lanes.start(Running(session.next_number, baseline, Purpose.BESIDE))
        return [lanes.wait() for _ in group]


Readings = Sequence[Sequence[tuple[float, float]]]
"""Costs by lane, each with the standard error of its logarithm."""


def judge(alone: Readings, beside: Readings) -> Disturbance:
    """Say whether neighbours disturb: by the lane that changes most, in either direction.

    The error of a mean is that of its readings, or what they differ by, whichever is larger.
    """
    changes, errors = [], []
    for before, after in zip(alone, beside, strict=True):
        means, squares = [], 0.0
        for readings in (before, after):
            logs = [math.log(cost) for cost, _ in readings]
            spread = statistics.stdev(logs) if len(logs) > 1 else 0.0
            error = max([spread, *(error for _, error in readings)])
            means.append(statistics.fmean(logs))
            squares += error**2 / len(logs)
        changes.append(means[1] - means[0])
        errors.append(math.sqrt(squares))
    worst = max(range(len(changes)), key=lambda lane: abs(changes[lane]))
    allowed = allowed_change(errors[worst])
    disturbed = abs(changes[worst]) > allowed or math.expm1(allowed) > _TELLING
    return Disturbance(
        [[cost for cost, _ in readings] for readings in alone],
        [[cost for cost, _ in readings] for readings in beside],
        math.expm1(changes[worst]),
        math.expm1(allowed),
        1 if disturbed else len(changes),
    )
