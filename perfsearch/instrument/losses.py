"""The loss of a step, recognised as the tensor from which a backward pass starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from perfsearch.instrument.patches import wrap

_MOST_BACKWARDS = 4096  # of a step; more is no training step, and must not fill the memory


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
        dtype: of the last one kept, which says how finely it can be told; empty before.

    """

    def __init__(
        self, waits: Callable[[], bool] = lambda: False, begun: Callable[[], None] = lambda: None
    ) -> None:
        self._waits = waits
        self._begun = begun
        self.mark: Callable[[str], None] | None = None
        self.keeping = True
        self.dtype = ""
        self._inside = False
        self._parts: list[torch.Tensor] = []
        self._unscaled: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._undo = (
            wrap(torch.autograd, "backward", self._backward),
            wrap(torch.amp.GradScaler, "scale", self._scale),
        )

    def _backward(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._inside:  # a pass inside a pass, as reentrant checkpointing makes it
            return original(*args, **kwargs)
        given = args[0] if args else kwargs.pop("tensors", None)
        single = isinstance(given, torch.Tensor | torch.autograd.graph.GradientEdge)
        roots = (given,) if single else tuple(given or ())
        rest, mark = args[1:], self.mark
        if mark is not None:
            mark("forward")
        if self.keeping:
            self._begun()
            self._keep(roots)
        marked: list[bool] = []
        if mark is not None and self._waits():
            self._mark_computed(roots, mark, marked)
        self._inside = True
        try:
            result = original(roots, *rest, **kwargs)
        finally:
            self._inside = False
        if mark is not None:
            mark("comm_exposed" if marked else "backward")
        return result

    @staticmethod
    def _mark_computed(
        roots: tuple[Any, ...], mark: Callable[[str], None], marked: list[bool]
    ) -> None:
        """Have ``backward`` marked when the pass has computed everything, and noted in ``marked``.

        The wrapper waits in a callback that it registers with the last gradient. One that is
        registered with the first gradient runs before it.
        """
        first = roots[0] if roots else None
        if not isinstance(first, torch.Tensor) or first.grad_fn is None:
            return
        engine = torch.autograd.Variable._execution_engine

        def computed() -> None:
            mark("backward")
            marked.append(True)

        def at_first_gradient(gradient: torch.Tensor) -> None:
            handle.remove()  # the same loss may be differentiated again
            engine.queue_callback(computed)

        handle = first.register_hook(at_first_gradient)

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
                self.dtype = str(loss.dtype).removeprefix("torch.")
                self._parts.append(loss.detach())

    def take(self) -> torch.Tensor | None:
        """The loss of the step that has just been made; ``None`` where none was seen."""
        parts, self._parts = self._parts, []
        if not parts:
            return None
        if len(parts) == 1:  # copied, as the script may go on to change what it has there
            return parts[0].to(torch.float32, copy=True).reshape(())
        return torch.stack([part.reshape(()).float() for part in parts]).sum()

    def undo(self) -> None:
        """Take the wrapping away."""
        for undo in self._undo:
            undo()
