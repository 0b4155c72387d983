"""Where a step makes the host wait for the device."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import torch

_VALUES = (
    *("item", "tolist", "cpu", "numpy", "nonzero"),
    *("__bool__", "__int__", "__float__", "__index__"),
)
"""Methods of a tensor that wait until its value is there."""

_LIBRARY = "torch"
_LOOP = ("perfsearch.workers.", "perfsearch.parallel.")


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
