"""Calls beside the passes that a step's time goes to: schedulers, callbacks, metrics.

They are wrapped once and for all; outside of a scored window the wrapper only sees that there is
none.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch.optim import lr_scheduler as _module
from torch.optim.lr_scheduler import LRScheduler

from perfsearch.instrument.frameworks import CALLS
from perfsearch.instrument.imports import after_import
from perfsearch.instrument.patches import wrap
from perfsearch.instrument.phases import Phases

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
        for found in list(vars(_module).values()):
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
