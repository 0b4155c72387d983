"""ZeRO stages from knobs, with micro-batches and activation checkpointing.

Stages 0 and 1 are DistributedDataParallel, their optimizer state whole or dealt out over ranks;
stages 2 and 3 spread parameters and gather them unit by unit (FSDP2).
"""

from __future__ import annotations

import io
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from perfsearch.core.knob import Value
from perfsearch.knobs import ddp, optimizer
from perfsearch.knobs.base import Use
from perfsearch.knobs.batch import ACCUMULATION, MICRO_BATCH
from perfsearch.knobs.fsdp import BACKWARD_PREFETCH, CPU_OFFLOAD, FORWARD_PREFETCH, STAGE
from perfsearch.knobs.optimizer import IMPLEMENTATION, apply_implementation
from perfsearch.knobs.zero import (
    BLOCKS_PER_UNIT,
    CHECKPOINTING,
    MIXED_PRECISION,
    RESHARD_GROUP,
    SHARD_GROUP,
    SYNC_EACH,
)
from perfsearch.training.base import (
    BuildContext,
    LoaderOptions,
    Mark,
    NextBatch,
    TrainStep,
    run_backward,
)
from perfsearch.training.checkpointing import CheckpointedBlocks
from perfsearch.training.process_groups import Groups
from perfsearch.training.state import to_device
from perfsearch.workloads.base import Job

_GIB = 2.0**30
_SCANNED_SAMPLES = 512
_SCAN_S = 2.0
_GATHERED = "UNSHARDED"
_meshes: dict[tuple[int, int, int], DeviceMesh] = {}
"""Meshes by generation of process groups and shard size: making one makes communicators."""


def build(context: BuildContext) -> ZeroStep:
    """Put the configuration into force."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, message=".*broadcast_buffers.*")
        return ZeroStep(context)


class ZeroStep(TrainStep):
    """Micro-batches forward and backward, one reduction of gradients, optimizer."""

    def __init__(self, context: BuildContext) -> None:
        configuration = context.configuration
        self._configuration = configuration
        self._device = context.device
        stage = STAGE.number(configuration)
        self._micro_batch = int(MICRO_BATCH.of(configuration) or context.local_batch)
        self._accumulation, rest = divmod(context.local_batch, self._micro_batch)
        if rest:
            raise ValueError(
                f"micro_batch={self._micro_batch}: a rank's {context.local_batch} samples cannot "
                "be cut into such"
            )
        self.loader = LoaderOptions(micro_batch=self._micro_batch)
        # shards are cut from the host's copy, so the whole model need not fit on the device
        self.job = context.job(True) if stage < 2 else context.host_job()
        dtype = self.job.autocast_dtype.get(self._device.type)
        self._by_policy = stage >= 2 and MIXED_PRECISION.of(configuration) != "autocast"
        every = CHECKPOINTING.number(configuration)
        self._checkpointing = CheckpointedBlocks(self.job.blocks, every)
        self._wrapped: ReplicatedModel | ShardedModel
        if stage < 2:
            self._wrapped = ReplicatedModel(self.job, configuration, self._device)
        else:
            sharding = _sharding(configuration, context.groups.world_size, stage)
            if self._by_policy:
                sharding = replace(sharding, dtype=dtype)
            implementation = IMPLEMENTATION.of(configuration)
            self._wrapped = ShardedModel(self.job, sharding, context.groups, implementation)
        self.net = self._wrapped.net
        self.optimizer = self._wrapped.optimizer
        self._autocast: dict[str, Any] = {
            "device_type": self._device.type,
            "dtype": dtype,
            "enabled": dtype is not None and not self._by_policy,
        }
        self._steps = 0
        self._seen_batch: int | None = None
        self._forwards = 0
        # in the other stages gathering waits all over the step, which only the kernels show
        self.marks_communication = isinstance(self._wrapped, ReplicatedModel)
        self._alone = False
        self._evidence: dict[str, float] = {}

    def run(self, next_batch: NextBatch, mark: Mark) -> torch.Tensor:
        """Train one global batch; the mean over micro-batches is that over all its samples."""
        losses = []
        for number in range(self._accumulation):
            batch = next_batch()
            losses.append(self._micro_step(batch, number + 1 == self._accumulation, mark))
        if self._steps == 0:
            leaves = [t for t in tree_leaves(batch) if isinstance(t, torch.Tensor) and t.dim()]
            self._seen_batch = leaves[0].shape[0] if leaves else None
            self._forwards = len(losses)
        self.optimizer.step()
        self._steps += 1
        if self._steps == 2:
            self._note_resident_bytes()
        self.optimizer.zero_grad(set_to_none=True)
        mark("optimizer")
        return torch.stack(losses).mean()

    def _micro_step(self, batch: Any, last: bool, mark: Mark) -> torch.Tensor:
        with self._wrapped.accumulating(last and not self._alone):
            with torch.autocast(**self._autocast):
                loss = self.job.loss(self.net, batch)
            if self._steps == 0:
                self._wrapped.after_first_forward()
            mark("forward")
            scaled = loss / self._accumulation if self._accumulation > 1 else loss
            run_backward(scaled, mark, self.marks_communication and last)
        return loss.detach()

    def _note_resident_bytes(self) -> None:
        """Take stock of what is held when the optimizer has stepped and gradients are there."""
        held = resident_bytes(self.job.model, self.optimizer, self._device)
        self._evidence = {f"resident_{name}_gib": size / _GIB for name, size in held.items()}
        if self._device.type == "cuda":
            allocated = torch.cuda.memory_allocated(self._device)
            self._evidence["at_rest_allocated_gib"] = allocated / _GIB

    def in_force(self) -> dict[str, Value]:
        """Read back from wrappers, blocks, the optimizer, and the batches that came."""
        found = {
            MICRO_BATCH.name: self.loader.micro_batch,
            "micro_batch_seen": self._seen_batch,
            ACCUMULATION.name: self._forwards,
            CHECKPOINTING.name: self._checkpointing.every,
            **optimizer.values_of(
                getattr(self.optimizer, "optim", self.optimizer), self._configuration
            ),
            **self._wrapped.in_force(),
        }
        return {name: value for name, value in found.items() if value is not None}

    def evidence(self) -> dict[str, float]:
        """GiB that lie on the device between steps, from the tensors and from the allocator."""
        return self._evidence

    def alone(self) -> AbstractContextManager[Any] | None:
        """Leave out the all-reduces of stages 0 and 1."""
        return self._unsynchronised() if isinstance(self._wrapped, ReplicatedModel) else None

    @contextmanager
    def _unsynchronised(self) -> Iterator[None]:
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    def survive(self) -> None:
        """Train on the longest batch that the data can give, and make a checkpoint."""
        batch = longest_batch(self.job, self._micro_batch, self._device)
        for number in range(self._accumulation):
            self._micro_step(batch, number + 1 == self._accumulation, lambda phase: None)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        written = save_checkpoint(self.net, self.optimizer)
        print(f"survived its longest batch and a checkpoint of {written} B", flush=True)

    def close(self) -> None:
        """Undo what was done to a model that is used again."""
        self._checkpointing.undo()
        self._wrapped.close()


def _sharding(configuration: Mapping[str, Value], world_size: int, stage: int) -> Sharding:
    return Sharding(
        reshard=False if stage == 2 else RESHARD_GROUP.number(configuration) or True,
        shard_group=SHARD_GROUP.number(configuration) or world_size,
        blocks_per_unit=BLOCKS_PER_UNIT.number(configuration) or 1,
        forward_prefetch=FORWARD_PREFETCH.number(configuration),
        backward_prefetch=BACKWARD_PREFETCH.number(configuration),
        sync_each=bool(SYNC_EACH.of(configuration)),
        offload=bool(CPU_OFFLOAD.of(configuration)),
    )


class ReplicatedModel:
    """A wrapped model and its optimizer: stages 0 and 1.

    Args:
        job: model and optimizer factory.
        configuration: the stage and what the wrapper and the optimizer are told.
        device: where this rank computes.

    """

    def __init__(self, job: Job, configuration: Mapping[str, Value], device: torch.device) -> None:
        self.net = DistributedDataParallel(
            job.model,
            device_ids=[device.index] if device.type == "cuda" else None,
            **ddp.arguments(configuration),
        )
        self.optimizer = job.optimizer([p for p in job.model.parameters() if p.requires_grad])
        optimizer.apply(self.optimizer, configuration)
        if STAGE.of(configuration) == 1:
            self.optimizer = _dealt_out(self.optimizer)

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch: gradients are reduced after the last."""
        return nullcontext() if last else self.net.no_sync()

    def after_first_forward(self) -> None:
        """Nothing of these stages shows only then."""

    def in_force(self) -> dict[str, Value]:
        """Read back from the wrapper and the optimizer."""
        return {
            STAGE.name: int(isinstance(self.optimizer, ZeroRedundancyOptimizer)),
            **ddp.values_of(self.net, Use.ZERO),
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


@dataclass(frozen=True)
class Sharding:
    """How a model is spread.

    Attributes:
        reshard: whether parameters are given up between forward and backward (stage 3), or the
            ranks that they are spread over meanwhile.
        shard_group: ranks that one copy is spread over; copies are replicas of each other.
        blocks_per_unit: blocks that are gathered together.
        forward_prefetch: units that are gathered ahead in the forward pass, 0 for torch's own way.
        backward_prefetch: the same in the backward pass.
        sync_each: whether gradients are reduced after every micro-batch.
        offload: whether parameters, gradients and optimizer live in the host's memory.
        dtype: that parameters are gathered and computed in; ``None`` for their own.

    """

    reshard: bool | int
    shard_group: int
    blocks_per_unit: int = 1
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    sync_each: bool = False
    offload: bool = False
    dtype: torch.dtype | None = None


class ShardedModel:
    """A spread model and its optimizer: stages 2 and 3.

    Args:
        job: model, blocks and optimizer factory; the model is taken apart.
        sharding: how.
        groups: this rank's process groups.
        implementation: ``optimizer_implementation``.

    """

    def __init__(
        self, job: Job, sharding: Sharding, groups: Groups, implementation: Value = None
    ) -> None:
        self._sharding = sharding
        self._groups = groups
        self._after_forward: list[str] = []
        mesh = mesh_of(groups, sharding.shard_group)
        arguments: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": sharding.reshard}
        if sharding.dtype is not None:
            arguments["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=sharding.dtype, reduce_dtype=torch.float32
            )
        if sharding.offload:
            arguments["offload_policy"] = CPUOffloadPolicy(pin_memory=groups.device.type == "cuda")
        self._units = units_of(job.blocks, sharding.blocks_per_unit)
        for unit in self._units:
            fully_shard(unit if len(unit) > 1 else unit[0], **arguments)
        if sharding.dtype is not None:
            # losses are computed in float32, as autocast does
            arguments["mp_policy"] = replace(arguments["mp_policy"], output_dtype=torch.float32)
        self.net = fully_shard(job.model, **arguments)
        assert isinstance(self.net, FSDPModule)
        if isinstance(sharding.reshard, bool) and hasattr(self.net, "set_reshard_after_forward"):
            # some versions pass over what the outermost module is told when it is wrapped
            self.net.set_reshard_after_forward(sharding.reshard)
        self._prefetch()
        self.optimizer = job.optimizer([p for p in job.model.parameters() if p.requires_grad])
        apply_implementation(self.optimizer, implementation)

    def _prefetch(self) -> None:
        first: list[Any] = [unit[0] for unit in self._units]
        ahead, behind = self._sharding.forward_prefetch, self._sharding.backward_prefetch
        for place, module in enumerate(first):
            if ahead:
                module.set_modules_to_forward_prefetch(first[place + 1 : place + 1 + ahead])
            if behind:
                module.set_modules_to_backward_prefetch(first[max(0, place - behind) : place][::-1])

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward: reduce gradients now, or keep them whole."""
        self.net.set_requires_gradient_sync(last or self._sharding.sync_each)
        if hasattr(self.net, "set_is_last_backward"):
            self.net.set_is_last_backward(last)
        return nullcontext()

    def after_first_forward(self) -> None:
        """Note which units are still whole, which no flag tells for certain."""
        self._after_forward = [group._sharded_state.name for group in self._parameter_groups()]

    def _parameter_groups(self) -> list[Any]:
        found: list[Any] = []
        for module in self.net.modules():
            if isinstance(module, FSDPModule):
                state = module._get_fsdp_state()
                groups = getattr(state, "_fsdp_param_groups", None)
                if groups is None:  # before a state could have several
                    groups = [state._fsdp_param_group] if state._fsdp_param_group else []
                found += [group for group in groups if group not in found]
        return found

    def in_force(self) -> dict[str, Value]:
        """Read back from the spread parameters, and from what stayed whole after a forward pass."""
        sharding = self._sharding
        groups = self._parameter_groups()
        whole = {state == _GATHERED for state in self._after_forward}
        stage: Value = (
            "neither 2 nor 3: units differ" if len(whole) > 1 else 2 if True in whole else 3
        )
        if not self._is_spread():
            stage = "not sharded"
        offloaded = {p.device.type for p in self.net.parameters()} == {"cpu"}
        found: dict[str, Value] = {
            STAGE.name: stage,
            SHARD_GROUP.name: self._read_shard_group(),
            SYNC_EACH.name: bool(sharding.sync_each),
            "sharding_units": len(groups),
            "resharded_to": _reshard_width(groups),
        }
        if self._units:
            found[BLOCKS_PER_UNIT.name] = max(len(unit) for unit in self._units)
        if self._groups.device.type != "cpu":
            found[CPU_OFFLOAD.name] = offloaded
        return found

    def _is_spread(self) -> bool:
        """Whether each parameter is here in its share only; a scalar has no share."""
        shards = self._sharding.shard_group
        for parameter in self.net.parameters():
            if not hasattr(parameter, "_local_tensor"):
                return False
            rows = parameter.shape[0] if parameter.dim() else 1
            if parameter.dim() and local_part(parameter).shape[0] > -(-rows // shards):
                return False
        return True

    def _read_shard_group(self) -> Value:
        sizes = {p.device_mesh.size(p.device_mesh.ndim - 1) for p in self.net.parameters()}
        size = sizes.pop() if len(sizes) == 1 else -1
        return 0 if size == self._groups.world_size else size

    def close(self) -> None:
        """The model is not used again."""


def mesh_of(groups: Groups, shard_group: int) -> DeviceMesh:
    """Ranks as replicas by shards, or one dimension where there is one copy only."""
    present = (id(groups), groups.generation)
    key = (*present, shard_group)
    if key not in _meshes:
        for old in [k for k in _meshes if k[:2] != present]:
            del _meshes[old]
        kind, world = groups.device.type, groups.world_size
        if shard_group == world:
            _meshes[key] = init_device_mesh(kind, (world,), mesh_dim_names=("shard",))
        else:
            shape = (world // shard_group, shard_group)
            _meshes[key] = init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))
    return _meshes[key]


def units_of(blocks: Sequence[nn.Module], size: int) -> list[list[nn.Module]]:
    """Neighbouring blocks in groups of ``size``; the last may be smaller."""
    return [list(blocks[i : i + size]) for i in range(0, len(blocks), size)]


def _reshard_width(groups: Sequence[Any]) -> Value:
    """Ranks that a unit is spread over after its forward pass: 1 where it stays whole."""
    widths = {
        1 if g.post_forward_mesh_info is None else g.post_forward_mesh_info.shard_mesh_size
        for g in groups
    }
    return widths.pop() if len(widths) == 1 else "units differ"


# -----------------------------------------------------------------------------
# What a real run needs now and then beyond a usual step: its longest batch, and a checkpoint.


def longest_batch(job: Job, micro_batch: int, device: torch.device) -> Any:
    """A batch of the longest sample that a bounded scan of the data finds, repeated.

    Samples are taken evenly spaced over the data set, so that every rank finds the same
    unless time runs out; the batch has no effect on what is compared.
    """
    from torch.utils.data import default_collate

    count = len(job.data)  # type: ignore[arg-type]
    step = max(1, count // _SCANNED_SAMPLES)
    deadline = time.monotonic() + _SCAN_S
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


# -----------------------------------------------------------------------------
# Bytes that a rank really holds, from the storages of its tensors.


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a distributed tensor that is here; any other tensor as it is."""
    found = getattr(tensor, "_local_tensor", tensor)
    assert isinstance(found, torch.Tensor)
    return found


def held_bytes(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    """Bytes of the storages behind ``tensors`` on ``device``, each counted once."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        here = local_part(tensor)
        if here.device.type == device.type:
            storage = here.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def resident_bytes(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> dict[str, int]:
    """Bytes of parameters, gradients, optimizer state and buffers on ``device``.

    Call it after an optimizer's second step and before gradients are dropped: state is made in the
    first.
    """
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    inner = getattr(optimizer, "optim", optimizer)  # of a ZeroRedundancyOptimizer
    state = [v for entry in inner.state.values() for v in _tensors(entry)]
    return {
        "parameters": held_bytes(parameters, device),
        "gradients": held_bytes(gradients, device),
        "optimizer": held_bytes(state, device),
        "buffers": held_bytes(model.buffers(), device),
    }


def _tensors(entry: Any) -> list[torch.Tensor]:
    return [v for v in entry.values() if isinstance(v, torch.Tensor)]
