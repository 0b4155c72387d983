"""What the controller's memory model needs to know of a job, as plain values."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from perfsearch.parallel.activations import peak_bytes
from perfsearch.workloads.base import Job

_PROBE_SHAPE = (8, 8)
_PAIRS = ((1, 2), (2, 3))
"""Micro-batches whose difference tells the growth; the second where one sample alone is refused, as
by batch normalisation without further dimensions."""

_LARGE = 256
"""A micro-batch in which activations outweigh what a step holds beside them for a while, such as
the gradient of a large matrix. Growth is told there, too; the most that is held is on the higher of
both lines."""

_NEGLIGIBLE = 0.01
"""Of the growth with one sample: where no more than this does not grow, large micro-batches need no
look of their own."""

_LARGE_BYTES = 2**28
"""What the samples of one may take on the host, where they are collated."""

_SPACINGS = (0, 1)
"""Checkpointing of no block and of every block; others lie between, by their share of blocks."""


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Let modules that are built inside keep shapes only, so that a large one costs nothing.

    Buffers and everything else that a factory makes stay what they are.
    """
    own = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        own(module, name, parameter)

    nn.Module.register_parameter = register
    try:
        yield
    finally:
        nn.Module.register_parameter = own


def describe(job: Job, device: str) -> dict[str, Any]:
    """The tensors of a job and what a step of it holds; ``metrics.memory_facts`` reads this.

    Args:
        job: its model may be on ``meta``.
        device: type of the device that it is to train on; decides on mixed precision.

    """
    dtype = job.autocast_dtype.get(device)
    return {
        "parameters": _parameters(job),
        "buffer_bytes": sum(b.numel() * b.element_size() for b in job.model.buffers()),
        "blocks": len(job.blocks),
        "block_class": type(job.blocks[0]).__name__ if job.blocks else "",
        "optimizer_bytes": _optimizer_bytes(job),
        "cast_bytes": None if dtype is None else dtype.itemsize,
        **_activations(job, dtype),
    }


def _parameters(job: Job) -> list[dict[str, Any]]:
    """Each parameter once, however often it is used."""
    block_of = {
        id(parameter): number
        for number, block in enumerate(job.blocks)
        for parameter in block.parameters()
    }
    return [
        {
            "shape": list(parameter.shape),
            "item_bytes": parameter.element_size(),
            "trainable": parameter.requires_grad,
            "block": block_of.get(id(parameter), -1),
        }
        for parameter in job.model.parameters()
    ]


def _optimizer_bytes(job: Job) -> dict[str, float]:
    """Bytes of optimizer state for an element of a parameter, by the parameter's item size.

    Found by one step on a small parameter; what does not grow with it (a count of steps) is left
    out.
    """
    found: dict[str, float] = {}
    for dtype in {p.dtype for p in job.model.parameters() if p.requires_grad}:
        probe = nn.Parameter(torch.ones(_PROBE_SHAPE, dtype=dtype))
        optimizer = job.optimizer([probe])
        probe.grad = torch.ones_like(probe)
        optimizer.step()
        state = [v for v in optimizer.state[probe].values() if isinstance(v, torch.Tensor)]
        held = sum(v.numel() * v.element_size() for v in state if v.numel() >= probe.numel())
        found[str(dtype.itemsize)] = held / probe.numel()
    return found


def _activations(job: Job, dtype: torch.dtype | None) -> dict[str, Any]:
    """Bytes of activations as ``fixed + slope x micro-batch``, by precision and spacing.

    A job that cannot run without real tensors has none of these; then ``activation_error`` says
    why, and only measured steps can tell.
    """
    errors = []
    for pair in _PAIRS:
        try:
            small = _growth(job, dtype, pair)
            most = _largest(job)
            bent = {kind: line for kind, line in small.items() if _may_bend(line)}
            large = small
            if bent and most // 2 > pair[1]:
                large = {**small, **_growth(job, dtype, (most // 2, most), bent)}
        except Exception as error:  # whatever user code does on tensors without values
            errors.append(f"{type(error).__name__}: {error}")
            continue
        return {"activations": small, "activations_large": large, "activation_error": ""}
    return {"activations": {}, "activations_large": {}, "activation_error": errors[0]}


def _may_bend(line: tuple[float, float]) -> bool:
    """Whether growth may be steeper for large micro-batches.

    What does not grow is never below 0, so that another moment of the step, smaller for one sample
    and steeper, is steeper by no more than what does not grow at this one.
    """
    fixed, slope = line
    return fixed > _NEGLIGIBLE * slope


def _largest(job: Job) -> int:
    """The micro-batch at which large ones are looked at."""
    sample = [t for t in tree_leaves(job.data[0]) if isinstance(t, torch.Tensor)]
    held: int = sum(t.numel() * t.element_size() for t in sample)
    return min(_LARGE, _LARGE_BYTES // max(1, held))


def _growth(
    job: Job,
    dtype: torch.dtype | None,
    pair: tuple[int, int],
    kinds: Collection[str] | None = None,
) -> dict[str, tuple[float, float]]:
    """The line through two micro-batches: bytes that do not and that do grow with each sample.

    Of each kind, ``precision/spacing``; ``kinds`` are those that are wanted, by default all.
    """
    table: dict[str, tuple[float, float]] = {}
    precisions = ("none",) if dtype is None else ("autocast", "policy")
    for precision, every in product(precisions, _SPACINGS if job.blocks else (0,)):
        kind = f"{precision}/{every}"
        if kinds is not None and kind not in kinds:
            continue
        less, more = (peak_bytes(job, m, every, precision, dtype) for m in pair)
        slope = (more - less) / (pair[1] - pair[0])
        table[kind] = less - pair[0] * slope, slope
    return table
