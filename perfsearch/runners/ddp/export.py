"""A configuration in the forms that a job can use without perfsearch."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from perfsearch.core.hardware import Hardware
from perfsearch.core.knob import Value
from perfsearch.knobs import collection, ddp, loader, model, nccl, optimizer, process

_HOOK = '''
def hierarchical_all_reduce(group_size):
    """Reduce-scatter inside groups of neighbouring ranks, all-reduce across, all-gather inside."""
    world = dist.get_world_size()
    for first in range(0, world, group_size):
        ranks = list(range(first, first + group_size))
        group = dist.new_group(ranks)
        inside = group if dist.get_rank() in ranks else inside if first else None
    for place in range(group_size):
        ranks = list(range(place, world, group_size))
        group = dist.new_group(ranks)
        across = group if dist.get_rank() in ranks else across if place else None

    def hook(state, bucket):
        tensor = bucket.buffer().div_(world)
        padding = -tensor.numel() % group_size
        whole = torch.nn.functional.pad(tensor, (0, padding)) if padding else tensor
        shard = torch.empty(whole.numel() // group_size, dtype=tensor.dtype, device=tensor.device)
        dist.reduce_scatter_tensor(shard, whole, group=inside)
        dist.all_reduce(shard, group=across)
        dist.all_gather_into_tensor(whole, shard, group=inside)
        if padding:
            tensor.copy_(whole[: tensor.numel()])
        future = torch.futures.Future(devices=[tensor.device] if tensor.is_cuda else None)
        future.set_result(tensor)
        return future

    return hook

'''


def write(
    configuration: Mapping[str, Value], hardware: Hardware, threads: int, directory: Path
) -> list[Path]:
    """Write ``env.sh`` (environment and torchrun command) and ``ddp.py`` (code lines)."""
    directory.mkdir(parents=True, exist_ok=True)
    files = {
        "env.sh": environment_script(configuration, hardware, threads),
        "ddp.py": code(configuration, hardware.device),
    }
    for name, text in files.items():
        (directory / name).write_text(text)
    return [directory / name for name in files]


def environment_script(configuration: Mapping[str, Value], hardware: Hardware, threads: int) -> str:
    """Lines to source before the job, and the command that starts it."""
    chosen = process.THREADS.of(configuration)
    variables = process.THREADS.variables(threads if chosen is None else chosen)
    variables.update(nccl.environment(configuration))
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    nodes = "--standalone" if hardware.nnodes == 1 else f"--nnodes={hardware.nnodes}"
    command = f"torchrun {nodes} --nproc-per-node={hardware.nproc}"
    head = ["#!/bin/sh", "# source this file, then start the job with:", f"#   {command} train.py"]
    return "\n".join([*head, *lines, ""])


def code(configuration: Mapping[str, Value], device: str) -> str:
    """Python that builds exactly this from ``model``, ``optimizer`` and ``dataset``."""
    on_gpu = device == "cuda"
    size = ddp.HIERARCHY.of(configuration)
    lines = ["import torch"]
    if size:
        lines += ["import torch.distributed as dist"]
    lines += ["from torch.nn.parallel import DistributedDataParallel", ""]
    if size:
        lines += [_HOOK]
    lines += process.code_lines(process.changed(configuration))
    lines += collection.code_lines(configuration)
    lines += model.code_lines(configuration)
    lines += ["model = DistributedDataParallel(", "    model,"]
    lines += ["    device_ids=[torch.cuda.current_device()],"] if on_gpu else []
    lines += [f"    {name}={value!r}," for name, value in ddp.arguments(configuration).items()]
    lines += [")"]
    if size:
        lines += [f"model.register_comm_hook(None, hierarchical_all_reduce({size}))"]
    implementation = optimizer.IMPLEMENTATION.of(configuration)
    if implementation not in (None, optimizer.DEFAULT):
        lines += [
            f"# give the optimizer's constructor {implementation}=True, or before its first step:",
            "for group in optimizer.param_groups:",
            f"    group.update(foreach={implementation == 'foreach'}, "
            f"fused={implementation == 'fused'})",
        ]
    return "\n".join([*lines, *loader.code_lines(loader.arguments(configuration)), ""])
