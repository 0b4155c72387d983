"""All-reduce in three stages: inside a group, across groups, and back.

As Horovod's hierarchical all-reduce (``NCCLHierarchicalAllreduce``): reduce-scatter among the
ranks of a node, all-reduce of each shard across nodes, all-gather on the node. Only the order of
the sums differs from a flat all-reduce.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional

from perfsearch.workers.bootstrap import Groups

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class HierarchicalAllReduce:
    """What a communication hook of DistributedDataParallel calls; ``close`` it with the wrapper.

    The three stages of a bucket run beside the backward pass: on a stream of their own on a GPU,
    in a thread of their own on a CPU. Buckets keep their order, which is the same on every rank.

    Args:
        groups: this rank's process groups.
        size: ranks in a group; a proper divisor of their number.

    """

    def __init__(self, groups: Groups, size: int) -> None:
        self._inside, self._across = groups.hierarchy(size)
        self._world_size = groups.world_size
        self.size = size
        self._device = groups.device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._thread = None if self._stream else ThreadPoolExecutor(1, "hierarchical-all-reduce")

    def average(self, bucket: Any) -> Any:
        """Average a ``dist.GradBucket`` over ranks; return a future of its tensor."""
        tensor = bucket.buffer()
        if self._stream is not None:
            future = torch.futures.Future(devices=[self._device])
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                tensor.record_stream(self._stream)
                self._reduce(tensor)
                future.set_result(tensor)
            return future
        assert self._thread is not None
        future = torch.futures.Future()
        self._thread.submit(self._reduce_into, future, tensor)
        return future

    def reduce_and_wait(self, tensor: torch.Tensor) -> None:
        """Average one tensor over ranks in place, all three stages, and wait for its end."""
        self._reduce(tensor)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _reduce_into(self, future: Any, tensor: torch.Tensor) -> None:
        try:
            self._reduce(tensor)
        except Exception as error:  # handed to the backward pass, which raises it
            future.set_exception(error)
        else:
            future.set_result(tensor)

    def _reduce(self, tensor: torch.Tensor) -> None:
        tensor.div_(self._world_size)
        padding = -tensor.numel() % self.size
        whole = functional.pad(tensor, (0, padding)) if padding else tensor
        shard = torch.empty(whole.numel() // self.size, dtype=tensor.dtype, device=tensor.device)
        _reduce_scatter(shard, whole, group=self._inside)
        dist.all_reduce(shard, group=self._across)
        _all_gather(whole, shard, group=self._inside)
        if padding:
            tensor.copy_(whole[: tensor.numel()])

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)
