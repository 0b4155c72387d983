"""A training step by an exported DTensor plan, to see whether it trains as the plan itself does."""

from __future__ import annotations

import runpy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from perfsearch.core.knob import Value
from perfsearch.knobs import loader
from perfsearch.training.base import BuildContext, LoaderOptions, Mark, NextBatch, TrainStep


class DtensorStep(TrainStep):
    """Forward, backward and optimizer of a model whose parameters are DTensors.

    The configuration's ``file`` is the exported module.
    """

    def __init__(self, context: BuildContext) -> None:
        self.job = context.job(False)
        self.loader = LoaderOptions(context.local_batch, loader.arguments(context.configuration))
        self._rank, self._world = context.groups.rank, context.groups.world_size
        self._samples = context.local_batch * self._world
        exported = runpy.run_path(str(context.configuration["file"]))
        self._mesh = exported["parallelize"](self.job.model, context.device.type)
        self.job.model.register_forward_pre_hook(self._shared_out, prepend=True, with_kwargs=True)
        self.optimizer = self.job.optimizer(self.job.model.parameters())
        dtype = self.job.autocast_dtype.get(context.device.type)
        self._autocast: dict[str, Any] = {
            "device_type": context.device.type,
            "dtype": dtype,
            "enabled": dtype is not None,
        }

    def run(self, next_batch: NextBatch, mark: Mark) -> torch.Tensor:
        """Train one global batch; the loss is computed of all of it on every rank."""
        batch = tree_map_only(torch.Tensor, self._whole, next_batch())
        with torch.autocast(**self._autocast):
            loss = self.job.loss(self.job.model, batch)
        mark("forward")
        loss.backward()
        mark("backward")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        mark("optimizer")
        return loss.detach()

    def in_force(self) -> dict[str, Value]:
        """Nothing that could be read back."""
        return {}

    def _whole(self, share: torch.Tensor) -> torch.Tensor:
        shares = [torch.empty_like(share) for _ in range(self._world)]
        dist.all_gather(shares, share.contiguous())
        return torch.cat(shares)

    def _shared_out(self, module: nn.Module, inputs: Any, keywords: Any) -> tuple[Any, Any]:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        def given(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, DTensor):
                return tensor
            if not tensor.dim() or len(tensor) != self._samples:
                return DTensor.from_local(tensor, self._mesh, [Replicate()])
            mine = tensor.chunk(self._world)[self._rank]
            return DTensor.from_local(mine, self._mesh, [Shard(0)])

        found: tuple[Any, Any] = tree_map_only(torch.Tensor, given, (inputs, keywords))
        return found


def build(context: BuildContext) -> DtensorStep:
    """Put the exported plan into force."""
    return DtensorStep(context)
