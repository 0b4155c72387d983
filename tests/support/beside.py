"""A runner with a known surface that measures several trials at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable

from support.synthetic import SyntheticRunner

from perfsearch.core.knob import Configuration
from perfsearch.core.trial import Outcome, Purpose
from perfsearch.runners.base import MeasuresBeside, Plan

LATE_S = 20.0
"""A barrier that is not reached by then never is: the test fails, whatever the machine does."""

Before = Callable[[Plan], None]


class Beside(SyntheticRunner, MeasuresBeside):
    """The same on several lanes; notes what ran on which of them, and what ran beside it."""

    shares_host = False

    def __init__(self, before: Before = lambda plan: None, lanes: int = 2, **more: object) -> None:
        super().__init__(**more)
        self.lanes = lanes
        self._before = before
        self._lock = threading.Lock()
        self.running: dict[int, Plan] = {}
        self.neighbours: dict[int, list[Purpose]] = {}
        self.broken_off = threading.Event()

    def measure(self, configuration: Configuration, plan: Plan) -> Outcome:
        with self._lock:
            assert plan.lane not in self.running, "two trials on one lane"
            self.running[plan.lane] = plan
            beside = [other.purpose for other in self.running.values() if other is not plan]
            self.neighbours.setdefault(plan.number, []).extend(beside)
            for other in self.running.values():
                self.neighbours.setdefault(other.number, []).append(plan.purpose)
        try:
            self._before(plan)
            return super().measure(configuration, plan)
        finally:
            with self._lock:
                del self.running[plan.lane]

    def break_off(self) -> None:
        self.broken_off.set()
