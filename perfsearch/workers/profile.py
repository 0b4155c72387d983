"""A profile of a configuration, after its scored steps: what each part of a step costs.

Nothing of it is scored. Phases are read from device events; what loading and communication cost is
also found by leaving them out; what the device did, from its own timeline.
"""

from __future__ import annotations

import gzip
import math
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, Protocol

import torch

from perfsearch.core.files import temporary_directory
from perfsearch.metrics.reading import Guard
from perfsearch.metrics.throughput import DeviceTime, device_time
from perfsearch.training import clock
from perfsearch.training.base import NextBatch, TrainStep
from perfsearch.training.clock import (
    PROFILED_STEPS,
    Clock,
    StepTimer,
    least_wait,
    phases_of,
    steps_to_fill,
)
from perfsearch.workers.messages import TrialRequest, trace_file

MOST_STEPS = 10
LEAST_STEPS = 3
_ROUNDS = 2
_SITES = 5


@dataclass
class Profile:
    """What one rank saw.

    Attributes:
        phases_ms: mean time a step by phase.
        evidence: numbers for the diagnosis, in the unit that the name ends with.
        environment: what is not a number: the steps profiled, calls that wait, what failed.

    """

    phases_ms: dict[str, float] = field(default_factory=dict)
    evidence: dict[str, float] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)


class Feed(Protocol):
    """What a step takes its micro-batches from, and the clock that it marks its phases on."""

    clock: Clock
    device: torch.device
    rank: int

    def __call__(self) -> Any:
        """The next micro-batch, on the device."""


def take_profile(
    step: TrainStep, feed: Feed, request: TrialRequest, step_s: float, steps_before: int
) -> Profile:
    """Run further steps, each window of them to see one thing.

    Every rank must call it with the same arguments, as steps are counted from them.

    Args:
        step: built and warm.
        feed: gives batches.
        request: which steps, and whether a trace is kept.
        step_s: seconds of a scored step on the slowest rank.
        steps_before: steps that were run before.

    """
    first, count = steps_to_profile(request, step_s, steps_before)
    for _ in range(first - steps_before - 1):
        step.run(feed, _no_mark)
    found = Profile(environment={"detailed_steps": [first, first + count - 1]})
    guard = Guard()
    asked = request.begin_step or (1 if request.end_step is not None else first)
    if asked < first:
        guard.missing(
            "step range",
            f"steps up to {steps_before} were over before the profile; {first} to "
            f"{first + count - 1} were profiled",
        )
    _phases(step, feed, count, found)
    if feed.device.type == "cuda" or request.trace:
        traced = _traced(step, feed, request, guard)
        if traced is not None:
            _device(traced, found.evidence)
    _leave_out(step, feed, max(LEAST_STEPS, count // 2), found)
    alone = step.alone()
    if alone is not None and step.job.flops_per_sample is None and not step.compiles:
        # no peer waits for this step, and nothing follows: it may fail
        with alone:
            counted = guard.read("counted_flops", lambda: _count_operations(step, feed))
        if counted:
            found.evidence["counted_flops"] = counted
    if guard.unsupported:
        found.environment["unsupported"] = guard.unsupported
    return found


def steps_to_profile(request: TrialRequest, step_s: float, steps_before: int) -> tuple[int, int]:
    """The first step to profile, counted from 1 at the trial's start, and how many.

    Those that have been run already are over: an asked-for range that begins among them is moved
    behind them, and stays as long as it is.
    """
    begin = request.begin_step or 0
    first = max(steps_before + 1, begin)
    if request.end_step is not None:
        return first, max(1, request.end_step - max(1, begin) + 1)
    return first, steps_to_fill(request.scored_seconds, step_s, (LEAST_STEPS, MOST_STEPS))


def most_steps(request: TrialRequest, step_s: float, steps_before: int) -> int:
    """Steps that the whole profile takes."""
    first, count = steps_to_profile(request, step_s, steps_before)
    left_out = 3 * _ROUNDS * max(LEAST_STEPS, count // 2)
    return first - steps_before - 1 + count + PROFILED_STEPS + left_out + 1


def _no_mark(phase: str) -> None:
    """Nothing is timed."""


def _window(
    step: TrainStep,
    feed: Feed,
    source: NextBatch,
    count: int,
    inside: AbstractContextManager[Any] | None = None,
) -> Clock:
    """Run ``count`` steps; the device is waited for at the window's edges only."""
    timer = StepTimer(feed.device)
    clock.slowest([0.0], feed.device)
    clock.synchronize(feed.device)
    with inside or nullcontext():
        timer.open(count)
        feed.clock = timer.clock
        while timer.left:
            step.run(source, timer.clock.mark)
            timer.step()
    clock.synchronize(feed.device)
    return timer.clock


def _seconds(step: TrainStep, feed: Feed, source: NextBatch, count: int) -> list[float]:
    return _window(step, feed, source, count).read()[0]


def _phases(step: TrainStep, feed: Feed, count: int, found: Profile) -> None:
    watch = SyncWatch()
    seconds, by_step = _window(step, feed, feed, count, watch).read_steps()
    found.phases_ms, evidence = phases_of(seconds, by_step)
    found.evidence.update(evidence, **least_wait(by_step, feed.device))
    found.evidence["detailed_step_ms"] = evidence["phases_step_ms"]
    if feed.device.type != "cpu":
        found.evidence["sync_calls_per_step"] = sum(watch.calls.values()) / count
        found.evidence["sync_wait_ms"] = watch.seconds * 1e3 / count
    sites = {site: calls / count for site, calls in watch.calls.most_common(_SITES)}
    if sites:
        found.environment["sync_points"] = sites


def _leave_out(step: TrainStep, feed: Feed, count: int, found: Profile) -> None:
    """Steps as they are, with one batch over and over, and without exchange of gradients, in turn.

    What a step takes less is the most that better loading or communication can give.
    """
    kept = feed()
    whole: list[float] = []
    loaded: list[float] = []
    alone: list[float] = []
    for _ in range(_ROUNDS):
        whole += clock.slowest(_seconds(step, feed, feed, count), feed.device)
        loaded += clock.slowest(_seconds(step, feed, lambda: kept, count), feed.device)
        apart = step.alone()
        if apart is not None:
            with apart:
                alone += _seconds(step, feed, feed, count)
    for name, seconds in (
        ("with_everything", whole),
        ("without_loading", loaded),
        ("without_communication", alone),
    ):
        if seconds:
            found.evidence[f"{name}_ms"] = statistics.median(seconds) * 1e3
            error = statistics.stdev(seconds) / math.sqrt(len(seconds)) * 1e3
            found.evidence[f"{name}_error_ms"] = error


def _count_operations(step: TrainStep, feed: Feed) -> float:
    """Floating-point operations of this rank's step, by torch's counter."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        step.run(feed, _no_mark)
    return float(counter.get_total_flops())


def _traced(step: TrainStep, feed: Feed, request: TrialRequest, guard: Guard) -> DeviceTime | None:
    """Run steps under torch's profiler; they are run also where it fails, as peers wait."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CUDA] if feed.device.type == "cuda" else []
    if request.trace:
        activities.append(ProfilerActivity.CPU)
    profiler = profile(activities=activities)
    guard.read("profiler", profiler.start)
    clock.slowest([0.0], feed.device)  # ranks take unlike long to start it: see `after_read`
    for _ in range(PROFILED_STEPS):
        step.run(feed, _no_mark)
    clock.synchronize(feed.device)
    if "profiler" in guard.unsupported:
        return None
    return guard.read("kernels", lambda: _stop(profiler, feed, request))


def _stop(profiler: Any, feed: Feed, request: TrialRequest) -> DeviceTime | None:
    profiler.stop()
    with temporary_directory() as directory:
        trace = directory / "trace.json"
        profiler.export_chrome_trace(str(trace))
        if request.trace:
            kept = trace_file(request.log_directory, feed.rank)
            with trace.open("rb") as source, gzip.open(kept, "wb") as target:
                shutil.copyfileobj(source, target)
        return device_time(trace, after_read=True)


def _device(found: DeviceTime, evidence: dict[str, float]) -> None:
    each = found.per_step(PROFILED_STEPS)
    evidence["device_busy_ms"] = each.busy_ms
    evidence["device_communication_ms"] = each.communication_ms
    evidence["device_exposed_ms"] = each.exposed_ms
    evidence["kernels_per_step"] = float(each.kernels)


# -----------------------------------------------------------------------------
# Where a step makes the host wait for the device.

_VALUES = (
    *("item", "tolist", "cpu", "numpy", "nonzero"),
    *("__bool__", "__int__", "__float__", "__index__"),
)
"""Methods of a tensor that wait until its value is there."""

_LIBRARY = "torch"
_LOOP = ("perfsearch.workers.", "perfsearch.training.", "perfsearch.soap.")


class SyncWatch:
    """Times and counts the calls that wait for the device, while it is entered.

    Args:
        is_remote: whether a tensor's value has to come from a device.
        clock: seconds on the host.

    Attributes:
        seconds: spent in such calls.
        calls: their number by the line that made them; a call inside another is a part of that.

    """

    def __init__(
        self,
        is_remote: Callable[[torch.Tensor], bool] = lambda tensor: tensor.device.type != "cpu",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.seconds = 0.0
        self.calls: Counter[str] = Counter()
        self._is_remote = is_remote
        self._clock = clock
        self._inside = False
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> SyncWatch:
        for name in _VALUES:
            self._wrap(torch.Tensor, name, lambda tensor, *_, **__: self._is_remote(tensor))
        self._wrap(torch.Tensor, "to", self._goes_home)
        self._wrap(torch.cuda, "synchronize", lambda *_, **__: True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        while self._undo:
            self._undo.pop()()

    def _wrap(self, owner: Any, name: str, waits: Callable[..., bool]) -> None:
        original = getattr(owner, name)
        inherited = name not in vars(owner)

        def call(*arguments: Any, **named: Any) -> Any:
            if self._inside or not waits(*arguments, **named):
                return original(*arguments, **named)
            self._inside = True
            begin = self._clock()
            try:
                return original(*arguments, **named)
            finally:
                self.seconds += self._clock() - begin
                self.calls[_site(sys._getframe(1))] += 1
                self._inside = False

        def undo() -> None:
            if inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, original)

        setattr(owner, name, call)
        self._undo.append(undo)

    def _goes_home(self, tensor: torch.Tensor, *arguments: Any, **named: Any) -> bool:
        targets = [str(a) for a in (*arguments, named.get("device")) if isinstance(a, _TARGETS)]
        return "cpu" in targets and self._is_remote(tensor)


_TARGETS = (str, torch.device)


def _site(frame: FrameType | None) -> str:
    """File and line of the user's code that called; the library, where its own step did."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith(_LOOP):
            break
        if module != _LIBRARY and not module.startswith(f"{_LIBRARY}."):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return _LIBRARY
