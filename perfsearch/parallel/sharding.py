"""ZeRO stages 2 and 3: parameters spread over ranks and gathered unit by unit (FSDP2)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from perfsearch.core.knob import Value
from perfsearch.parallel.optimizers import apply_implementation
from perfsearch.parallel.residence import local
from perfsearch.workers.bootstrap import Groups
from perfsearch.workloads.base import Job

_GATHERED = "UNSHARDED"
_meshes: dict[tuple[int, int, int], DeviceMesh] = {}
"""Meshes by generation of process groups and shard size: making one makes communicators."""


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
    """A spread model and its optimizer.

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
            "zero_stage": stage,
            "shard_group_size": self._read_shard_group(),
            "gradient_sync_each": bool(sharding.sync_each),
            "sharding_units": len(groups),
            "resharded_to": _reshard_width(groups),
        }
        if self._units:
            found["blocks_per_unit"] = max(len(unit) for unit in self._units)
        if self._groups.device.type != "cpu":
            found["cpu_offload"] = offloaded
        return found

    def _is_spread(self) -> bool:
        """Whether each parameter is here in its share only; a scalar has no share."""
        shards = self._sharding.shard_group
        for parameter in self.net.parameters():
            if not hasattr(parameter, "_local_tensor"):
                return False
            rows = parameter.shape[0] if parameter.dim() else 1
            if parameter.dim() and local(parameter).shape[0] > -(-rows // shards):
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
