"""What a training step does that a traced program does not show: looked for while it is traced."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

_OWN = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parent}{os.sep}")
_SCALARS = (bool, int, float, str)
Attribute = tuple[nn.Module, str]


class Unseen:
    """Findings of one trace.

    Args:
        model: that is traced.

    Attributes:
        found: what a graph would get wrong, with the line of the user's code; empty: nothing.
        moved: plain attributes of modules that the forward pass changes, and their last values.

    """

    def __init__(self, model: nn.Module) -> None:
        self.found: list[str] = [*_hooks(model)]
        self.moved: dict[Attribute, Any] = {}
        self._first: dict[Attribute, Any] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Look at what is done within it."""
        drawn = _drawn()
        function, module, tensor = torch.autograd.Function, nn.Module, torch.Tensor
        apply, assign, hook = function.__dict__["apply"], module.__setattr__, tensor.register_hook
        function.apply = classmethod(self._applying(apply.__func__))
        module.__setattr__ = self._assigning(assign)
        tensor.register_hook = self._hooking(hook)
        inference = torch.inference_mode
        enter, inference.__enter__ = inference.__enter__, self._entering(inference.__enter__)
        try:
            yield
        finally:
            inference.__enter__ = enter
            function.apply, module.__setattr__, tensor.register_hook = apply, assign, hook
        for name, state in _drawn().items():
            if state != drawn.get(name, state):
                self.found.append(
                    f"the forward pass draws from {name}, which a graph would do once for all "
                    "steps; draw from torch, or not at all"
                )
        self.moved = {k: v for k, v in self.moved.items() if self._first[k] != v}

    def _applying(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        def run(kind: type, *arguments: Any, **keywords: Any) -> Any:
            if kind.__name__ == "CheckpointFunction":
                self._note("checkpointing with use_reentrant=True; give use_reentrant=False")
            elif not kind.__module__.startswith("torch."):
                self._note(
                    f"{kind.__qualname__} is an autograd.Function, whose own backward pass a "
                    "graph does not have; write it with torch's functions, or detach()"
                )
            return apply(kind, *arguments, **keywords)

        return run

    def _assigning(self, assign: Callable[..., None]) -> Callable[..., None]:
        def run(owner: nn.Module, name: str, value: Any) -> None:
            buffers = owner.__dict__.get("_buffers", {})
            if name in buffers and buffers[name] is not value and _is_users(sys._getframe(1)):
                self._note(
                    f"the forward pass gives buffer {name} of {type(owner).__name__} a new value, "
                    "which a graph would not keep"
                )
            if isinstance(value, _SCALARS) and _is_users(sys._getframe(1)):
                self._first.setdefault((owner, name), vars(owner).get(name))
                self.moved[owner, name] = value
            assign(owner, name, value)

        return run

    def _hooking(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(tensor: torch.Tensor, function: Any) -> Any:
            if _is_users(sys._getframe(1)):
                self._note("a hook on a gradient would not be called")
            return hook(tensor, function)

        return run

    def _entering(self, enter: Callable[..., None]) -> Callable[..., None]:
        def run(mode: torch.inference_mode) -> None:
            if mode.mode:
                self._note("inference_mode would be left out; use no_grad")
            enter(mode)

        return run

    def _note(self, what: str) -> None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and not _is_users(frame):
            frame = frame.f_back
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "the loss function"
        self.found.append(f"{what}; {place}")


def _is_users(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith(_OWN)


def _hooks(model: nn.Module) -> Iterator[str]:
    for name, parameter in model.named_parameters():
        after = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if parameter._backward_hooks or after:
            yield f"parameter {name} has a hook on its gradient, which would not be called"
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            yield f"module {name or 'itself'} has a backward hook, which would not be called"


def _drawn() -> dict[str, Any]:
    """States of generators that are not torch's."""
    states: dict[str, Any] = {"Python's random": random.getstate()}
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy.random"] = (kind, keys.tobytes(), *rest)
    return states
