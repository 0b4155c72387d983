"""Copies of a batch: the containers always, its tensors where they do not last."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from typing import Any

import torch

_COPIED = "_perfsearch_copied"


def keep(tensor: torch.Tensor) -> torch.Tensor:
    """What to keep of a tensor: a copy, if it lies in memory that is shared with a worker."""
    if tensor.is_cuda or not tensor.is_shared():
        return tensor
    copied = tensor.clone()
    setattr(copied, _COPIED, True)
    return copied


def give(kept: torch.Tensor) -> torch.Tensor:
    """What to give of a kept tensor: again a copy of one that was copied, as from a worker.

    So a script that changes its batches in place does not change what is kept.
    """
    return kept.clone() if hasattr(kept, _COPIED) else kept


def copy_structure(batch: Any, of_tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """New containers around what ``of_tensor`` makes of each tensor."""
    if isinstance(batch, torch.Tensor):
        return of_tensor(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(copy_structure(part, of_tensor) for part in batch))
    if type(batch) in (list, tuple):
        return type(batch)(copy_structure(part, of_tensor) for part in batch)
    if isinstance(batch, list | MutableMapping):
        return _filled_copy(batch, of_tensor)
    return batch


def _filled_copy(batch: Any, of_tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of a container whose constructor may want other arguments, as ``defaultdict``'s.

    One that cannot be copied so, as it is locked, stays what it is.
    """
    parts = list(batch.items()) if isinstance(batch, MutableMapping) else list(enumerate(batch))
    try:
        copied = copy.copy(batch)
        for place, part in parts:
            copied[place] = copy_structure(part, of_tensor)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return batch
    return copied
