"""DistributedDataParallel from knobs."""

from __future__ import annotations

import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch.nn.parallel import DistributedDataParallel

from perfsearch.core.knob import Value
from perfsearch.knobs import ddp, model, nccl, optimizer, process
from perfsearch.knobs.base import Use
from perfsearch.knobs.collection import Collection
from perfsearch.training.base import (
    BuildContext,
    LoaderOptions,
    Mark,
    NextBatch,
    TrainStep,
    run_backward,
)
from perfsearch.training.process_groups import Groups


class DdpStep(TrainStep):
    """Forward, backward with overlapped all-reduce, optimizer."""

    def __init__(self, context: BuildContext) -> None:
        configuration = context.configuration
        self._configuration = configuration
        self._hook: HierarchicalAllReduce | None = None
        self._nccl_log = NcclLog(context.options.get("nccl_log"))
        self.job = context.job(True)
        self.loader = LoaderOptions.of(configuration, context.local_batch)
        device = context.device
        process.apply(configuration)
        self._collection = Collection()
        self._collection.put(configuration)
        self.marks_communication = True
        made, self._model_values, self.lost = model.apply(configuration, self.job.model)
        self.compiles = model.is_compiled(self._model_values)
        self.net = DistributedDataParallel(
            made,
            device_ids=[device.index] if device.type == "cuda" else None,
            **ddp.arguments(configuration),
        )
        size = ddp.HIERARCHY.number(configuration)
        if size:
            self._hook = HierarchicalAllReduce(context.groups, size)
            hook = self._hook
            # a lambda, since torch refuses hooks whose annotations it does not know
            self.net.register_comm_hook(None, lambda state, bucket: hook.average(bucket))
        self.optimizer = self.job.optimizer(self.job.model.parameters())
        optimizer.apply(self.optimizer, configuration)
        dtype = self.job.autocast_dtype.get(device.type)
        self._autocast: dict[str, Any] = {
            "device_type": device.type,
            "dtype": dtype,
            "enabled": dtype is not None,
        }

    def run(self, next_batch: NextBatch, mark: Mark) -> torch.Tensor:
        """One step of plain data-parallel training."""
        batch = next_batch()
        with torch.autocast(**self._autocast):
            loss = self.job.loss(self.net, batch)
        mark("forward")
        run_backward(loss, mark, self.marks_communication)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        mark("optimizer")
        self._collection.end_step()
        return loss.detach()

    def in_force(self) -> dict[str, Value]:
        """From DDP's logging data, the optimizer's groups, torch's switches and the environment."""
        data = self.net._get_ddp_logging_data()
        found: dict[str, Value] = {
            **ddp.values_of(self.net, Use.DDP),
            **optimizer.values_of(self.optimizer, self._configuration),
            "optimizer_used": optimizer.implementation_of(self.optimizer),
            **process.values(),
            **self._collection.values(),
            ddp.HIERARCHY.name: self._hook.size if self._hook else 0,
            **self._model_values,
            model.CHANNELS_LAST.name: model.is_channels_last(self.job.model),
            "bucket_bytes": data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes"),
        }
        found.update(nccl.read_back(os.environ, self._configuration))
        used = self._nccl_log.effective()
        for knob, name in used.items():
            found[f"{knob}_used"] = name
            if self._configuration.get(knob) is not None:
                found[knob] = name  # NCCL may fall back from what its variable asks for
        return found

    def alone(self) -> AbstractContextManager[Any]:
        """Leave out the all-reduces, and the copies into their buckets."""
        alone: AbstractContextManager[Any] = self.net.no_sync()
        return alone

    def evidence(self) -> dict[str, float]:
        """DDP's own account of its communication, in ms a step, over the steps that it sampled."""
        data = self.net._get_ddp_logging_data()
        communication = float(data.get("avg_backward_comm_time", 0)) / 1e6
        overlap = float(data.get("avg_backward_compute_comm_overlap_time", 0)) / 1e6
        return {"comm_ms": communication, "comm_overlapped_ms": overlap}

    def close(self) -> None:
        """Take the wrapper's hooks off the parameters, so that the model can be wrapped again.

        A wrapper that is only waiting for the garbage collector would still copy gradients.
        """
        if self._hook is not None:
            self._hook.close()
        self.net._remove_autograd_hooks()
        self._collection.put({})
        if self.compiles:
            model.undo(self.job.model)
            torch._dynamo.reset()


class NcclLog:
    """The part of NCCL's log that was written since this was made."""

    def __init__(self, pattern: Any) -> None:
        self._path = str(pattern).replace("%p", str(os.getpid())) if pattern else None
        self._start = self._size()

    def _size(self) -> int:
        return os.path.getsize(self._path) if self._path and os.path.exists(self._path) else 0

    def effective(self) -> dict[str, str]:
        """Algorithm and protocol in use, where the log says."""
        if self._path is None or not os.path.exists(self._path):
            return {}
        with open(self._path, errors="replace") as log:
            log.seek(self._start)
            return nccl.effective(log)


def build(context: BuildContext) -> DdpStep:
    """Put the configuration into force."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, message=".*broadcast_buffers.*")
        return DdpStep(context)


# -----------------------------------------------------------------------------
# All-reduce in three stages: inside a group, across groups, and back.
#
# As Horovod's hierarchical all-reduce (``NCCLHierarchicalAllreduce``): reduce-scatter among the
# ranks of a node, all-reduce of each shard across nodes, all-gather on the node. Only the order
# of the sums differs from a flat all-reduce.

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
