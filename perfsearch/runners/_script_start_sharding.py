"""The part of ``start.py`` that gives sharded models what was found."""

from __future__ import annotations

from collections.abc import Mapping

from perfsearch.core.knob import Value

_FULLY_SHARD = '''

import torch.distributed.fsdp as fsdp

shard, units = fsdp.fully_shard, []


@functools.wraps(shard)
def fully_shard(module, **arguments):
    """Shard a module, or several as a group, the way that was found."""
    own, grouped = arguments.get("reshard_after_forward"), isinstance(module, list)
{changes}    units.append(module[0] if grouped else module)
    return shard(module, **arguments)


fsdp.fully_shard = fully_shard
'''

_RESHARD = {
    2: '    arguments["reshard_after_forward"] = False\n',
    3: (
        '    if own is False and not grouped:\n        arguments["reshard_after_forward"] = True\n'
    ),
}

_OFFLOAD = (
    '    arguments["offload_policy"] = '
    "fsdp.CPUOffloadPolicy(pin_memory=torch.cuda.is_available())\n"
)
_KEEP_ON_DEVICE = '    arguments["offload_policy"] = fsdp.OffloadPolicy()\n'

_BOTH_MEMORIES = '''

import torch
import torch.distributed as dist

init_process_group = dist.init_process_group


@functools.wraps(init_process_group)
def for_both_memories(backend=None, *args, **kwargs):
    """Gradients that rest in the host's memory are reduced there."""
    backend = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
    return init_process_group(backend, *args, **kwargs)


dist.init_process_group = for_both_memories
'''

_AHEAD = '''

from torch.optim.optimizer import register_optimizer_step_pre_hook


def gather_ahead(optimizer, args, kwargs):
    """Before the first step ends, let each unit gather the next ones early."""
    inner = [m for u in units for m in u.modules() if m is not u]
    for outer in [u for u in units if not any(u is m for m in inner)]:
        inside = [m for m in outer.modules() if m is not outer and any(m is u for u in units)]
        for place, unit in enumerate(inside):
{changes}    units.clear()


register_optimizer_step_pre_hook(gather_ahead)
'''

_FORWARD = "            unit.set_modules_to_forward_prefetch(inside[place + 1 :][:{units}])\n"
_BACKWARD = "            unit.set_modules_to_backward_prefetch(inside[:place][::-1][:{units}])\n"

_FSDP1 = """

import torch.distributed.fsdp as fsdp

give(fsdp.FullyShardedDataParallel, {{{arguments}}})
"""


def parts(objects: Mapping[str, Value], wrappers: list[str]) -> list[str]:
    """Pieces of the program, in order.

    Args:
        objects: knobs of what the script builds.
        wrappers: kinds of data-parallel wrappers that it makes.

    """
    found = _fully_shard(objects) if "fully_shard" in wrappers else []
    return found + (_fsdp1(objects) if "fsdp1" in wrappers else [])


def _fully_shard(objects: Mapping[str, Value]) -> list[str]:
    stage, offload = objects.get("zero_stage"), objects.get("cpu_offload")
    ahead, behind = objects.get("forward_prefetch"), objects.get("backward_prefetch")
    if all(value is None for value in (stage, offload, ahead, behind)):
        return []
    made = [_BOTH_MEMORIES] if offload else []
    changes = "" if stage is None else _RESHARD[int(stage)]
    if offload is not None:
        changes += _OFFLOAD if offload else _KEEP_ON_DEVICE
    made.append(_FULLY_SHARD.format(changes=changes))
    lines = "" if ahead is None else _FORWARD.format(units=int(ahead))
    lines += "" if behind is None else _BACKWARD.format(units=int(behind))
    return [*made, _AHEAD.format(changes=lines)] if lines else made


def _fsdp1(objects: Mapping[str, Value]) -> list[str]:
    given = []
    stage = objects.get("zero_stage")
    if stage is not None:
        strategy = "FULL_SHARD" if stage == 3 else "SHARD_GRAD_OP"
        given.append(f'"sharding_strategy": fsdp.ShardingStrategy.{strategy}')
    prefetch = objects.get("fsdp_backward_prefetch")
    if prefetch is not None:
        kind = f"fsdp.BackwardPrefetch.BACKWARD_{str(prefetch).upper()}"
        given.append(f'"backward_prefetch": {"None" if prefetch == "none" else kind}')
    if objects.get("fsdp_forward_prefetch") is not None:
        given.append(f'"forward_prefetch": {bool(objects["fsdp_forward_prefetch"])}')
    return [_FSDP1.format(arguments=", ".join(given))] if given else []
