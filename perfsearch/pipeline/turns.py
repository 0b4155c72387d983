"""Trials that are alive at the same time and measured in turns, so that all meet the same load."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from perfsearch.core.knob import Value
from perfsearch.core.signals import deferred
from perfsearch.core.trial import Outcome, Purpose, Status, Trial
from perfsearch.pipeline.session import Running, Session, guarded_turns
from perfsearch.runners.base import MeasuresInTurns, Turns


@dataclass
class _Alive:
    """A trial that was begun.

    Attributes:
        running: the trial.
        turns: its measurement.
        enough: whether it has measured as much as it needs.
        outcome: once it has ended.

    """

    running: Running
    turns: Turns[Outcome]
    enough: bool = False
    outcome: Outcome | None = None

    def begin(self) -> None:
        """Have it started, up to its first window."""
        self._take(lambda: next(self.turns))

    def take_turn(self, go_on: bool) -> None:
        """Have it measured for one window more, or measure no more and end."""
        self._take(lambda: self.turns.send(go_on))

    def _take(self, act: Callable[[], bool]) -> None:
        try:
            self.enough = act()
        except StopIteration as end:
            self.end(end.value)

    def end(self, outcome: Outcome) -> None:
        """Take note of how it ended."""
        self.turns.close()
        self.outcome, self.running.ended_s = outcome, time.monotonic()

    @property
    def has_failed(self) -> bool:
        """Whether it ended, and not with a measurement."""
        return self.outcome is not None and self.outcome.status is not Status.OK


def measure_in_turns(
    session: Session,
    configurations: Sequence[dict[str, Value]],
    generator: np.random.Generator,
    seconds_left: Callable[[], float | None],
) -> list[Trial]:
    """Measure configurations in new processes, all of them alive, each in short windows.

    The windows alternate: each round has one of each, in an order that is drawn, and the next the
    same in reverse, until all have enough. Where one fails the others are broken off, as it may
    have failed because of them. They end in the reverse order of their starts, so that each sees
    its devices as it found them.

    Args:
        session: whose runner can do so.
        configurations: what to measure, in the order in which they are started.
        generator: draws the orders.
        seconds_left: what may still be spent; ``None``: no limit.

    Returns:
        A trial of each, in the same order; none of those that were not started, as one before
        them failed.

    """
    runner = session.runner
    assert isinstance(runner, MeasuresInTurns)
    begun: list[_Alive] = []
    try:
        for configuration in configurations:
            running = Running(
                session.next_number,
                configuration,
                Purpose.CONFIRM,
                seconds_left=seconds_left(),
                fresh=True,
                in_turns=True,
            )
            begun.append(_Alive(running, guarded_turns(runner, running)))
            session.begin(running)
            begun[-1].begin()
            if begun[-1].has_failed:
                break
        else:
            _alternate(session, begun, generator)
        for one in reversed(begun):
            if one.enough and one.outcome is None and not any(b.has_failed for b in begun):
                one.take_turn(False)
    finally:
        with deferred():
            for one in reversed(begun):
                if one.outcome is None:
                    one.turns.close()
                    session.break_off(one.running)
    return [
        session.numbered(one.running.number)
        if one.outcome is None
        else session.end(one.running, one.outcome)
        for one in begun
    ]


def _alternate(session: Session, begun: list[_Alive], generator: np.random.Generator) -> None:
    """Have windows made in turns, until all have enough, one has failed or the time is over."""
    limit_s = session.settings.limits.trial_s
    limits = [one.running.begin_s + one.running.plan.time_limit_s for one in begun]
    cut_off = any(one.running.plan.time_limit_s < limit_s for one in begun)
    order: list[int] = []
    while order or not all(one.enough or one.outcome is not None for one in begun):
        back = order[::-1]
        order = [] if order else [int(place) for place in generator.permutation(len(begun))]
        for place in order or back:
            one = begun[place]
            if cut_off and time.monotonic() > min(limits):
                for other in reversed(begun):
                    if other.outcome is None:
                        other.end(Outcome(Status.TIMEOUT, fresh_process=True))
                return
            if one.outcome is None:
                one.take_turn(True)
                if one.has_failed:
                    return
