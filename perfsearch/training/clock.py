"""The measuring protocol: which steps are apart, which are scored, and how both are timed.

There is one for built-in jobs, scripts, DeepSpeed and online tuning. ``StepWindow`` decides, in
whichever process decisions are made; ``StepTimer`` times steps in the process that makes them;
``RankWindow`` is both, where ranks decide together. Importing this module does not import torch.
"""

from __future__ import annotations

import math
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfsearch.core.steps import TIMES_SEEN, are_even, read_window
from perfsearch.metrics.slow_steps import parts_of, slow_steps

if TYPE_CHECKING:
    import torch

LOADING = ("dataloader_next", "to_device")
PHASES = (*LOADING, "forward", "backward", "optimizer")

WARMUP_STEPS = (3, 8)
"""Steps that are apart, at least (buckets are rebuilt after the first) and at most."""

FIRST_LOSSES = 5
"""Steps from the common start whose losses are compared between configurations."""

PROFILED_STEPS = 3
"""Steps after the scored ones that torch's profiler watches."""

_DETAILED_EACH_S = 0.1
"""Timing the phases of a step takes up to a quarter of a millisecond: of so long, little."""

USABLE = 0.7
"""Part of a trial's time that its steps may take; the rest is for what was not foreseen."""

_ONCE_GROWTH, _AGAIN_GROWTH = 3, 10
"""To so many times its first stretch a window grows at most where slow steps were met once, and
where they were met again."""

_GOLDEN = (math.sqrt(5) - 1) / 2

_LEAST_DETAILED = 8
"""Steps of a window whose phases are timed, if it has as many: they are told with an error."""


_COMPILING = 3.0
"""A step of the warm-up that takes so many times the usual was compiling."""


class Clock(ABC):
    """Points in time of one window, read as seconds once it is over."""

    def __init__(self) -> None:
        self._points: list[tuple[str, Any]] = []

    @abstractmethod
    def now(self) -> Any:
        """A point in time, to be understood by ``between``."""

    @abstractmethod
    def between(self, earlier: Any, later: Any) -> float:
        """Seconds from one point to another, the window being over."""

    @property
    def is_open(self) -> bool:
        """Whether the window has begun."""
        return bool(self._points)

    def mark(self, phase: str) -> None:
        """Note that ``phase`` ends here; ``step`` ends a step, ``start`` opens the window."""
        self._points.append((phase, self.now()))

    def read(self) -> tuple[list[float], dict[str, float]]:
        """Seconds of each step, and mean seconds a step of each phase."""
        steps, by_step = self.read_steps()
        totals: dict[str, float] = {}
        for phases in by_step:
            for phase, seconds in phases.items():
                totals[phase] = totals.get(phase, 0.0) + seconds
        return steps, {p: total / max(1, len(steps)) for p, total in totals.items()}

    def read_steps(self) -> tuple[list[float], list[dict[str, float]]]:
        """Seconds of each step, and of each phase in it."""
        steps: list[float] = []
        by_step: list[dict[str, float]] = []
        phases: dict[str, float] = {}
        step_start = previous = self._points[0][1]
        for phase, point in self._points[1:]:
            if phase == "step":
                steps.append(self.between(step_start, point))
                by_step.append(phases)
                step_start, phases = point, {}
            else:
                phases[phase] = phases.get(phase, 0.0) + self.between(previous, point)
            previous = point
        return steps, by_step


class HostClock(Clock):
    """Where operations end before the call returns."""

    def now(self) -> Any:
        """Seconds on the host."""
        return time.perf_counter()

    def between(self, earlier: Any, later: Any) -> float:
        """Seconds on the host."""
        return float(later - earlier)


class DeviceClock(Clock):
    """Where operations are queued: events on the current stream.

    So waiting for the loader is what the device waits for it: a batch that the host fetches while
    the device is at work costs the step nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        import torch

        self._event = torch.cuda.Event

    def now(self) -> Any:
        """An event."""
        event = self._event(enable_timing=True)
        event.record()
        return event

    def between(self, earlier: Any, later: Any) -> float:
        """Seconds on the stream."""
        return float(earlier.elapsed_time(later)) / 1e3


def make_clock(device: torch.device) -> Clock:
    """The clock that fits ``device``."""
    return DeviceClock() if device.type == "cuda" else HostClock()


def synchronize(device: torch.device) -> None:
    """Wait for queued work."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def slowest(values: list[float], device: torch.device) -> list[float]:
    """Elementwise maximum over ranks."""
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return [float(v) for v in tensor.tolist()]


def mean_over_ranks(values: torch.Tensor) -> list[float]:
    """Elementwise mean over ranks."""
    import torch.distributed as dist

    values = values.double()
    dist.all_reduce(values)
    return [float(v) / dist.get_world_size() for v in values.tolist()]


def is_steady(seconds: list[float], least: int = WARMUP_STEPS[0], tolerance: float = 0.2) -> bool:
    """Whether the last steps of a series take about the same.

    Args:
        seconds: of every step since the configuration was put into force.
        least: fewer steps than that never tell.
        tolerance: largest difference of the last two steps, relative to the smaller.

    """
    if len(seconds) < max(2, least):
        return False
    smaller, larger = sorted(seconds[-2:])
    return larger <= smaller * (1 + tolerance)


def steps_to_fill(seconds: float, step_seconds: float, bounds: tuple[int, int]) -> int:
    """How many steps cover ``seconds``, within ``bounds``."""
    low, high = bounds
    return int(max(low, min(high, seconds / max(step_seconds, 1e-9))))


def detailed_each(step_seconds: float, count: int) -> int:
    """Of how many steps of a script one has its phases timed.

    Args:
        step_seconds: of a step.
        count: steps of the window.

    """
    wanted = math.ceil(_DETAILED_EACH_S / max(step_seconds, 1e-9))
    return max(1, min(wanted, count // _LEAST_DETAILED))


def is_detailed(place: int, each: int) -> bool:
    """Whether the phases of a step are timed, the window's first one being 0.

    One is in every stretch of ``each`` steps, at a place that changes by the golden ratio: what a
    script does in every tenth step, such as logging, is met as often as it happens.
    """
    stretch, at = divmod(place, each)
    return at == int(each * ((0.5 + stretch * _GOLDEN) % 1))


@dataclass(frozen=True)
class WindowRule:
    """How a configuration is measured.

    Attributes:
        scored_steps: smallest and largest number of scored steps.
        scored_seconds: wall time that they should cover.
        warmup_steps: smallest and largest number of steps before them; with both the same, step
            times need not be steady.
        stop_above_s: a step that takes longer than this ends the measurement before it is scored.
        uneven: whether the training loop is the user's, so that a step may hold other work, such as
            a round of validation, and the last one tells little of those to come.
        look_steps: as many steps are made at least where the job has them, in search of what recurs
            seldom.
        look_seconds: unless they take longer than this.
        limit_s: seconds that all its steps may take, those of the warm-up included.
        grows: whether slow steps may make the window longer.

    """

    scored_steps: tuple[int, int] = (8, 60)
    scored_seconds: float = 1.0
    warmup_steps: tuple[int, int] = WARMUP_STEPS
    stop_above_s: float | None = None
    uneven: bool = False
    look_steps: int = 0
    look_seconds: float = math.inf
    limit_s: float = math.inf
    grows: bool = True


class State(StrEnum):
    """Where a measurement stands."""

    WARM_UP = "warm-up"
    STOPPED = "stopped"
    SCORED = "scored"
    OVER = "over"


class StepWindow:
    """What one configuration's steps are: warm-up until times are steady, then a scored window.

    It is told seconds, those of the slowest rank, and makes no step itself. After the warm-up it is
    in ``SCORED``, or in ``STOPPED`` where steps take longer than is worth scoring. Whoever drives
    it has one step at a time made in the warm-up, and then, for as long as it is ``SCORED``,
    ``count`` in a row, with the device waited for before the first and after the last only. After
    the first such stretch it asks for more where slow steps were met that may recur.

    Args:
        rule: how it is measured.
        warmup_s: seconds of the steps that were made already since the configuration was put into
            force.

    Attributes:
        state: where the measurement stands.
        warmup_s: seconds of each step of the warm-up.
        scored_s: seconds of each step of the window so far.

    """

    def __init__(self, rule: WindowRule, warmup_s: Sequence[float] = ()) -> None:
        self.rule = rule
        self.warmup_s = list(warmup_s)
        self.scored_s: list[float] = []
        self._first_steps, self._first_s = 0, 0.0
        self.state = self._after_warmup()

    def warm(self, seconds: float) -> None:
        """Note a step of the warm-up."""
        self.warmup_s.append(seconds)
        self.state = self._after_warmup()

    def _after_warmup(self) -> State:
        if not self._is_warm():
            return State.WARM_UP
        bound = self.rule.stop_above_s
        if bound is not None and self.warmup_s and self.typical_s > bound:
            return State.STOPPED
        return State.SCORED

    def _is_warm(self) -> bool:
        """The warm-up rule: steady steps, or as many or as long as a warm-up may take."""
        least, most = self.rule.warmup_steps
        made = len(self.warmup_s)
        if made < least:
            return False
        # one of the first may compile, which says nothing of how long steps take to be alike
        spent = sum(self.warmup_s) - max(self.warmup_s[: WARMUP_STEPS[0]], default=0.0)
        enough = made >= most or spent > 2 * self.rule.scored_seconds
        return enough or is_steady(self.warmup_s, least)

    @property
    def expected_s(self) -> float:
        """What a step of the window will take, as the warm-up lets one think."""
        last = self.warmup_s[-1]
        # an uneven last one may hold a round of validation, or the first what a change costs once
        return min(last, statistics.median_low(self.warmup_s)) if self.rule.uneven else last

    @property
    def typical_s(self) -> float:
        """What a step surely takes."""
        if self.rule.uneven:
            return self.expected_s
        # the first makes the optimizer's state and compiles; it tells nothing of the others
        return min(self.warmup_s[1:] or self.warmup_s)

    @property
    def why_stopped(self) -> str:
        """Why nothing is scored; empty where it is."""
        if self.state is not State.STOPPED:
            return ""
        return f"steps take {self.typical_s:.4g} s, more than {self.rule.stop_above_s:.4g} s"

    @property
    def count(self) -> int:
        """Steps of the next stretch."""
        if self.scored_s:
            return self._more()
        low, high = self.rule.scored_steps
        if low == high:
            return low
        return steps_to_fill(self.rule.scored_seconds, self.expected_s, (low, high))

    @property
    def detailed_each(self) -> int:
        """Of how many steps of the stretch one has its phases timed, where that costs time."""
        return detailed_each(self.expected_s, self.count)

    def score(self, seconds: Sequence[float]) -> None:
        """Note the steps of a stretch; the window is over unless it asks for more."""
        if not self.scored_s:
            self._first_steps, self._first_s = len(seconds), sum(seconds)
        self.scored_s += seconds
        self.state = State.SCORED if self._more() else State.OVER

    def _more(self) -> int:
        """Steps that are missing: no more at a time than there are, as the job may soon end."""
        step_s = self.spent_s / self.made
        room = (self.rule.limit_s - sum(self.warmup_s) - self.spent_s) / step_s
        wanted = max(self._to_look(step_s), self._to_recur(step_s))
        return int(max(0.0, min(wanted, self.made, room)))

    @property
    def made(self) -> int:
        """Steps of the window so far."""
        return len(self.scored_s)

    @property
    def spent_s(self) -> float:
        """Their seconds."""
        return sum(self.scored_s)

    def _to_look(self, step_s: float) -> float:
        """Steps still to be made whatever was met."""
        missing = self.rule.look_steps - self.made
        return min(missing, (self.rule.look_seconds - self.spent_s) / step_s)

    def _to_recur(self, step_s: float) -> float:
        """Steps after which slow ones should have been met often enough."""
        if not self.rule.grows or are_even(self.scored_s):
            return 0.0
        wanted = 0.0
        for kind in read_window(self.scored_s).slow:
            if kind.times >= TIMES_SEEN:
                break
            growth, missing = _ONCE_GROWTH, float(self._first_steps)
            if kind.period_steps is not None:
                next_place = kind.places[-1] + kind.period_steps + 1
                growth, missing = _AGAIN_GROWTH, max(1.0, math.ceil(next_place) + 1 - self.made)
            longest_s = growth * max(self._first_s, self.rule.scored_seconds)
            room = (longest_s - self.spent_s) / step_s
            wanted = max(wanted, min(missing, growth * self._first_steps - self.made, room))
        return wanted

    @property
    def discarded_steps(self) -> int:
        """Steps before the window."""
        return len(self.warmup_s)

    @property
    def discarded_seconds(self) -> float:
        """What they took."""
        return sum(self.warmup_s)

    def result(self, compiles: bool = False) -> dict[str, Any]:
        """What a measurement holds of it, by the measurement's fields.

        Args:
            compiles: whether long steps of the warm-up compiled, which is told apart.

        """
        found: dict[str, Any] = {
            "step_seconds": list(self.scored_s),
            "discarded_steps": self.discarded_steps,
            "discarded_seconds": self.discarded_seconds,
        }
        if compiles:
            typical = statistics.median_low(self.scored_s or [self.typical_s])
            compiling = sum(s - typical for s in self.warmup_s if s > _COMPILING * typical)
            found["compile_seconds"] = compiling
            found["discarded_seconds"] -= compiling
        return found


class StepTimer:
    """Times the steps of one process.

    In the warm-up each step is waited for; in a window steps are marked on a clock, and only
    whoever opens and closes it waits, before the first and after the last.

    Args:
        device: that the steps use.

    Attributes:
        clock: where phases are marked; every window has its own.
        left: steps of the open window that are still to be made.
        host_s: how long a step kept the host, which loads and launches ahead of a device: the least
            of those that found nothing queued, but the first, as caches and clocks warm up in it.

    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.clock = make_clock(device)
        self.left = 0
        self.host_s = math.inf
        self._warmed = 0
        self._is_first = False
        self._begin = time.perf_counter()

    def begin(self) -> None:
        """Note that a step of the warm-up begins."""
        self._begin = time.perf_counter()

    def warmup_step(self, since: float | None = None) -> float:
        """Seconds of the step that ends now, when the device has made it.

        Args:
            since: when it began, as ``time.perf_counter`` says, if not at ``begin``.

        """
        self._warmed += 1
        if self._warmed > 1:
            self._note_host()
        synchronize(self.device)
        return time.perf_counter() - (self._begin if since is None else since)

    def open(self, count: int) -> None:
        """Begin a window of so many steps here, the device being at rest."""
        self.clock = make_clock(self.device)
        self.left, self._is_first = count, True
        self.clock.mark("start")
        self._begin = time.perf_counter()

    def step(self) -> bool:
        """Note that a step of the window ends; return whether it was the last."""
        self.clock.mark("step")
        if self._is_first:  # nothing was queued before, so the host waited for nothing
            self._is_first = False
            self._note_host()
        self.left -= 1
        return self.left <= 0

    def _note_host(self) -> None:
        self.host_s = min(self.host_s, time.perf_counter() - self._begin)


class RankWindow(StepWindow):
    """A window that each rank of a group drives by itself, all of them alike.

    They agree on what the slowest took after each step of the warm-up and after each stretch of
    the window, and so on whether it goes on; between the first and the last step of a stretch there
    is no collective and nothing waits.

    Args:
        rule: how it is measured.
        device: of this rank.

    Attributes:
        timer: of this rank's steps.

    """

    def __init__(self, rule: WindowRule, device: torch.device) -> None:
        super().__init__(rule)
        self.timer = StepTimer(device)
        self._own_s: list[float] = []
        self._by_step: list[dict[str, float]] = []

    @property
    def clock(self) -> Clock:
        """Where the next step marks its phases."""
        return self.timer.clock

    @property
    def is_open(self) -> bool:
        """Whether steps of the present stretch are still to be made."""
        return self.timer.left > 0

    def open(self) -> None:
        """Begin a stretch of the scored window on all ranks together."""
        slowest([0.0], self.timer.device)
        synchronize(self.timer.device)
        self.timer.open(self.count)

    def end_step(self) -> None:
        """Note that a step has ended."""
        device = self.timer.device
        if self.state is State.WARM_UP:
            self.warm(slowest([self.timer.warmup_step()], device)[0])
            self.timer.begin()
        elif self.timer.step():
            synchronize(device)
            seconds, by_step = self.clock.read_steps()
            self._own_s += seconds
            self._by_step += by_step
            self.score(slowest(seconds, device))

    def read(self) -> tuple[dict[str, float], dict[str, float]]:
        """Phases of this rank: see ``phases_of``.

        Every rank must call it.
        """
        phases_ms, evidence = phases_of(self._own_s, self._by_step)
        evidence.update(least_wait(self._by_step, self.timer.device))
        return phases_ms, evidence

    def slow_steps(self) -> list[dict[str, Any]]:
        """What the slow steps of the window are, as far as this rank has seen."""
        return slow_steps(self.scored_s, [parts_of(phases) for phases in self._by_step])


class FirstLosses:
    """Losses of the first steps, which are compared between configurations, and of the last one."""

    def __init__(self) -> None:
        self._first: list[torch.Tensor] = []
        self._last: torch.Tensor | None = None

    def note(self, loss: torch.Tensor) -> None:
        """Note the loss of a step, without waiting for it."""
        if len(self._first) < FIRST_LOSSES:
            self._first.append(loss)
        self._last = loss

    def read(self, device: torch.device) -> tuple[list[float], str]:
        """The first losses, means over ranks, and why they tell of a divergence; empty if not.

        Every rank must call it; losses that are not finite are left out.
        """
        if self._last is None:
            return [], ""
        import torch

        values = mean_over_ranks(torch.stack([*self._first, self._last]).to(device))
        bad = next((i for i, v in enumerate(values) if not math.isfinite(v)), None)
        if bad is None:
            return values[:-1], ""
        where = f"step {bad + 1}" if bad < len(values) - 1 else "the last scored step"
        return [v for v in values[:-1] if math.isfinite(v)], f"the loss is {values[bad]} at {where}"


def phases_of(
    seconds: Sequence[float], by_step: Sequence[dict[str, float]]
) -> tuple[dict[str, float], dict[str, float]]:
    """Mean milliseconds a step of each phase, and what is known of them.

    Args:
        seconds: of each step.
        by_step: of each phase in it.

    Returns:
        The phases, and evidence: ``PHASE_error_ms``, the standard error of each where there is more
        than one step, and ``phases_step_ms``, this rank's mean step, to which phases sum at most.

    """
    phases_ms, evidence = {}, {"phases_step_ms": statistics.fmean(seconds) * 1e3}
    for name in dict.fromkeys(name for phases in by_step for name in phases):
        spent = [phases.get(name, 0.0) * 1e3 for phases in by_step]
        phases_ms[name] = statistics.fmean(spent)
        if len(spent) > 1:
            evidence[f"{name}_error_ms"] = statistics.stdev(spent) / math.sqrt(len(spent))
    return phases_ms, evidence


def least_wait(by_step: Sequence[dict[str, float]], device: torch.device) -> dict[str, float]:
    """How long the rank that comes last to each step's communication waits: ``comm_least_ms``.

    Every rank must call it; empty where steps do not say how long they wait, on all ranks alike.
    """
    waits = [phases["comm_exposed"] for phases in by_step if "comm_exposed" in phases]
    if not waits or len(waits) < len(by_step):
        return {}
    least = slowest([-wait for wait in waits], device)
    return {"comm_least_ms": -statistics.fmean(least) * 1e3}


def least_wait_ms(waits_ms: Sequence[Sequence[float]]) -> dict[str, float]:
    """The same where every rank has said how long it waits; empty if one does not say.

    Args:
        waits_ms: by rank and step; NaN where a step does not say.

    """
    least = statistics.fmean(min(of_ranks) for of_ranks in zip(*waits_ms, strict=True))
    return {"comm_least_ms": least} if not math.isnan(sum(map(sum, waits_ms))) else {}


def reset_peaks(device: torch.device) -> None:
    """Forget how much memory was used before."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.reset_accumulated_memory_stats(device)
        return
    # 5 resets the peak resident set (proc(5)); where there is no such file peaks are the process's
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")


def read_peaks(device: torch.device) -> dict[str, float | None]:
    """Peaks since ``reset_peaks`` in GiB: of the caching allocator, or the resident set."""
    if device.type == "cuda":
        import torch

        return {
            "peak_allocated_gib": torch.cuda.max_memory_allocated(device) / 2**30,
            "peak_reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
            "allocator_retries": float(torch.cuda.memory_stats(device).get("num_alloc_retries", 0)),
        }
    return {"peak_allocated_gib": _peak_resident_gib(), "peak_reserved_gib": None}


def _peak_resident_gib() -> float:
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return float(line.split()[1]) / 2**20
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak) / (2**30 if sys.platform == "darwin" else 2**20)
