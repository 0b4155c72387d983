"""DistributedDataParallel that takes other settings between two steps.

The object stays the same, and with it everything that others hold of it: parameters, hooks,
``no_sync``, the optimizer's references. Only what reduces gradients is built anew, by torch's own
constructor, and moved into the object.
"""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from perfsearch.core.hardware import GroupSpec
from perfsearch.core.knob import Value
from perfsearch.knobs import ddp
from perfsearch.knobs.base import Use
from perfsearch.training.ddp import HierarchicalAllReduce
from perfsearch.training.process_groups import Groups

_RECORDS = ddp.constructor_records(Use.ONLINE)
_KNOBS = (*(record.name for record in _RECORDS), ddp.HIERARCHY.name)

_REDUCER_ATTRIBUTES = (
    "reducer",
    "logger",
    *(attribute for record in _RECORDS for attribute in record.kept_as),
    "_comm_hooks",
    "_has_rebuilt_buckets",
    "modules_buffers",
    "named_module_buffers",
)
"""What a wrapper keeps of how it reduces gradients; older torches lack some."""

_KEPT_AS_THEY_ARE = {
    *(ddp.FIND_UNUSED.parameter, "skip_all_reduce_unused_params", "batched_grad_copy")
} - {record.parameter for record in _RECORDS}
"""Arguments of the constructor that no knob changes between two steps."""

_construct = inspect.unwrap(DistributedDataParallel.__init__)
"""The constructor without what instruments a script."""

_hierarchies: weakref.WeakKeyDictionary[Any, HierarchicalAllReduce] = weakref.WeakKeyDictionary()
"""Wrappers whose gradients are reduced by our own hook; beside them, so that they still pickle."""

_accumulating: weakref.WeakSet[Any] = weakref.WeakSet()
"""Wrappers whose gradients were accumulated without reduction at some time."""


class TunedDataParallel(DistributedDataParallel):  # type: ignore[misc]
    """A wrapper that is being tuned; made by ``make_tunable``, never constructed."""

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Register the user's hook, in place of ours where that is in force."""
        if self in _hierarchies:
            rewrap(self, {ddp.HIERARCHY.name: 0})
        super().register_comm_hook(state, hook)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients; noted, since not every setting goes with it."""
        _accumulating.add(self)
        context: AbstractContextManager[None] = super().no_sync()
        return context


def make_tunable(wrapper: DistributedDataParallel) -> None:
    """Make a constructed wrapper one that can be tuned; it stays the same object."""
    if type(wrapper) is DistributedDataParallel:
        wrapper.__class__ = TunedDataParallel


def why_not(wrapper: DistributedDataParallel) -> str:
    """Why nothing of the wrapper may be changed; empty where it can be."""
    if type(wrapper) is not TunedDataParallel:
        return f"the model is wrapped by {type(wrapper).__name__}, a class of its own"
    if getattr(wrapper, "mixed_precision", None) is not None:
        return "DDP's own mixed precision hooks into every module"
    if getattr(wrapper, "_delay_all_reduce_params", None):
        return "the all-reduce of some parameters is delayed"
    if getattr(wrapper, "_use_python_reducer", False):
        return "gradients are reduced by compiled code"
    if any(hasattr(p, "_in_backward_optimizers") for p in wrapper.module.parameters()):
        return "the optimizer runs inside the backward pass"
    if isinstance(wrapper.module, torch._dynamo.OptimizedModule):
        return "the compiled model is cut at the buckets, so that each change would compile anew"
    return ""


def why_not_each(wrapper: DistributedDataParallel) -> dict[str, str]:
    """Knobs of the wrapper that must stay as they are, and why."""
    everything = why_not(wrapper)
    if everything:
        return dict.fromkeys(_KNOBS, everything)
    fixed: dict[str, str] = {}
    listed = getattr(wrapper, "bucket_bytes_cap_list", None) or []
    if len(listed) > 2:
        why = "the script lists a size for each bucket"
        fixed.update(dict.fromkeys((ddp.BUCKET_CAP.name, ddp.FIRST_BUCKET.name), why))
    hooks = users_hooks(wrapper)
    if hooks or builtin_hook(wrapper):
        fixed[ddp.HIERARCHY.name] = "the script has a communication hook of its own"
    if builtin_hook(wrapper):
        return dict.fromkeys(_KNOBS, "a built-in communication hook is registered")
    if any(not (state is None or isinstance(state, dist.ProcessGroup)) for _, state in hooks):
        why = "the script's communication hook keeps a state, which may be made for these buckets"
        fixed.update(dict.fromkeys(_KNOBS, why))
    if not is_whole_world(wrapper):
        fixed[ddp.HIERARCHY.name] = "the model is replicated over some of the ranks only"
    if wrapper in _accumulating:
        why = "torch cannot begin a static graph with gradients that are not reduced"
        fixed.update(
            dict.fromkeys(_KNOBS if wrapper.static_graph else [ddp.STATIC_GRAPH.name], why)
        )
    elif wrapper.static_graph:
        fixed[ddp.STATIC_GRAPH.name] = "the script says so"
    return fixed


def users_hooks(wrapper: DistributedDataParallel) -> list[tuple[Any, Any]]:
    """The communication hooks that are not ours, each with its state."""
    return list(getattr(wrapper, "_comm_hooks", ()))


def builtin_hook(wrapper: DistributedDataParallel) -> bool:
    """Whether a hook of torch's own C++ is registered, which no list names."""
    if wrapper in _hierarchies:
        return False
    data = wrapper._get_ddp_logging_data()
    return bool(data.get("comm_hook")) and not getattr(wrapper, "_comm_hooks", ())


def is_whole_world(wrapper: DistributedDataParallel) -> bool:
    """Whether every rank of the job takes part."""
    return bool(dist.get_world_size(wrapper.process_group) == dist.get_world_size())


def configuration_of(wrapper: DistributedDataParallel) -> dict[str, Value]:
    """What is in force, by knob name, read back from the wrapper."""
    hierarchy = _hierarchies.get(wrapper)
    size = hierarchy.size if hierarchy else 0
    return {**ddp.values_of(wrapper, Use.ONLINE), ddp.HIERARCHY.name: size}


def hierarchy_of(wrapper: DistributedDataParallel) -> HierarchicalAllReduce | None:
    """What reduces its gradients in stages, where that is in force."""
    return _hierarchies.get(wrapper)


def rewrap(wrapper: DistributedDataParallel, changes: Mapping[str, Value]) -> None:
    """Take other settings, between the optimizer's step and the next forward pass.

    Without collectives, unless groups for a hierarchical all-reduce have to be made. A failure
    leaves the wrapper as it was.

    Args:
        wrapper: one that ``make_tunable`` was given.
        changes: knobs by name; what is not among them stays.

    """
    present = configuration_of(wrapper)
    wanted = {**present, **{n: v for n, v in changes.items() if n in present}}
    hooks = users_hooks(wrapper)
    size = ddp.HIERARCHY.number(wanted)
    if size and hooks:
        raise ValueError(f"{ddp.HIERARCHY.name}={size}: the script has its own hook")
    fresh = object.__new__(DistributedDataParallel)
    # first of all, since every rank has to take part in making groups
    hierarchy = HierarchicalAllReduce(groups_of(wrapper), size) if size else None
    try:
        _construct(fresh, **_arguments(wrapper, wanted))
        for hook, state in hooks:
            fresh.register_comm_hook(state, hook)
        if hierarchy is not None:
            average = hierarchy.average
            # a lambda, since torch refuses hooks whose annotations it does not know
            fresh.register_comm_hook(None, lambda state, bucket: average(bucket))
            fresh._comm_hooks.clear()  # ours is no part of what is pickled, or carried over
    except BaseException:
        if hierarchy is not None:
            hierarchy.close()
        if getattr(fresh, "reducer", None) is not None:
            fresh._remove_autograd_hooks()
        raise
    wrapper._remove_autograd_hooks()
    before = _hierarchies.pop(wrapper, None)
    if before is not None:
        before.close()
    if hierarchy is not None:
        _hierarchies[wrapper] = hierarchy
    for name in _REDUCER_ATTRIBUTES:
        if name in vars(fresh):
            setattr(wrapper, name, vars(fresh)[name])


def _arguments(wrapper: DistributedDataParallel, wanted: Mapping[str, Value]) -> dict[str, Any]:
    """Arguments under which the constructor builds the same, but for what is wanted."""
    buffers = (
        "forward_sync_buffers"
        if "forward_sync_buffers" in ddp.constructor_parameters()
        else "broadcast_buffers"
    )
    arguments: dict[str, Any] = {
        "module": wrapper.module,
        "device_ids": wrapper.device_ids,
        "output_device": wrapper.output_device,
        "dim": wrapper.dim,
        "process_group": wrapper.process_group,
        "init_sync": False,
        buffers: wrapper.broadcast_buffers,
        **{
            name: getattr(wrapper, name)
            for name in _KEPT_AS_THEY_ARE
            if name in ddp.constructor_parameters()
        },
    }
    arguments.update(ddp.arguments(wanted))
    listed = getattr(wrapper, "bucket_bytes_cap_list", None) or []
    if len(listed) > 2:  # such a list is left alone
        arguments.pop(ddp.BUCKET_CAP.parameter, None)
        arguments[ddp.FIRST_BUCKET.parameter] = [size / ddp.MIB for size in listed]
    return arguments


_groups: weakref.WeakKeyDictionary[Any, Groups] = weakref.WeakKeyDictionary()


def groups_of(wrapper: DistributedDataParallel) -> Groups:
    """The job's ranks, in which subgroups are made once for each size."""
    world = dist.group.WORLD
    if world not in _groups:
        device = torch.device(wrapper.device)
        rank, size = dist.get_rank(), dist.get_world_size()
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        spec = GroupSpec(workload={}, device=device.type, nproc=size)
        _groups[world] = Groups(spec, Path(), rank, local_rank, size, device)
    return _groups[world]
