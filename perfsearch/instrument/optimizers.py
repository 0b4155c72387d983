"""Optimizers in a script: their implementation, the steps that they make, and the losses."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from perfsearch.core.knob import Value
from perfsearch.instrument.parts import Parts
from perfsearch.instrument.patching import wrap
from perfsearch.instrument.phases import Phases
from perfsearch.knobs.optimizer import (
    DEFAULT,
    IMPLEMENTATION,
    IMPLEMENTATIONS,
    apply_implementation,
    implementation_of,
)
from perfsearch.metrics.slow_steps import Cause

OPTIMIZER = "optimizer"


class Optimizers:
    """Every optimizer that the script makes from now on, and the steps of the one that leads.

    The first optimizer whose step ends is the one by whose steps training steps are counted:
    of several it is always the same, and of one that wraps another it is the inner one.

    Args:
        knobs: the implementation, if any.

    Attributes:
        before_step: called when the leading optimizer begins a step; before any has made one, when
            whichever begins.
        after_step: called when it has made one.
        phases: of a scored window, told of the steps that the others make; ``None`` outside.
        ignored: why an implementation that was asked for is not in force.

    """

    def __init__(self, knobs: Mapping[str, Value]) -> None:
        self.before_step: Callable[[], None] | None = None
        self.after_step: Callable[[], None] | None = None
        self.phases: Phases | None = None
        self.ignored: dict[str, str] = {}
        self._timed: list[Any] = []
        self._counting = True
        self._choice: Value = IMPLEMENTATION.of(knobs)
        self._made: list[weakref.ref[Any]] = []
        self._own: weakref.WeakKeyDictionary[Any, list[dict[str, Any]]] = (
            weakref.WeakKeyDictionary()
        )
        self._begun: weakref.WeakSet[Any] = weakref.WeakSet()
        self._counted: tuple[tuple[int, int], int] | None = None
        self._leader: weakref.ref[Any] | None = None
        self._undo = wrap(Optimizer, "__init__", self._construct)
        self._hooks = (
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        )

    @property
    def live(self) -> list[Any]:
        """Those that still exist, in the order of their making."""
        return [optimizer for ref in self._made if (optimizer := ref()) is not None]

    def parameters(self) -> int:
        """Numbers that they train on this rank."""
        groups = [g for optimizer in self.live for g in optimizer.param_groups]
        if self._counted is None or self._counted[0] != (self.made, len(groups)):
            sizes = {id(p): p.numel() for group in groups for p in group["params"]}
            self._counted = (self.made, len(groups)), sum(sizes.values())
        return self._counted[1]

    @property
    def made(self) -> int:
        """How many there were so far."""
        return len(self._made)

    @property
    def leader(self) -> Any:
        """The optimizer whose steps are counted, once there was one."""
        return self._leader() if self._leader is not None else None

    def _construct(
        self, original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        original(*args, **kwargs)
        optimizer = args[0]
        self._made.append(weakref.ref(optimizer))
        self._own[optimizer] = [_flags(group) for group in optimizer.param_groups]

    def _put_into_force(self, optimizer: Any) -> None:
        """Set the implementation; whether it takes effect is seen when it is read back."""
        if self._choice in (None, DEFAULT):
            return
        try:
            apply_implementation(optimizer, self._choice)
        except ValueError as error:
            self.ignored[IMPLEMENTATION.name] = str(error)
            return
        for name in ("foreach", "fused"):  # for parameter groups that are added later
            if name in optimizer.defaults:
                optimizer.defaults[name] = self._choice == name
        for group in optimizer.param_groups:
            _place_step_counts(optimizer, group)

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer not in self._begun:
            # not in the constructor: the subclass's has more to say, and so has a checkpoint
            self._begun.add(optimizer)
            self._put_into_force(optimizer)
        if not self._counting:
            return
        if optimizer is self.leader or self._leader is None:
            if self.before_step is not None:
                self.before_step()
        elif self.phases is not None and self.phases.enter(OPTIMIZER):
            self._timed.append((optimizer, self.phases))

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._leader is None:
            self._leader = weakref.ref(optimizer)
        if self._timed and self._timed[-1][0] is optimizer:
            self._timed.pop()[1].leave()
        if self._counting and self.after_step is not None and optimizer is self.leader:
            self.after_step()

    @contextmanager
    def counted_from_outside(self) -> Iterator[None]:
        """Count the block as one step, whatever optimizers do inside of it."""
        if self.before_step is not None:
            self.before_step()
        self._counting = False
        try:
            yield
        finally:
            self._counting = True
        if self.after_step is not None:
            self.after_step()

    def change(self, knobs: Mapping[str, Value]) -> None:
        """Use another implementation from the next step on.

        State that the implementations keep in different places is moved: a fused one has its step
        counts on the parameter's device, the others on the host.
        """
        self._choice = IMPLEMENTATION.of(knobs)
        self.ignored.pop(IMPLEMENTATION.name, None)
        for optimizer in self.live:
            own = self._own.get(optimizer, [])
            for group, flags in zip(optimizer.param_groups, own, strict=False):
                group.update(flags)
            for group in optimizer.param_groups:
                _place_step_counts(optimizer, group)
            self._put_into_force(optimizer)

    def values(self) -> dict[str, Value]:
        """Which implementation the leading optimizer, or else the last one made, is set to."""
        live = self.live
        optimizer = self.leader or (live[-1] if live else None)
        return {} if optimizer is None else {IMPLEMENTATION.name: implementation_of(optimizer)}

    def implementations(self) -> list[str] | None:
        """Which implementations every optimizer that has stepped has; ``None`` before."""
        groups = [g for o in self.live if o in self._begun for g in o.param_groups]
        if not groups:
            return None
        return [n for n in IMPLEMENTATIONS if n == DEFAULT or all(n in g for g in groups)]

    def undo(self) -> None:
        """Take the wrapping and the hooks away."""
        self._undo()
        for hook in self._hooks:
            hook.remove()


def _flags(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in ("foreach", "fused") if name in group}


def _place_step_counts(optimizer: Any, group: Mapping[str, Any]) -> None:
    on_device = bool(group.get("fused") or group.get("capturable"))
    for parameter in group["params"]:
        state = optimizer.state.get(parameter, {})
        steps = state.get("step")
        if isinstance(steps, torch.Tensor):
            state["step"] = steps.to(parameter.device if on_device else "cpu")


# -----------------------------------------------------------------------------
# The loss of a step, recognised as the tensor from which a backward pass starts.

_MOST_BACKWARDS = 4096  # of a step; more is no training step, and must not fill the memory

_SINGLE = (torch.Tensor, torch.autograd.graph.GradientEdge)


class Losses:
    """Sums the losses of the backward passes since the last step, without waiting for a device.

    A loss that was scaled for half precision counts as it was before.

    Args:
        waits: whether backward passes may end in waiting for communication that others have begun,
            as those through DistributedDataParallel do.
        begun: told that a backward pass begins, and from what, where losses are kept.

    Attributes:
        mark: told ``forward`` when a backward pass begins, ``backward`` when everything is
            computed, and, where it ``waits``, ``comm_exposed`` when it has ended.
        parts: told what was a backward pass, where steps are scored.
        keeping: whether losses are kept at all.

    """

    def __init__(
        self,
        waits: Callable[[], bool] = lambda: False,
        begun: Callable[[tuple[Any, ...]], None] = lambda roots: None,
    ) -> None:
        self._waits = waits
        self._begun = begun
        self.mark: Callable[[str], None] | None = None
        self.parts: Parts | None = None
        self.keeping = True
        self._inside = False
        self._computed = False
        self._dtype: torch.dtype | None = None
        self._parts: list[float | torch.Tensor] = []
        self._unscaled: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._undo = (
            wrap(torch.autograd, "backward", self._backward),
            wrap(torch.autograd, "grad", self._grad),
            wrap(torch.amp.GradScaler, "scale", self._scale),
        )

    @property
    def dtype(self) -> str:
        """Of the last loss kept, which says how finely it can be told; empty before."""
        return str(self._dtype or "").removeprefix("torch.")

    def _grad(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A backward pass as well, unless its result is to be differentiated, as a penalty is, or
        torch.compile traces it.
        """
        create_graph = args[4] if len(args) > 4 else kwargs.get("create_graph", False)
        if create_graph or is_traced(args[0] if args else kwargs.get("outputs")):
            return original(*args, **kwargs)
        return self._backward(original, args, kwargs, "outputs")

    def _backward(
        self,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str = "tensors",
    ) -> Any:
        if self._inside:  # a pass inside a pass, as reentrant checkpointing makes it
            return original(*args, **kwargs)
        given = args[0] if args else kwargs.pop(name, None)
        roots = (given,) if isinstance(given, _SINGLE) else tuple(given or ())
        rest, mark = args[1:], self.mark
        if mark is not None:
            mark("forward")
        if self.keeping:
            self._begun(roots)
            self._keep(roots)
        self._computed = False
        parts = self.parts
        if parts is not None:
            parts.passed(Cause.OWN)
        hook = self._hook_first_gradient(roots) if mark is not None and self._waits() else None
        self._inside = True
        try:
            result = original(roots, *rest, **kwargs)
        finally:
            self._inside = False
            if hook is not None:  # the same loss may be differentiated again, or saved
                hook.remove()
        if parts is not None:
            parts.passed(Cause.BACKWARD)
        if mark is not None:
            mark("comm_exposed" if self._computed else "backward")
        return result

    def _hook_first_gradient(self, roots: tuple[Any, ...]) -> Any:
        """Have ``backward`` marked when the pass has computed everything.

        The wrapper waits in a callback that it registers with the last gradient. One that is
        registered with the first gradient runs before it.
        """
        first = roots[0] if roots else None
        if isinstance(first, torch.Tensor) and first.grad_fn is not None:
            return first.register_hook(self._at_first_gradient)
        return None

    def _at_first_gradient(self, gradient: torch.Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self._mark_computed)

    def _mark_computed(self) -> None:
        if self.mark is not None:
            self.mark("backward")
            self._computed = True

    def _scale(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        scaled = original(*args, **kwargs)
        plain = args[1] if len(args) > 1 else kwargs.get("outputs")
        if isinstance(scaled, torch.Tensor) and isinstance(plain, torch.Tensor):
            self._unscaled[scaled] = plain.detach()
        return scaled

    def _keep(self, roots: tuple[Any, ...]) -> None:
        for root in roots:
            if not isinstance(root, torch.Tensor):
                continue
            loss = self._unscaled.get(root, root) if self._unscaled else root
            if loss.numel() == 1 and len(self._parts) < _MOST_BACKWARDS:
                self._dtype = loss.dtype
                # what is no plain tensor may have to ask other ranks for its value
                on_host = type(loss) is torch.Tensor and loss.is_cpu and loss.is_floating_point()
                self._parts.append(loss.item() if on_host else loss.detach())

    def take(self) -> float | torch.Tensor | None:
        """The loss of the step that has just been made; ``None`` where none was seen.

        It is a number where it lies on the host, and else a tensor of one element.
        """
        parts, self._parts = self._parts, []
        if not parts:
            return None
        total, *rest = parts
        if isinstance(total, torch.Tensor):  # copied, as the script may go on to change it
            total = total.to(torch.float32, copy=True).reshape(())
        for part in rest:
            total = total + (part.reshape(()).float() if isinstance(part, torch.Tensor) else part)
        return total

    def undo(self) -> None:
        """Take the wrapping away."""
        for undo in self._undo:
            undo()


def is_traced(given: Any) -> bool:
    """Whether a tensor, or one of several, stands for others in a graph that is being made."""
    roots = (given,) if isinstance(given, _SINGLE) else tuple(given or ())
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    functional = sys.modules.get("torch._subclasses.functional_tensor")
    kinds = [
        kind
        for module, name in ((fake, "FakeTensor"), (functional, "FunctionalTensor"))
        if (kind := getattr(module, name, None)) is not None
    ]
    return any(isinstance(root, tuple(kinds)) for root in roots)
