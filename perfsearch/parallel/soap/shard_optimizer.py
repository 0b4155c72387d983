"""The user's optimizer on pieces of tensors: only where that is the same as on the whole."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from perfsearch.parallel.soap.axes import Rectangle
from perfsearch.parallel.soap.configuration import PlanError
from perfsearch.parallel.soap.rules import sizes
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
    model: Mapping[str, nn.Parameter],
) -> torch.optim.Optimizer | None:
    """Make the user's optimizer for what a rank stores; ``None`` where it stores nothing.

    Where that is not the model as it stands, the factory is given the model's own parameters, so
    that it sees their number, order and shapes, by which it may group them; then each is replaced
    by its tile.

    Args:
        factory: the user's.
        parameters: tiles, by key.
        whole: of each of the model's parameters, as the graph views it.
        stored: what this rank has of them.
        model: the model's parameters, by key.

    Raises:
        PlanError: it looks at whole tensors, or at all of them, and the rank has less.

    """
    if not any(parameter.requires_grad for parameter in parameters.values()):
        return None
    partial = [key for key in whole if stored.get(key) != whole[key]]
    viewed = [key for key in whole if sizes(whole[key]) != model[key].shape]
    if not partial and not viewed:
        return factory([parameters[key] for key in model])
    optimizer = factory(list(model.values()))
    kind, odd = type(optimizer), [*partial, *viewed][0]
    if not (kind.__module__.startswith("torch.optim") and kind.__name__ in _BY_ELEMENT):
        raise PlanError(
            f"the optimizer {kind.__name__} may look at whole tensors, and this plan gives a "
            f"device {'less than all' if partial else 'a view'} of {odd}. Plans that split or "
            f"place parameters need one of torch.optim's {', '.join(sorted(_BY_ELEMENT))}"
        )
    if (
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or "step" in vars(optimizer)
    ):
        raise PlanError(
            f"the optimizer {kind.__name__} has hooks on its step, which may look at all "
            f"parameters, and this plan gives a device {'less than all' if partial else 'a view'} "
            f"of {odd}. Plans that split or place parameters need one without"
        )
    _put_tiles(optimizer, {id(model[key]): key for key in model}, parameters, whole, stored)
    return optimizer


def _put_tiles(
    optimizer: torch.optim.Optimizer,
    keys: Mapping[int, str],
    parameters: Mapping[str, nn.Parameter],
    whole: Mapping[str, Rectangle],
    stored: Mapping[str, Rectangle],
) -> None:
    """Replace the model's parameters in a new optimizer, and their state if it has one already."""
    state = dict(optimizer.state)
    optimizer.state.clear()
    for group in optimizer.param_groups:
        if any(id(tensor) not in keys for tensor in group["params"]):
            raise PlanError("the optimizer has a parameter that is none of the model's")
        held = [(keys[id(tensor)], tensor) for tensor in group["params"]]
        group["params"] = [parameters[key] for key, _ in held if key in parameters]
        for key, tensor in held:
            if key not in parameters or tensor not in state:
                continue
            tile, shape = parameters[key], sizes(whole[key])
            part = tuple(slice(*span) for span in stored[key])
            optimizer.state[tile] = {
                name: value.reshape(shape)[part].to(tile.device, copy=True)
                if isinstance(value, torch.Tensor) and value.shape == tensor.shape and shape
                else value
                for name, value in state[tensor].items()
            }
    optimizer.param_groups[:] = [g for g in optimizer.param_groups if g["params"]]


def make_capturable(optimizer: torch.optim.Optimizer | None) -> bool:
    """Let a new optimizer step within a CUDA graph; return whether it can."""
    if optimizer is None or type(optimizer).__name__ == "SGD":
        return True
    if not all("capturable" in group for group in optimizer.param_groups):
        return False
    for group in optimizer.param_groups:
        group["capturable"] = True
    return True
