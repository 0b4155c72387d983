"""Activation checkpointing of some of a model's blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


class CheckpointedBlocks:
    """Blocks whose inner activations are computed again in the backward pass.

    Their ``forward`` is replaced on the object itself, so that wrappers' hooks, which run around
    ``forward``, stay outside; ``undo`` takes the replacements off.

    Args:
        blocks: of the model, outermost first.
        every: 1 for each block, 2 for each second, ...; 0 for none. The last of each run of
            ``every`` blocks is chosen.
        keep_random_state: whether what is drawn inside is drawn the same again; needed wherever
            there is dropout.
        contexts: gives two context managers, for the forward pass and for computing it again.

    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        every: int,
        keep_random_state: bool = True,
        contexts: Contexts = noop_context_fn,
    ) -> None:
        self._chosen = checkpointed_blocks(blocks, every)
        self._total = len(blocks)
        self._every = every
        for block in self._chosen:
            _replace_forward(block, keep_random_state, contexts)

    @property
    def every(self) -> int:
        """Read back from the blocks: the spacing that holds now."""
        held = sum("forward" in vars(block) for block in self._chosen)
        if held != len(self._chosen):
            return -1
        return self._every if held else 0

    def undo(self) -> None:
        """Give the blocks their own ``forward`` back."""
        for block in self._chosen:
            vars(block).pop("forward", None)


def checkpointed_blocks(blocks: Sequence[nn.Module], every: int) -> list[nn.Module]:
    """The blocks that a spacing selects."""
    return list(blocks[every - 1 :: every]) if every else []


def _replace_forward(block: nn.Module, keep_random_state: bool, contexts: Contexts) -> None:
    own = block.forward

    def forward(*arguments: Any, **named: Any) -> Any:
        return checkpoint(
            own,
            *arguments,
            use_reentrant=False,
            preserve_rng_state=keep_random_state,
            context_fn=contexts,
            **named,
        )

    block.forward = forward
