"""The random numbers of a process: where torch's, Python's and numpy's generators are."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class RandomState:
    """Where every global generator of a process stands.

    Attributes:
        host: torch's on the CPU.
        device: torch's on the current GPU; ``None`` where none is in use.
        python: that of ``random``.
        of_numpy: numpy's global one; ``None`` where numpy is not imported.

    """

    host: torch.Tensor
    device: torch.Tensor | None
    python: tuple[Any, ...]
    of_numpy: tuple[Any, ...] | None

    @classmethod
    def now(cls) -> RandomState:
        """Where they stand now; nothing is drawn."""
        numpy = sys.modules.get("numpy")
        return cls(
            torch.get_rng_state(),
            torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
            random.getstate(),
            numpy.random.get_state() if numpy is not None else None,
        )

    def restore(self) -> None:
        """Have the process draw from here on what it drew from here before."""
        torch.set_rng_state(self.host)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device)
        random.setstate(self.python)
        if self.of_numpy is not None:
            sys.modules["numpy"].random.set_state(self.of_numpy)

    def is_same(self, other: RandomState) -> bool:
        """Whether nothing was drawn between the two, a GPU's generator apart."""
        return (
            torch.equal(self.host, other.host)
            and self.python == other.python
            and repr(self.of_numpy) == repr(other.of_numpy)
        )
