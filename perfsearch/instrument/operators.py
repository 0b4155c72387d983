"""Which operators a script trains through, as the graphs of its first backward passes name them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

_MOST_NODES = 100_000
"""Nodes that are looked at in one start: a fraction of a second."""

_STEPS = 2
"""Steps whose backward passes are looked at in a new start."""

_CONVOLUTION = "ConvolutionBackward"

_ATTENTION = {
    "ScaledDotProductFlashAttention": "flash",
    "ScaledDotProductEfficientAttention": "efficient",
    "ScaledDotProductCudnnAttention": "cudnn",
}
"""Beginnings of the names of attention's nodes; torch's plain way (math) has none of its own."""

_HIDING = ("Compiled", "Checkpoint")
"""In the names of nodes that have other nodes inside: compiled code, reentrant checkpointing."""


class Operators:
    """Looks at the graphs of backward passes in the first steps, and after a change of knobs."""

    def __init__(self) -> None:
        self._steps_left = _STEPS
        self._nodes_left = _MOST_NODES
        self._convolution = False
        self._attention: set[str] = set()
        self._hidden = self._seen = False

    def look_again(self) -> None:
        """Forget what was seen, since what computes it has changed; the next step tells anew."""
        self._steps_left = max(1, self._steps_left)
        self._nodes_left = _MOST_NODES
        self._attention = set()
        self._hidden = self._seen = False

    def end_step(self) -> None:
        """Note that a step is over."""
        self._steps_left -= 1

    def backward(self, roots: Iterable[Any]) -> None:
        """Look at what a pass from these tensors will go through."""
        if self._steps_left <= 0:
            return
        self._seen = True
        left = [r.grad_fn for r in roots if isinstance(r, torch.Tensor) and r.grad_fn is not None]
        found = set(left)
        while left and len(found) < self._nodes_left:
            node = left.pop()
            self._note(type(node).__name__)
            further = {n for n, _ in node.next_functions if n is not None} - found
            found |= further
            left.extend(further)
        self._nodes_left -= len(found)
        self._hidden |= bool(left)

    def _note(self, name: str) -> None:
        self._convolution |= name.startswith(_CONVOLUTION)
        self._hidden |= any(part in name for part in _HIDING)
        for beginning, kind in _ATTENTION.items():
            if name.startswith(beginning):
                self._attention.add(kind)

    @property
    def convolutional(self) -> bool | None:
        """Whether there are convolutions; ``None``: not known."""
        return True if self._convolution else False if self._seen and not self._hidden else None

    @property
    def attention(self) -> list[str] | None:
        """What computes scaled dot-product attention, other than plainly; ``None``: not known."""
        if not self._seen or (self._hidden and not self._attention):
            return None
        return sorted(self._attention)
