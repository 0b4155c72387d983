"""A configuration of a script in forms that need no perfsearch."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from perfsearch.core.knob import Value
from perfsearch.instrument.mapping import Mapped, apply
from perfsearch.parallel.wrapper import wrapper_arguments
from perfsearch.run_knobs import plan
from perfsearch.runners import _script_start
from perfsearch.runners._ddp_export import loader_lines
from perfsearch.workers.environment import Hardware


def write(
    changed: Mapping[str, Value],
    maps: Sequence[Mapped],
    hardware: Hardware,
    threads: int,
    command: Sequence[str],
    module: bool,
    wrappers: list[str],
    directory: Path,
) -> list[Path]:
    """Write ``run.sh``, ``start.py`` that it uses, and ``changes.py``; none needs perfsearch.

    ``run.sh`` has environment and torchrun command, ``start.py`` gives constructors the arguments
    that were found, and ``changes.py`` has the lines that would do so in the script itself.

    Args:
        changed: knobs that are not as the script has them.
        maps: knobs that go into the script's arguments or files.
        hardware: where it was found.
        threads: CPU threads of a rank today.
        command: the script and its arguments.
        module: whether it is a module.
        wrappers: kinds of data-parallel wrappers that it makes.
        directory: made when it is missing; changed copies of files are put there too.

    """
    directory.mkdir(parents=True, exist_ok=True)
    planned = plan(changed, maps)
    script, *own = command
    arguments, _ = apply(own, maps, planned.mapped, directory)
    variables = {"OMP_NUM_THREADS": str(threads), **planned.environment}
    lines = ["#!/bin/sh", *(f"export {n}={shlex.quote(v)}" for n, v in variables.items())]
    start = ["torchrun", "--standalone", f"--nproc-per-node={hardware.nproc}"]
    files: dict[str, str] = {}
    code = code_lines(planned.objects)
    if code:
        files["changes.py"] = "\n".join([*code, ""])
        files[_script_start.NAME] = _script_start.program(planned.objects, wrappers, module)
    elif module:
        start += ["-m"]
    words = [shlex.quote(word) for word in start]
    words += [f'"$(dirname "$0")/{_script_start.NAME}"'] if code else []
    words += [shlex.quote(word) for word in [script, *arguments]]
    lines += [" ".join(words), ""]
    files["run.sh"] = "\n".join(lines)
    for name, text in files.items():
        (directory / name).write_text(text)
    (directory / "run.sh").chmod(0o755)
    return sorted(path for path in directory.iterdir() if path.is_file())


def promises(objects: Mapping[str, Value]) -> list[str]:
    """What the script has to keep to in every step, of which a trial has seen the first ones only.

    Args:
        objects: knobs that are not as the script has them.

    """
    of_steps = {
        ("static_graph", True): "every step uses the same parameters",
        ("find_unused_parameters", False): "every step uses all parameters",
    }
    return [
        f"{name}={str(value).lower()} promises that {what}, as the steps that were measured did; a "
        f"later one that does not ends training ('~runner.knobs.{name}' searches without it)"
        for (name, value), what in of_steps.items()
        if objects.get(name) is value
    ]


def code_lines(objects: Mapping[str, Value]) -> list[str]:
    """What to change where the script builds its objects."""
    lines = [f"# {line}" for line in promises(objects)] + _sharding_lines(objects)
    wrapper = wrapper_arguments(objects)
    if wrapper:
        given = ", ".join(f"{name}={value!r}" for name, value in wrapper.items())
        lines += [f"# model = DistributedDataParallel(model, ..., {given})"]
    for name in ("gradient_as_bucket_view", "static_graph"):
        if objects.get(name) is False:
            lines += [f"# DistributedDataParallel: without {name}"]
    loader = dict(loader_lines(objects))
    if objects.get("dataloader_workers") == 0:
        loader["num_workers"] = 0
    if objects.get("persistent_workers") is not None:
        loader["persistent_workers"] = objects["persistent_workers"]
    if loader:
        given = ", ".join(f"{name}={value!r}" for name, value in loader.items())
        lines += [f"# loader = torch.utils.data.DataLoader(dataset, ..., {given})"]
    if objects.get("find_unused_parameters") is not None:
        value = objects["find_unused_parameters"]
        lines += [f"# model = DistributedDataParallel(model, ..., find_unused_parameters={value})"]
    implementation = objects.get("optimizer_implementation")
    if implementation not in (None, "default"):
        lines += [f"# optimizer = ...(parameters, ..., {implementation}=True)"]
    if objects.get("cudnn_benchmark") is not None:
        lines += [f"torch.backends.cudnn.benchmark = {objects['cudnn_benchmark']}"]
    if objects.get("omp_num_threads") is not None:
        lines += [f"torch.set_num_threads({objects['omp_num_threads']})"]
    return lines


def _sharding_lines(objects: Mapping[str, Value]) -> list[str]:
    """What to change where modules are sharded, by the script or by a framework."""
    lines: list[str] = []
    stage = objects.get("zero_stage")
    if stage is not None:
        strategy = "FULL_SHARD" if stage == 3 else "SHARD_GRAD_OP"
        lines += [
            f"# fully_shard(module, ..., reshard_after_forward={stage == 3})",
            f"# or FullyShardedDataParallel(..., sharding_strategy=ShardingStrategy.{strategy})",
        ]
    prefetch = objects.get("fsdp_backward_prefetch")
    if prefetch is not None:
        kind = (
            f"BackwardPrefetch.BACKWARD_{str(prefetch).upper()}" if prefetch != "none" else "None"
        )
        lines += [f"# FullyShardedDataParallel(..., backward_prefetch={kind})"]
    forward = objects.get("fsdp_forward_prefetch")
    if forward is not None:
        lines += [f"# FullyShardedDataParallel(..., forward_prefetch={forward})"]
    keys: dict[str, Value] = {} if stage is None else {"reshard_after_forward": stage == 3}
    offload = objects.get("cpu_offload")
    if offload is not None:
        keys["cpu_offload"] = offload
        policy = "CPUOffloadPolicy" if offload else "OffloadPolicy"
        lines += [f"# fully_shard(module, ..., offload_policy={policy}())"]
    if offload:
        lines += ['# init_process_group("cpu:gloo,cuda:nccl"), where gradients are clipped']
    if keys:
        given = ", ".join(f"{name}={value}" for name, value in keys.items())
        lines += [
            f"# Accelerate: FullyShardedDataParallelPlugin(fsdp_version=2, ..., {given})",
            f"# HF Trainer: --fsdp_config with {json.dumps({'version': 2, **keys})}",
        ]
    for way in ("forward", "backward"):
        ahead = objects.get(f"{way}_prefetch")
        if ahead is not None:
            following = "next" if way == "forward" else "previous"
            call = f"set_modules_to_{way}_prefetch([the {following} {ahead}])"
            lines += [f"# each fully_shard unit: {call}"]
    return lines
