"""DistributedDataParallel in a script: its constructor, its values, and wrapping again in place."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from perfsearch.core.knob import Value
from perfsearch.instrument.patching import untouched, wrap
from perfsearch.knobs.base import Use
from perfsearch.knobs.ddp import arguments_given, values_of

_KEPT_ATTRIBUTES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "training",
)
"""Of the module, which ``__init__`` would forget."""


class Wrappers:
    """Every ``DistributedDataParallel`` that the script makes from now on.

    Args:
        knobs: values for their constructors; those that are ``None`` or absent are left alone.

    Attributes:
        accumulates: whether a backward pass was seen after which no gradients are reduced.

    """

    def __init__(self, knobs: Mapping[str, Value]) -> None:
        self.knobs: dict[str, Value] = dict(knobs)
        self.accumulates = False
        self._made: list[weakref.ref[Any]] = []
        self._arguments: weakref.WeakKeyDictionary[Any, dict[str, Any]] = (
            weakref.WeakKeyDictionary()
        )
        self._signature = inspect.signature(DistributedDataParallel.__init__)
        self._undo = wrap(DistributedDataParallel, "__init__", self._construct)

    @property
    def live(self) -> list[Any]:
        """Those that still exist, in the order of their making."""
        return [wrapper for ref in self._made if (wrapper := ref()) is not None]

    def _construct(
        self, original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        bound = self._signature.bind(*args, **kwargs)
        own = {n: v for n, v in bound.arguments.items() if n not in ("self", "module", "kwargs")}
        own.update(bound.arguments.get("kwargs", {}))
        wrapper, module = bound.arguments["self"], bound.arguments["module"]
        original(wrapper, module, **arguments_given(own, self.knobs))
        self._arguments[wrapper] = own
        self._made.append(weakref.ref(wrapper))

    def note_backward(self) -> None:
        """See whether the backward pass that begins is one without reduction."""
        if not self.accumulates:
            for ref in self._made:
                wrapper = ref()
                if wrapper is not None and not wrapper.require_backward_grad_sync:
                    self.accumulates = True

    def wrap_again(self, knobs: Mapping[str, Value]) -> None:
        """Give every wrapper other settings, between two steps; each stays the object that it is.

        Weights, hooks of the wrapper and the script's references to it are untouched; what the
        constructor would send around the ranks is the same on each already.
        """
        self.knobs = dict(knobs)
        for wrapper in self.live:
            kept = {name: wrapper.__dict__[name] for name in _KEPT_ATTRIBUTES}
            hooks = list(wrapper.__dict__.get("_comm_hooks", ()))
            wrapper._remove_autograd_hooks()
            given = {**arguments_given(self._arguments[wrapper], self.knobs), "init_sync": False}
            module = wrapper.module
            with untouched():
                wrapper.__init__(module, **given)
            wrapper.__dict__.update(kept)
            for hook, state in hooks:
                wrapper.register_comm_hook(state, hook)

    def why_not_again(self) -> str:
        """Why the wrappers cannot be made again in place; empty where they can."""
        for wrapper in self.live:
            if wrapper.mixed_precision is not None:
                return "DistributedDataParallel has a mixed_precision of its own"
            if wrapper._delay_all_reduce_params or wrapper._use_python_reducer:
                return "DistributedDataParallel reduces gradients by other means"
        return ""

    def values(self) -> dict[str, Value]:
        """What is in force in the last wrapper that was made."""
        live = self.live
        return values_of(live[-1], Use.SCRIPT) if live else {}

    def undo(self) -> None:
        """Take the wrapping of the constructor away."""
        self._undo()
