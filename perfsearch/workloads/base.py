"""What ranks train: a model, its data, its loss and its optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

Loss = Callable[[torch.nn.Module, Any], torch.Tensor]
"""Takes the (wrapped) model and a batch on the device; returns the mean loss of the batch."""

OptimizerFactory = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass
class Job:
    """A training job, apart from how it is made parallel.

    Attributes:
        model: on the host, weights initialised, the same on every rank.
        data: a map-style dataset; which samples form which step is decided by the loop.
        loss: mean loss of a batch.
        optimizer: makes a new optimizer for the given parameters.
        collate: how samples become a batch; torch's default where ``None``.
        worker_init: run in each loader process.
        tokens_per_sample: where samples are sequences.
        flops_per_sample: model floating-point operations, forward and backward, where known.
        autocast_dtype: dtype of ``torch.autocast`` around the loss by device type; absent is off.
        blocks: repeated parts of the model, outermost first: units to shard or to checkpoint.

    """

    model: torch.nn.Module
    data: Dataset[Any]
    loss: Loss
    optimizer: OptimizerFactory
    collate: Callable[[list[Any]], Any] | None = None
    worker_init: Callable[[int], None] | None = None
    tokens_per_sample: int | None = None
    flops_per_sample: float | None = None
    autocast_dtype: dict[str, torch.dtype] = field(default_factory=dict)
    blocks: Sequence[torch.nn.Module] = ()


def as_job(made: Any, origin: str) -> Job:
    """Take what a user's factory returned.

    Args:
        made: a ``Job``, or a tuple of model, data, loss and optimizer factory. Of a ``DataLoader``
            its dataset and collate function are used; batches are formed anew.
        origin: the factory's name, for messages.

    Raises:
        TypeError: it is neither, or a part of it is of the wrong kind.

    """
    if isinstance(made, tuple) and len(made) == 4:
        made = Job(*made)
    if not isinstance(made, Job):
        raise TypeError(
            f"workload.factory={origin} returned {type(made).__name__}; it must return a "
            "perfsearch.workloads.base.Job or a tuple (model, data, loss, optimizer)"
        )
    if isinstance(made.data, DataLoader):
        loader = made.data
        made.data = loader.dataset
        made.collate = made.collate or loader.collate_fn
        made.worker_init = made.worker_init or loader.worker_init_fn
    checks = {
        "model must be a torch.nn.Module": isinstance(made.model, torch.nn.Module),
        "the model has no parameters, so there is nothing to train or to shard": not isinstance(
            made.model, torch.nn.Module
        )
        or next(made.model.parameters(), None) is not None,
        "data must be a map-style Dataset (with __len__ and __getitem__), since ranks share it out "
        "by index": not isinstance(made.data, IterableDataset)
        and hasattr(made.data, "__len__")
        and hasattr(made.data, "__getitem__"),
        "loss must be callable: loss(model, batch)": callable(made.loss),
        "optimizer must be callable: optimizer(parameters); give a function that makes one, since "
        "every trial starts with a new one": callable(made.optimizer)
        and not isinstance(made.optimizer, torch.optim.Optimizer),
    }
    for rule, holds in checks.items():
        if not holds:
            raise TypeError(f"workload.factory={origin}: {rule}")
    return made


# -----------------------------------------------------------------------------
# A second copy of a job's model, its tensors wherever they are wanted.

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
