"""The user's optimizer on pieces of tensors: only where that is the same as on the whole."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from perfsearch.parallel.soap.axes import Rectangle
from perfsearch.parallel.soap.configuration import PlanError
from perfsearch.workloads.base import OptimizerFactory

_BY_ELEMENT = frozenset(
    {
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    }
)
"""Optimizers of torch that update each element by its own gradients alone."""


def shard_optimizer(
    factory: OptimizerFactory,
    parameters: Mapping[str, nn.Parameter],
    whole: Mapping[str, Rectangle],
    stored: Mapping[str, Rectangle],
) -> torch.optim.Optimizer | None:
    """Make the user's optimizer for what a rank stores; ``None`` where it stores nothing.

    Args:
        factory: the user's.
        parameters: tiles, by key.
        whole: of each of the model's parameters.
        stored: what this rank has of them.

    Raises:
        PlanError: it looks at whole tensors, or at all of them, and the rank has less.

    """
    trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
    if not trained:
        return None
    optimizer = factory(trained)
    kind = type(optimizer)
    known = kind.__module__.startswith("torch.optim") and kind.__name__ in _BY_ELEMENT
    partial = [key for key in whole if stored.get(key) != whole[key]]
    if not known and partial:
        raise PlanError(
            f"the optimizer {kind.__name__} may look at whole tensors, and this plan gives a "
            f"device less than all of {partial[0]}. Plans that split or place parameters need one "
            f"of torch.optim's {', '.join(sorted(_BY_ELEMENT))}"
        )
    return optimizer


def make_capturable(optimizer: torch.optim.Optimizer | None) -> bool:
    """Let a new optimizer step within a CUDA graph; return whether it can."""
    if optimizer is None or type(optimizer).__name__ == "SGD":
        return True
    if not all("capturable" in group for group in optimizer.param_groups):
        return False
    for group in optimizer.param_groups:
        group["capturable"] = True
    return True
