"""Where the time of scored steps goes: points on their clock, and calls inside of one another."""

from __future__ import annotations

import threading

from perfsearch.workers.measure import Clock

OTHER = "other"
"""What no phase covers: the script's own work between those calls that are known."""

_OF_WHOEVER_RUNS = (OTHER, "forward")
"""Phases that are only what lies before a known call: in a call that is timed they are its own."""


class Phases:
    """The clock of a scored window, told where phases end and which calls begin and end.

    Every moment belongs to one phase, the innermost call's: where a call begins, the time before it
    goes to the call that it lies in, and outside of any to the phase that goes on after it, whose
    name is known only once that ends. Threads other than the one that steps are not timed.

    Args:
        clock: of the window; read only when that is over.

    Attributes:
        in_threads: whether another thread took a batch, stepped or copied.

    """

    def __init__(self, clock: Clock) -> None:
        self.in_threads = False
        self._clock = clock
        self._last = ""
        self._thread = threading.get_ident()
        self._running: list[str] = []
        self._open: list[str] = []
        self._names: dict[str, str] = {}
        clock.mark("start")

    def mark(self, phase: str) -> None:
        """Note that ``phase`` ends here."""
        if threading.get_ident() != self._thread and not self._ends_pass(phase):
            self.in_threads = True
            return
        self._last = phase
        if self._running:
            phase = self._running[-1] if phase in _OF_WHOEVER_RUNS else phase
        elif self._open:
            self._names.update(dict.fromkeys(self._open, phase))
            self._open.clear()
        self._clock.mark(phase)

    def _ends_pass(self, phase: str) -> bool:
        """Whether the backward pass that the stepping thread waits for ends, in its own thread."""
        return phase == "backward" and self._last == "forward"

    def end_step(self) -> None:
        """Note that a step ends with the phase that ended last."""
        self._clock.mark("step")

    def enter(self, phase: str) -> bool:
        """Begin a call that is a phase; whether it is timed, so that ``leave`` has to follow."""
        if threading.get_ident() != self._thread:
            self.in_threads = True
            return False
        if self._running:
            self._clock.mark(self._running[-1])
        else:
            label = f"?{len(self._names) + len(self._open)}"
            self._open.append(label)
            self._clock.mark(label)
        self._running.append(phase)
        return True

    def leave(self) -> None:
        """End the call that was begun last."""
        self._clock.mark(self._running.pop())

    def read(self) -> tuple[list[float], list[dict[str, float]]]:
        """Seconds of each step, and of each phase in it; the window is over."""
        seconds, by_step = self._clock.read_steps()
        named: list[dict[str, float]] = []
        for phases in by_step:
            named.append({})
            for label, spent in phases.items():
                name = self._names.get(label, OTHER) if label.startswith("?") else label
                named[-1][name] = named[-1].get(name, 0.0) + spent
        return seconds, named
