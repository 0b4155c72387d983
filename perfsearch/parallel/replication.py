"""ZeRO stages 0 and 1: whole parameters on every rank, optimizer state whole or dealt out."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from perfsearch.core.knob import Value
from perfsearch.parallel.optimizers import apply_implementation
from perfsearch.parallel.wrapper import wrapper_arguments
from perfsearch.workloads.base import Job

MIB = 2**20


class ReplicatedModel:
    """A wrapped model and its optimizer.

    Args:
        job: model and optimizer factory.
        configuration: ``zero_stage`` and what the wrapper and the optimizer are told.
        device: where this rank computes.

    """

    def __init__(self, job: Job, configuration: Mapping[str, Value], device: torch.device) -> None:
        self.net = DistributedDataParallel(
            job.model,
            device_ids=[device.index] if device.type == "cuda" else None,
            **wrapper_arguments(configuration),
        )
        self.optimizer = job.optimizer([p for p in job.model.parameters() if p.requires_grad])
        apply_implementation(self.optimizer, configuration.get("optimizer_implementation"))
        if configuration["zero_stage"] == 1:
            self.optimizer = _dealt_out(self.optimizer)

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch: gradients are reduced after the last."""
        return nullcontext() if last else self.net.no_sync()

    def after_first_forward(self) -> None:
        """Nothing of these stages shows only then."""

    def in_force(self) -> dict[str, Value]:
        """Read back from the wrapper and the optimizer."""
        listed = getattr(self.net, "bucket_bytes_cap_list", None)
        cap = listed[-1] if listed else self.net.bucket_bytes_cap
        return {
            "zero_stage": int(isinstance(self.optimizer, ZeroRedundancyOptimizer)),
            "bucket_cap_mb": cap / MIB,
            "gradient_as_bucket_view": bool(self.net.gradient_as_bucket_view),
        }

    def close(self) -> None:
        """Take the wrapper's hooks off, so that the model can be wrapped again."""
        self.net._remove_autograd_hooks()


def _dealt_out(whole: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Deal parameters out over ranks, each in the group that the user has put it in.

    Args:
        whole: the user's, over all parameters, by whose number and order it may group them; it
            becomes the one of this rank's.

    """

    def mine(parts: list[dict[str, Any]], **_: Any) -> torch.optim.Optimizer:
        kept = {p for part in parts for p in part["params"]}
        if not kept:  # more ranks than parameters; not every optimizer steps over nothing
            return torch.optim.SGD([{"params": []} for _ in parts], lr=0.0)
        for group, part in zip(whole.param_groups, parts, strict=True):
            group["params"] = part["params"]
        for parameter in [p for p in whole.state if p not in kept]:
            del whole.state[parameter]
        return whole

    groups = [{"params": list(group["params"])} for group in whole.param_groups]
    return ZeroRedundancyOptimizer(groups, mine)
