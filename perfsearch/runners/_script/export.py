"""A small program that starts a script with found settings, and needs torch alone."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from perfsearch.core.hardware import Hardware
from perfsearch.core.knob import Value
from perfsearch.instrument.mapping import Mapped, apply
from perfsearch.parallel.wrapper import wrapper_arguments
from perfsearch.run_knobs import plan
from perfsearch.runners.ddp.export import loader_lines

NAME = "start.py"

_HEAD = '''"""Starts a script with the settings that a search has found; it needs torch alone.

    torchrun TORCHRUN_OPTIONS start.py SCRIPT ARGUMENTS...

Each constructor gets the arguments below in place of the script's own. `changes.py` says how to
write them into the script instead, after which this file is not needed.
"""

import functools
import inspect
import os
import runpy
import sys
import types
from importlib.machinery import SourceFileLoader


def give(cls, arguments, without=()):
    """Have every object of a class be made with these arguments, and without others."""
    original = cls.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self, *args, **kwargs):
        bound = signature.bind(self, *args, **kwargs).arguments
        bound.update(bound.pop("kwargs", {}))
        bound.pop("self")
        first = [bound.pop(name) for name in ("module", "dataset") if name in bound]
        for name in without:
            bound.pop(name, None)
        original(self, *first, **{**bound, **arguments})

    cls.__init__ = init
'''

_DDP = """

from torch.nn.parallel import DistributedDataParallel

give(DistributedDataParallel, {arguments!r}, {without!r})
"""

_LOADER = """

from torch.utils.data import DataLoader

give(DataLoader, {arguments!r}, {without!r})
"""

_OPTIMIZER = '''

from torch.optim.optimizer import register_optimizer_step_pre_hook

seen = set()


def implementation(optimizer, args, kwargs):
    """Before its first step, have an optimizer walk over its parameters the way that was found."""
    if id(optimizer) in seen:
        return
    seen.add(id(optimizer))
    for group in optimizer.param_groups:
        if {name!r} in group:
            group.update(foreach={foreach}, fused={fused})
    if {fused}:
        optimizer._step_supports_amp_scaling = True


register_optimizer_step_pre_hook(implementation)
'''

_SAYS = '    """Give what was found to whatever the script builds from now on."""\n'

_AFTER_TORCH = '''

class AfterTorch:
    """Sees the script import torch, which then reads what the script may have set for it."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next(spec for spec in specs if spec is not None)
        load = spec.loader.exec_module

        def execute(module):
            load(module)
            put_into_force()

        spec.loader.exec_module = execute
        return spec


sys.meta_path.insert(0, AfterTorch())
'''

_SCRIPT = """

sys.argv = sys.argv[1:]
path = os.path.join(os.getcwd(), sys.argv[0])
sys.path[0] = os.path.dirname(os.path.realpath(path))
main = types.ModuleType("__main__")
main.__dict__.update(__file__=path, __cached__=None, __builtins__=__builtins__)
main.__loader__ = SourceFileLoader("__main__", path)
sys.modules["__main__"] = main
with open(path, "rb") as file:
    code = compile(file.read(), path, "exec", dont_inherit=True)
exec(code, main.__dict__)
"""

_MODULE = """

sys.argv = sys.argv[1:]
sys.path[0] = os.getcwd()
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""

_LOADER_NAMES = {
    "dataloader_workers": "num_workers",
    "prefetch_factor": "prefetch_factor",
    "persistent_workers": "persistent_workers",
    "pin_memory": "pin_memory",
}


def program(objects: Mapping[str, Value], wrappers: list[str], module: bool) -> str:
    """The text of ``start.py``.

    Args:
        objects: knobs of what the script builds.
        wrappers: kinds of data-parallel wrappers that it makes.
        module: whether the script is started as a module.

    """
    parts = _ddp(objects) + _loader(objects) + _optimizer(objects)
    parts += sharding_parts(objects, wrappers)
    if objects.get("cudnn_benchmark") is not None:
        value = bool(objects["cudnn_benchmark"])
        parts.append(f"\n\nimport torch\n\ntorch.backends.cudnn.benchmark = {value}\n")
    if parts:
        body = textwrap.indent("".join(parts).replace("\n\n\n", "\n\n").lstrip("\n"), "    ")
        parts = [f"\n\ndef put_into_force():\n{_SAYS}{body}", _AFTER_TORCH]
    return "".join([_HEAD, *parts, _MODULE if module else _SCRIPT])


def _ddp(objects: Mapping[str, Value]) -> list[str]:
    arguments = wrapper_arguments(objects)
    names = ("gradient_as_bucket_view", "static_graph", "find_unused_parameters")
    arguments.update({n: objects[n] for n in names if objects.get(n) is not None})
    of_buckets = any(objects.get(n) is not None for n in ("bucket_cap_mb", "first_bucket_mb"))
    without = ("bucket_cap_mb", "bucket_cap_mb_list") if of_buckets else ()
    return [_DDP.format(arguments=arguments, without=without)] if arguments or without else []


def _loader(objects: Mapping[str, Value]) -> list[str]:
    found = {n: objects[knob] for knob, n in _LOADER_NAMES.items() if objects.get(knob) is not None}
    without: tuple[str, ...] = ()
    if found.get("num_workers") == 0:
        without = ("prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context")
        found = {name: value for name, value in found.items() if name not in without}
    return [_LOADER.format(arguments=found, without=without)] if found else []


def _optimizer(objects: Mapping[str, Value]) -> list[str]:
    name = objects.get("optimizer_implementation")
    if name in (None, "default"):
        return []
    return [_OPTIMIZER.format(name=name, foreach=name == "foreach", fused=name == "fused")]


# -----------------------------------------------------------------------------
# A configuration of a script in forms that need no perfsearch.


def export_files(
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
        files[NAME] = program(planned.objects, wrappers, module)
    elif module:
        start += ["-m"]
    words = [shlex.quote(word) for word in start]
    words += [f'"$(dirname "$0")/{NAME}"'] if code else []
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


# -----------------------------------------------------------------------------
# The part of ``start.py`` that gives sharded models what was found.

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


def sharding_parts(objects: Mapping[str, Value], wrappers: list[str]) -> list[str]:
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
