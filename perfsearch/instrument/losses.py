"""The loss of a step, recognised as the tensor from which a backward pass starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from perfsearch.instrument.patches import wrap

_MOST_BACKWARDS = 4096  # of a step; more is no training step, and must not fill the memory

_SINGLE = (torch.Tensor, torch.autograd.graph.GradientEdge)


class Losses:
    """Sums the losses of the backward passes since the last step, without waiting for a device.

    A loss that was scaled for half precision counts as it was before.

    Args:
        waits: whether backward passes may end in waiting for communication that others have begun,
            as those through DistributedDataParallel do.
        begun: told that a backward pass begins, where losses are kept.

    Attributes:
        mark: told ``forward`` when a backward pass begins, ``backward`` when everything is
            computed, and, where it ``waits``, ``comm_exposed`` when it has ended.
        keeping: whether losses are kept at all.

    """

    def __init__(
        self, waits: Callable[[], bool] = lambda: False, begun: Callable[[], None] = lambda: None
    ) -> None:
        self._waits = waits
        self._begun = begun
        self.mark: Callable[[str], None] | None = None
        self.keeping = True
        self._inside = False
        self._computed = False
        self._dtype: torch.dtype | None = None
        self._parts: list[float | torch.Tensor] = []
        self._unscaled: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._undo = (
            wrap(torch.autograd, "backward", self._backward),
            wrap(torch.amp.GradScaler, "scale", self._scale),
        )

    @property
    def dtype(self) -> str:
        """Of the last loss kept, which says how finely it can be told; empty before."""
        return str(self._dtype or "").removeprefix("torch.")

    def _backward(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._inside:  # a pass inside a pass, as reentrant checkpointing makes it
            return original(*args, **kwargs)
        given = args[0] if args else kwargs.pop("tensors", None)
        roots = (given,) if isinstance(given, _SINGLE) else tuple(given or ())
        rest, mark = args[1:], self.mark
        if mark is not None:
            mark("forward")
        if self.keeping:
            self._begun()
            self._keep(roots)
        self._computed = False
        hook = self._hook_first_gradient(roots) if mark is not None and self._waits() else None
        self._inside = True
        try:
            result = original(roots, *rest, **kwargs)
        finally:
            self._inside = False
            if hook is not None:  # the same loss may be differentiated again, or saved
                hook.remove()
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
