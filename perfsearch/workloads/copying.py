"""A second copy of a job's model, its tensors wherever they are wanted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from perfsearch.workloads.base import Job

Place = Callable[[torch.Tensor], torch.Tensor]
"""Makes the tensor that takes another one's place; its values need not be the same."""


def copy_job(job: Job, place: Place) -> Job:
    """Copy a job without copying its parameters' and buffers' values.

    What is shared in the model, such as a tied weight, is shared in the copy.

    Args:
        job: left as it is.
        place: gives the new tensor for each parameter and buffer, as ``empty_on`` does.

    Raises:
        ValueError: a block of the job is no part of its model.
        TypeError, RuntimeError: the model holds something that cannot be copied.

    """
    memo: dict[int, object] = {}
    for parameter in job.model.parameters():
        if type(parameter) is not nn.Parameter:
            raise TypeError(f"a parameter is a {type(parameter).__name__}, which is not copied")
        with torch.no_grad():
            memo[id(parameter)] = nn.Parameter(place(parameter), parameter.requires_grad)
    for buffer in job.model.buffers():
        memo[id(buffer)] = place(buffer)
    model = copy.deepcopy(job.model, memo)
    names = {id(module): name for name, module in job.model.named_modules()}
    if any(id(block) not in names for block in job.blocks):
        raise ValueError("the job's blocks must be modules of its model")
    return replace(
        job, model=model, blocks=[model.get_submodule(names[id(block)]) for block in job.blocks]
    )


def empty_on(device: torch.device | str) -> Place:
    """Uninitialised tensors of the same shape, layout and dtype on ``device``."""

    def place(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device
        )

    return place
