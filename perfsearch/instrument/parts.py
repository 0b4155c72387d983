"""What each step of a scored window spends the host's time on, told so cheaply that all are told.

The phases of a step are timed in some of a window's steps only. What makes a few of them slow must
be met in whichever step it comes: so here a handful of calls read the clock in all of them.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from perfsearch.instrument.patching import after_import, wrap
from perfsearch.metrics.slow_steps import Cause


class Parts:
    """Every moment of a step belongs to one part: a call that is known, or what it ends with.

    Threads other than the one that steps are not told apart.

    Attributes:
        steps: seconds of each step since the window began, by part.

    """

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._watching = False
        self._thread = 0
        self._now: dict[str, float] = {}
        self._since = 0.0
        self._taken = 0.0
        self._begun: dict[str, float] = {}
        wrap(torch, "save", self._save)
        after_import("safetensors.torch", self._meet_safetensors)
        after_import("torch._dynamo.callback", self._meet_compiler)

    def begin(self) -> None:
        """Begin a window here."""
        self.steps, self._now, self._begun = [], {}, {}
        self._thread = threading.get_ident()
        self._since = time.perf_counter()
        if not self._watching:
            gc.callbacks.append(self._collect)
        self._watching = True

    def end(self) -> None:
        """Tell of nothing any more."""
        if self._watching:
            gc.callbacks.remove(self._collect)
        self._watching = False

    def passed(self, part: Cause) -> None:
        """Note that the time since the last moment that was noted was this part's."""
        if self._is_told():
            now = time.perf_counter()
            self._now[part] = self._now.get(part, 0.0) + now - self._since
            self._since = now

    def end_step(self) -> None:
        """Note that a step ends."""
        self.steps.append(self._now)
        self._now = {}

    def called(self, part: Cause, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call something whose time is this part's, and none of what it is called in."""
        if not self._is_told():
            return call(*args, **kwargs)
        begin = self._own_now()
        try:
            return call(*args, **kwargs)
        finally:
            self._take_out(part, self._own_now() - begin)

    def _is_told(self) -> bool:
        return self._watching and threading.get_ident() == self._thread

    def _own_now(self) -> float:
        """A clock that stands still in parts that are taken out: one in another is not in both."""
        return time.perf_counter() - self._taken

    def _take_out(self, part: Cause, seconds: float) -> None:
        self._taken += seconds
        self._now[part] = self._now.get(part, 0.0) + seconds
        self._since += seconds

    def _save(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return self.called(Cause.SAVING, original, *args, **kwargs)

    def _meet_safetensors(self, module: ModuleType) -> None:
        for name in ("save_file", "save_model"):
            if hasattr(module, name):
                wrap(module, name, self._save)

    def _meet_compiler(self, module: ModuleType) -> None:
        handler = getattr(module, "callback_handler", None)
        if handler is not None:  # not every version of torch has it
            handler.register_start_callback(lambda *_: self._start(Cause.COMPILING))
            handler.register_end_callback(lambda *_: self._stop(Cause.COMPILING))

    def _collect(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._start(Cause.COLLECTING)
        else:
            self._stop(Cause.COLLECTING)

    def _start(self, part: Cause) -> None:
        if self._is_told():
            self._begun[part] = self._own_now()

    def _stop(self, part: Cause) -> None:
        begun = self._begun.pop(part, None)
        if begun is not None and self._is_told():
            self._take_out(part, self._own_now() - begun)
