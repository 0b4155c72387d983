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

    Attributes:
        mark: told ``forward`` when a backward pass begins and ``backward`` when it has ended.
        keeping: whether losses are kept at all.
        dtype: of the last one kept, which says how finely it can be told; empty before.

    """

    def __init__(self) -> None:
        self.mark: Callable[[str], None] | None = None
        self.keeping = True
        self.dtype = ""
        self._parts: list[torch.Tensor] = []
        self._unscaled: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._undo = (
            wrap(torch.autograd, "backward", self._backward),
            wrap(torch.amp.GradScaler, "scale", self._scale),
        )

    def _backward(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        roots = args[0] if args else kwargs.get("tensors")
        if self.mark is not None:
            self.mark("forward")
        if self.keeping:
            self._keep(roots)
        result = original(*args, **kwargs)
        if self.mark is not None:
            self.mark("backward")
        return result

    def _scale(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        scaled = original(*args, **kwargs)
        plain = args[1] if len(args) > 1 else kwargs.get("outputs")
        if isinstance(scaled, torch.Tensor) and isinstance(plain, torch.Tensor):
            self._unscaled[scaled] = plain.detach()
        return scaled

    def _keep(self, roots: Any) -> None:
        for root in [roots] if isinstance(roots, torch.Tensor) else list(roots or ()):
            loss = self._unscaled.get(root, root)
            if loss.numel() == 1 and len(self._parts) < _MOST_BACKWARDS:
                self.dtype = str(loss.dtype).removeprefix("torch.")
                self._parts.append(loss.detach().reshape(()).float())

    def take(self) -> torch.Tensor | None:
        """The loss of the step that has just been made; ``None`` where none was seen."""
        parts, self._parts = self._parts, []
        if not parts:
            return None
        total: torch.Tensor = parts[0] if len(parts) == 1 else torch.stack(parts).sum()
        return total.clone()

    def undo(self) -> None:
        """Take the wrapping away."""
        for undo in self._undo:
            undo()
