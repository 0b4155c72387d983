"""Where the time of scored steps goes: points on their clock, and calls inside of one another."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, MethodType, ModuleType
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from perfsearch.instrument.patching import CALLS, after_import, wrap
from perfsearch.training.clock import Clock

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
        clock: of the window, which has begun; read only when that is over.

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


# -----------------------------------------------------------------------------
# Calls beside the passes that a step's time goes to: schedulers, callbacks, metrics.
#
# They are wrapped once and for all; outside of a scored window the wrapper only sees that there
# is none.

SCHEDULERS = "step_lr_schedulers"


class Calls:
    """Times the calls while a window is scored.

    Attributes:
        phases: of the window; ``None`` outside of one.

    """

    def __init__(self) -> None:
        self.phases: Phases | None = None
        self._wrapped: set[type] = set()
        self._undo = [wrap(LRScheduler, "__init__", self._construct)]
        for found in list(vars(lr_scheduler).values()):
            if isinstance(found, type) and issubclass(found, LRScheduler):
                self._wrap_step(found)
        for module, path, phase in CALLS:
            after_import(module, lambda m, p=path, n=phase: self._meet(m, p, n))  # type: ignore[misc]

    def _meet(self, module: ModuleType, path: str, phase: str) -> None:
        """Wrap a framework's function, where this version of it has one."""
        owner, _, name = path.rpartition(".")
        holder = getattr(module, owner, None) if owner else module
        if holder is not None and hasattr(holder, name):
            self._undo.append(wrap(holder, name, self._timed(phase)))

    def _timed(self, phase: str) -> Callable[..., Any]:
        def around(
            original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            phases = self.phases
            if phases is None or not phases.enter(phase):
                return original(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                phases.leave()

        return around

    def _construct(
        self, original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        original(*args, **kwargs)
        for base in type(args[0]).__mro__:  # classes of the script's own have their own step
            if issubclass(base, LRScheduler):
                self._wrap_step(base)

    def _wrap_step(self, scheduler: type[LRScheduler]) -> None:
        if scheduler not in self._wrapped and "step" in vars(scheduler):
            self._wrapped.add(scheduler)
            self._undo.append(wrap(scheduler, "step", self._timed(SCHEDULERS)))

    def undo(self) -> None:
        """Take the wrapping away."""
        for undo in self._undo:
            undo()


# -----------------------------------------------------------------------------
# Copies between host and device, while a window is scored: ``to_device`` and ``from_device``.

TO_DEVICE = "to_device"
FROM_DEVICE = "from_device"

_VALUES = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__")
"""Methods of a tensor that wait until its value is there."""

_OWN = ("torch", "perfsearch")


class Transfers:
    """Times copies of tensors between host and device, and where the host waits for a value.

    A module's ``to`` and ``cuda`` copy tensor by tensor, so that they are seen too. What goes on in
    another stream than the steps, as where batches are copied ahead, takes none of their time.

    Args:
        phases: of the window.
        is_remote: whether a device is another than the host; by default by its type.
        clock: seconds on the host.

    Attributes:
        calls: that waited for the device, by the line that made them.
        seconds: that the host spent in them.
        watching: whether anything is timed; it is where the methods have been wrapped.

    """

    def __init__(
        self,
        phases: Phases,
        is_remote: Callable[[torch.device], bool] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.calls: Counter[str] = Counter()
        self.seconds = 0.0
        self.watching = True
        self._phases = phases
        self._is_remote = is_remote or (lambda device: device.type != "cpu")
        self._value_method = _ValueMethod if is_remote is None else _Method
        self._clock = clock
        self._inside = False
        self._stream = _stream()
        self._undo: list[Callable[[], None]] = []

    def watch(self) -> None:
        """Wrap the methods; ``undo`` takes the wrapping away."""
        for name in _VALUES:
            self._wrap(name, self._fetches, self._value_method)
        self._wrap("to", self._moves, _Method)
        self._wrap("cuda", self._uploads, _Method)

    def undo(self) -> None:
        """Take the wrapping away."""
        while self._undo:
            self._undo.pop()()

    def _wrap(self, name: str, phase_of: Callable[..., str | None], kind: type[_Method]) -> None:
        inherited = name not in vars(torch.Tensor)
        original = getattr(torch.Tensor, name)

        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            watching = self.watching and not self._inside
            phase = phase_of(tensor, args, kwargs) if watching else None
            if phase is None or _stream() != self._stream or not self._phases.enter(phase):
                return original(tensor, *args, **kwargs)
            self._inside = True  # what it calls in its turn is a part of it
            begin = self._clock()
            try:
                return original(tensor, *args, **kwargs)
            finally:
                self._inside = False
                if phase == FROM_DEVICE:
                    self.seconds += self._clock() - begin
                    self.calls[_site(sys._getframe(1))] += 1
                self._phases.leave()

        def undo() -> None:
            if inherited:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, original)

        setattr(torch.Tensor, name, kind(call, original))
        self._undo.append(undo)

    def _fetches(self, tensor: torch.Tensor, args: Any, kwargs: Any) -> str | None:
        return FROM_DEVICE if self._is_remote(tensor.device) else None

    def _uploads(self, tensor: torch.Tensor, args: Any, kwargs: Any) -> str | None:
        return None if self._is_remote(tensor.device) else TO_DEVICE

    def _moves(
        self, tensor: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> str | None:
        target = args[0] if args else kwargs.get("device", kwargs.get("other"))
        if target is None or isinstance(target, torch.dtype):
            return None
        if isinstance(target, torch.Tensor):
            target = target.device
        here, there = (self._is_remote(d) for d in (tensor.device, torch.device(target)))
        if here == there:
            return None
        return TO_DEVICE if there else FROM_DEVICE


class _Method:
    """Stands in a method's place and is equal to it.

    Subclasses of tensors are told which method is called, and look it up among those they know.
    """

    def __init__(self, call: Callable[..., Any], original: Any) -> None:
        self._call = call
        self._original = original
        self.__name__ = original.__name__
        self.__doc__ = original.__doc__

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self._call, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return other is self or self._original == other

    def __hash__(self) -> int:
        return hash(self._original)


class _ValueMethod(_Method):
    """Lets go by what lies on the host: optimizers read hundreds of step counts there in a step."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        if instance.is_cpu:
            return self._original.__get__(instance)
        return MethodType(self._call, instance)


def _stream() -> Any:
    """The present stream, which the clock's points are on; ``None`` without a GPU."""
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None


def _site(frame: FrameType | None) -> str:
    """File and line that called, outside of torch."""
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _OWN:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "torch"
