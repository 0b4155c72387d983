"""DistributedDataParallel from knobs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch.nn.parallel import DistributedDataParallel

from perfsearch.core.knob import Value
from perfsearch.parallel import nccl
from perfsearch.parallel.wrapper import wrapper_arguments
from perfsearch.training.base import (
    DEFAULT,
    BuildContext,
    LoaderOptions,
    Mark,
    NextBatch,
    TrainStep,
    apply_implementation,
    implementation_of,
    run_backward,
)
from perfsearch.training.process_groups import Groups

MIB = 2**20


class DdpStep(TrainStep):
    """Forward, backward with overlapped all-reduce, optimizer."""

    def __init__(self, context: BuildContext) -> None:
        configuration = context.configuration
        self._configuration = configuration
        self._hook: HierarchicalAllReduce | None = None
        self._nccl_log = NcclLog(context.options.get("nccl_log"))
        self.job = context.job(True)
        self.loader = _loader_options(configuration, context.local_batch)
        device = context.device
        threads = configuration.get("omp_num_threads")
        if threads is not None:
            torch.set_num_threads(int(threads))
        if configuration.get("cudnn_benchmark") is not None:
            torch.backends.cudnn.benchmark = bool(configuration["cudnn_benchmark"])
        model = self.job.model
        if self.loader.channels_last:
            model.to(memory_format=torch.channels_last)
        self.marks_communication = True
        self._mode = str(configuration.get("compile_mode") or "none")
        self.compiles = self._mode != "none"
        if self.compiles:
            model = torch.compile(model, mode=None if self._mode == "default" else self._mode)
        self.net = DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            **wrapper_arguments(configuration),
        )
        size = int(configuration.get("hierarchical_group_size") or 0)
        if size:
            self._hook = HierarchicalAllReduce(context.groups, size)
            hook = self._hook
            # a lambda, since torch refuses hooks whose annotations it does not know
            self.net.register_comm_hook(None, lambda state, bucket: hook.average(bucket))
        self.optimizer = self.job.optimizer(self.job.model.parameters())
        apply_implementation(self.optimizer, configuration.get("optimizer_implementation"))
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
        return loss.detach()

    def in_force(self) -> dict[str, Value]:
        """From DDP's logging data, the optimizer's groups, torch's switches and the environment."""
        data = self.net._get_ddp_logging_data()
        listed = getattr(self.net, "bucket_bytes_cap_list", None)
        cap = listed[-1] if listed else self.net.bucket_bytes_cap
        found: dict[str, Value] = {
            "bucket_cap_mb": cap / MIB,
            "gradient_as_bucket_view": bool(self.net.gradient_as_bucket_view),
            "static_graph": bool(self.net.static_graph),
            "optimizer_implementation": self._optimizer_in_force(),
            "optimizer_used": implementation_of(self.optimizer),
            "omp_num_threads": torch.get_num_threads(),
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "hierarchical_group_size": self._hook.size if self._hook else 0,
            "channels_last": _is_channels_last(self.job.model),
            "compile_mode": self._mode,
            "bucket_bytes": data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes"),
        }
        if "first_bucket_mb" in self._configuration and listed:
            found["first_bucket_mb"] = listed[0] / MIB
        found.update(nccl.read_back(os.environ, self._configuration))
        used = self._nccl_log.effective()
        for knob, name in used.items():
            found[f"{knob}_used"] = name
            if self._configuration.get(knob) is not None:
                found[knob] = name  # NCCL may fall back from what its variable asks for
        return found

    def _optimizer_in_force(self) -> Value:
        # "default" leaves the optimizer as the user made it, whatever that is
        asked = self._configuration.get("optimizer_implementation")
        return DEFAULT if asked in (None, DEFAULT) else implementation_of(self.optimizer)

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
        if self.compiles:
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


def _loader_options(configuration: Mapping[str, Value], local_batch: int) -> LoaderOptions:
    workers = int(configuration.get("dataloader_workers") or 0)
    prefetch = configuration.get("prefetch_factor")
    return LoaderOptions(
        micro_batch=local_batch,
        workers=workers,
        prefetch_factor=int(prefetch) if prefetch is not None and workers else None,
        pin_memory=bool(configuration.get("pin_memory")),
        channels_last=bool(configuration.get("channels_last")),
    )


def _is_channels_last(model: torch.nn.Module) -> bool:
    images = [p for p in model.parameters() if p.dim() == 4 and p.shape[1] > 1 and p.shape[2] > 1]
    return bool(images) and all(p.is_contiguous(memory_format=torch.channels_last) for p in images)


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
