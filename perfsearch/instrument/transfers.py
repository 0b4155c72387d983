"""Copies between host and device, while a window is scored: ``to_device`` and ``from_device``."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, MethodType
from typing import Any

import torch

from perfsearch.instrument.phases import Phases

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
        self._values_stand = _ValueStand if is_remote is None else _Stand
        self._clock = clock
        self._inside = False
        self._stream = _stream()
        self._undo: list[Callable[[], None]] = []

    def watch(self) -> None:
        """Wrap the methods; ``undo`` takes the wrapping away."""
        for name in _VALUES:
            self._wrap(name, self._fetches, self._values_stand)
        self._wrap("to", self._moves, _Stand)
        self._wrap("cuda", self._uploads, _Stand)

    def undo(self) -> None:
        """Take the wrapping away."""
        while self._undo:
            self._undo.pop()()

    def _wrap(self, name: str, phase_of: Callable[..., str | None], stand: type[_Stand]) -> None:
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

        setattr(torch.Tensor, name, stand(call, original))
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


class _Stand:
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


class _ValueStand(_Stand):
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
