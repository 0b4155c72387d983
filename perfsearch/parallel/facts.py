"""What the controller's memory model needs to know of a job, as plain values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from perfsearch.parallel.activations import peak_bytes
from perfsearch.workloads.base import Job

_PROBE_SHAPE = (8, 8)
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
    table: dict[str, list[float]] = {}
    precisions = ("none",) if dtype is None else ("autocast", "policy")
    try:
        for precision in precisions:
            for every in _SPACINGS if job.blocks else (0,):
                one, two = (peak_bytes(job, m, every, precision, dtype) for m in (1, 2))
                table[f"{precision}/{every}"] = [float(2 * one - two), float(two - one)]
    except Exception as error:  # whatever user code does on tensors without values
        return {"activations": {}, "activation_error": f"{type(error).__name__}: {error}"}
    return {"activations": table, "activation_error": ""}
