"""What is trained side by side to see what instruments cost: arms, and what is global in each."""

from __future__ import annotations

from typing import Any

BLOCKS = 50  # of an epoch, which ends and begins between two blocks


def patched_places() -> list[tuple[Any, str]]:
    """Where instruments stand in the way of a step."""
    import torch
    from torch.utils.data import dataloader

    iterator = dataloader._BaseDataLoaderIter
    of_iterators = [(iterator, "__init__"), (iterator, "__next__")]
    return [(torch.autograd, "backward"), (torch.autograd, "grad"), *of_iterators]


class Surroundings:
    """What is global in the process and differs between arms: hooks, and patched functions."""

    def __init__(self) -> None:
        from torch.optim import optimizer

        self._hooks = (
            optimizer._global_optimizer_pre_hooks,
            optimizer._global_optimizer_post_hooks,
        )
        self._held = [dict(hooks) for hooks in self._hooks]
        self._functions = [getattr(owner, name) for owner, name in patched_places()]

    def restore(self) -> None:
        """Make it what it was when this was made."""
        for hooks, held in zip(self._hooks, self._held, strict=True):
            hooks.clear()
            hooks.update(held)
        for (owner, name), function in zip(patched_places(), self._functions, strict=True):
            setattr(owner, name, function)


class Arm:
    """A model, its optimizer and loader, and what is global while it trains."""

    def __init__(self, kind: str, net: Any, optimizer: Any, loader: Any) -> None:
        self.kind, self.net, self.optimizer, self.loader = kind, net, optimizer, loader
        self.surroundings: Surroundings | None = None
        self.script: Any = None
        self.seconds: list[float] = []
        self._left, self._batches = 0, iter(())

    def batches(self) -> Any:
        """An iterator with at least a block's batches left."""
        if not self._left:
            self._left, self._batches = BLOCKS, iter(self.loader)
        self._left -= 1
        return self._batches
