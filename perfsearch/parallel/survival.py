"""What a real run needs now and then beyond a usual step: its longest batch, and a checkpoint."""

from __future__ import annotations

import io
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils._pytree import tree_leaves

from perfsearch.workers.loader import to_device
from perfsearch.workloads.base import Job

_LOOKED_AT = 512
_LOOK_S = 2.0


def longest_batch(job: Job, micro_batch: int, device: torch.device) -> Any:
    """A batch of the longest sample that a bounded look into the data finds, repeated.

    Samples are looked at evenly spaced over the data set, so that every rank finds the same
    unless time runs out; the batch has no effect on what is compared.
    """
    from torch.utils.data import default_collate

    count = len(job.data)  # type: ignore[arg-type]
    step = max(1, count // _LOOKED_AT)
    deadline = time.monotonic() + _LOOK_S
    longest, most = job.data[0], -1
    for index in range(0, count, step):
        sample = job.data[index]
        size = sum(t.numel() for t in tree_leaves(sample) if isinstance(t, torch.Tensor))
        if size > most:
            longest, most = sample, size
        if time.monotonic() > deadline:
            break
    return to_device((job.collate or default_collate)([longest] * micro_batch), device, False)


def save_checkpoint(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Gather and serialise a whole checkpoint as training scripts do, and return its bytes.

    Written into nothing: it is the memory for it that may be missing, not the disk.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(net, options=options)
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.consolidate_state_dict(to=0)
        state = optimizer.state_dict() if dist.get_rank() == 0 else {}
    else:
        state = optimizer.state_dict()
    sink = _Nowhere()
    torch.save({"model": weights, "optimizer": state}, sink)
    return sink.written


class _Nowhere(io.RawIOBase):
    """A file that keeps nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0

    def writable(self) -> bool:
        """It takes everything."""
        return True

    def write(self, data: Any) -> int:
        """Count the bytes."""
        size = memoryview(data).nbytes
        self.written += size
        return size
