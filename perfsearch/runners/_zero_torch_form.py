"""A configuration as lines of Python that build exactly it with torch alone."""

from __future__ import annotations

from collections.abc import Mapping

from perfsearch.core.knob import Value
from perfsearch.parallel.wrapper import wrapper_arguments
from perfsearch.runners._zero_frameworks import Job

_HEAD = '''"""Built from a measured configuration; call `build`, then `train_step` each step.

`blocks` are the repeated modules of `model` in order; `make_optimizer(parameters)` makes yours;
`loss_of(model, batch)` is the mean loss of a batch; `micro_batches` has {times} batches of {micro}.
"""
'''


def code(whole: Mapping[str, Value], job: Job) -> str:
    """The whole file."""
    stage = _number(whole, "zero_stage")
    head = _HEAD.format(
        times=_number(whole, "gradient_accumulation"), micro=_number(whole, "micro_batch")
    )
    body = _replicated(whole, job) if stage < 2 else _sharded(whole, job)
    parts = [head, *_imports(whole, job), "", "", "def build(model, blocks, make_optimizer):"]
    parts += [f"    {line}".rstrip() for line in [*_checkpointing(whole), *body]]
    parts += ["", "", *_train_step(whole, job)]
    return "\n".join([*parts, ""])


def _number(whole: Mapping[str, Value], name: str) -> int:
    return int(whole.get(name) or 0)


def _imports(whole: Mapping[str, Value], job: Job) -> list[str]:
    stage = _number(whole, "zero_stage")
    lines = ["import contextlib", "", "import torch"]
    if stage >= 2:
        names = ["MixedPrecisionPolicy"] if _by_policy(whole, job) else []
        names = (["CPUOffloadPolicy"] if whole.get("cpu_offload") else []) + names
        lines += [
            "from torch.distributed.device_mesh import init_device_mesh",
            f"from torch.distributed.fsdp import {', '.join([*names, 'fully_shard'])}",
        ]
    if stage == 1:
        lines.append("from torch.distributed.optim import ZeroRedundancyOptimizer")
    if stage < 2:
        lines.append("from torch.nn.parallel import DistributedDataParallel")
    if _number(whole, "activation_checkpointing"):
        lines.append("from torch.utils.checkpoint import checkpoint")
    return lines


def _by_policy(whole: Mapping[str, Value], job: Job) -> bool:
    sharded = _number(whole, "zero_stage") >= 2
    return job.half and sharded and whole.get("mixed_precision") != "autocast"


def _checkpointing(whole: Mapping[str, Value]) -> list[str]:
    every = _number(whole, "activation_checkpointing")
    if not every:
        return []
    chosen = "blocks" if every == 1 else f"blocks[{every - 1}::{every}]"
    return [
        f"for block in {chosen}:",
        "    def forward(*args, own=block.forward, **kwargs):",
        "        return checkpoint(own, *args, use_reentrant=False, **kwargs)",
        "    block.forward = forward",
    ]


def _fused(whole: Mapping[str, Value]) -> list[str]:
    choice = whole.get("optimizer_implementation")
    if choice in (None, "default"):
        return []
    return [f"# make_optimizer must give its optimizer {choice}=True"]


def _replicated(whole: Mapping[str, Value], job: Job) -> list[str]:
    arguments = ["model"]
    if job.on_gpu:
        arguments.append("device_ids=[torch.cuda.current_device()]")
    arguments += [f"{name}={value!r}" for name, value in wrapper_arguments(whole).items()]
    lines = [f"net = DistributedDataParallel({', '.join(arguments)})", *_fused(whole)]
    if _number(whole, "zero_stage") == 0:
        return [*lines, "return net, make_optimizer(model.parameters())"]
    return [
        *lines,
        "whole = make_optimizer([p for p in model.parameters() if p.requires_grad])",
        "groups = [{'params': list(group['params'])} for group in whole.param_groups]",
        "def mine(parts, **_):  # this rank's parameters, in the groups that they were in",
        "    for group, part in zip(whole.param_groups, parts, strict=True):",
        "        group['params'] = part['params']",
        "    kept = {p for part in parts for p in part['params']}",
        "    for parameter in [p for p in whole.state if p not in kept]:",
        "        del whole.state[parameter]",
        "    return whole",
        "return net, ZeroRedundancyOptimizer(groups, mine)",
    ]


def _sharded(whole: Mapping[str, Value], job: Job) -> list[str]:
    stage, group = _number(whole, "zero_stage"), _number(whole, "shard_group_size")
    kind = "cuda" if job.on_gpu else "cpu"
    if group:
        shape = f"({job.world_size // group}, {group}), mesh_dim_names=('replicate', 'shard')"
    else:
        shape = f"({job.world_size},), mesh_dim_names=('shard',)"
    reshard: bool | int = False if stage == 2 else _number(whole, "reshard_group_size") or True
    lines = [
        f"mesh = init_device_mesh({kind!r}, {shape})",
        f"how = dict(mesh=mesh, reshard_after_forward={reshard})",
    ]
    if _by_policy(whole, job):
        lines += [
            "how['mp_policy'] = MixedPrecisionPolicy(",
            "    param_dtype=torch.bfloat16, reduce_dtype=torch.float32",
            ")",
        ]
    if whole.get("cpu_offload"):
        lines.append("how['offload_policy'] = CPUOffloadPolicy()")
    size = _number(whole, "blocks_per_unit") or 1
    if size == 1:
        lines += ["for block in blocks:", "    fully_shard(block, **how)"]
    else:
        lines += [
            f"for first in range(0, len(blocks), {size}):",
            f"    unit = list(blocks[first : first + {size}])",
            "    fully_shard(unit if len(unit) > 1 else unit[0], **how)",
        ]
    if _by_policy(whole, job):
        lines += [
            "how['mp_policy'] = MixedPrecisionPolicy(",
            "    param_dtype=torch.bfloat16, reduce_dtype=torch.float32,",
            "    output_dtype=torch.float32,  # of the outermost module alone",
            ")",
        ]
    lines += ["fully_shard(model, **how)"]
    if isinstance(reshard, bool):
        lines += [f"model.set_reshard_after_forward({reshard})  # the outermost module too"]
    lines += _prefetch(whole, size)
    trainable = "[p for p in model.parameters() if p.requires_grad]"
    return [*lines, *_fused(whole), f"return model, make_optimizer({trainable})"]


def _prefetch(whole: Mapping[str, Value], size: int) -> list[str]:
    ahead, behind = _number(whole, "forward_prefetch"), _number(whole, "backward_prefetch")
    if not ahead and not behind:
        return []
    lines = [f"units = blocks[::{size}]", "for place, unit in enumerate(units):"]
    if ahead:
        nearby = f"list(units[place + 1 : place + {1 + ahead}])"
        lines.append(f"    unit.set_modules_to_forward_prefetch({nearby})")
    if behind:
        lines.append(
            "    unit.set_modules_to_backward_prefetch("
            f"list(units[max(0, place - {behind}) : place])[::-1])"
        )
    return lines


def _train_step(whole: Mapping[str, Value], job: Job) -> list[str]:
    sharded, times = _number(whole, "zero_stage") >= 2, _number(whole, "gradient_accumulation")
    autocast = job.half and not _by_policy(whole, job)
    lines = ["def train_step(net, optimizer, loss_of, micro_batches):"]
    lines += ["    for number, batch in enumerate(micro_batches, start=1):"]
    last = f"number == {times}"
    if sharded:
        sync = "True" if whole.get("gradient_sync_each") else last
        lines += [
            f"        net.set_requires_gradient_sync({sync})",
            f"        net.set_is_last_backward({last})",
            "        waiting = contextlib.nullcontext()",
        ]
    else:
        lines += [f"        waiting = contextlib.nullcontext() if {last} else net.no_sync()"]
    scale = f" / {times}" if times > 1 else ""
    lines += ["        with waiting:"]
    if autocast:
        kind = "cuda" if job.on_gpu else "cpu"
        lines += [f"            with torch.autocast({kind!r}, torch.bfloat16):"]
        lines += [f"                loss = loss_of(net, batch){scale}"]
    else:
        lines += [f"            loss = loss_of(net, batch){scale}"]
    lines += ["            loss.backward()", "    optimizer.step()"]
    return [*lines, "    optimizer.zero_grad(set_to_none=True)"]
