"""A configuration of a script in forms that need no perfsearch."""

from __future__ import annotations

import json
import os
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from perfsearch.core import command as front
from perfsearch.core import secrets
from perfsearch.core.knob import Value
from perfsearch.knobs import (
    RECORDS,
    collection,
    ddp,
    fsdp,
    loader,
    model,
    optimizer,
    process,
)
from perfsearch.knobs.transport import Mapped, apply, plan
from perfsearch.runners._script.ways import Way

NAME = "start.py"


def export_files(
    changed: Mapping[str, Value],
    maps: Sequence[Mapped],
    way: Way,
    threads: int | None,
    command: Sequence[str],
    module: bool,
    wrappers: list[str],
    directory: Path,
) -> list[Path]:
    """Write ``run.sh``, ``start.py`` that it uses, and ``changes.py``; none needs perfsearch.

    ``run.sh`` has environment and command, ``start.py`` gives constructors the arguments
    that were found, and ``changes.py`` has the lines that would do so in the script itself. Secrets
    among the arguments are in none of them: ``run.sh`` reads them from variables, or asks.

    Args:
        changed: knobs that are not as the script has them.
        maps: knobs that go into the script's arguments or files.
        way: how the script is started.
        threads: CPU threads of a rank, where the environment of today sets them; ``None``: they are
            left to torchrun or torch, as they were in the baseline.
        command: the script and its arguments.
        module: whether it is a module.
        wrappers: kinds of data-parallel wrappers that it makes.
        directory: made when it is missing; changed copies of files are put there too.

    """
    directory.mkdir(parents=True, exist_ok=True)
    planned = plan(changed, maps)
    script, *own = command
    arguments, _ = apply(own, maps, planned.mapped, directory)
    today = {} if threads is None else process.THREADS.variables(threads)
    variables = {**today, **planned.environment}
    lines = ["#!/bin/sh", *(f"export {n}={shlex.quote(v)}" for n, v in variables.items())]
    files: dict[str, str] = {}
    code = code_lines(planned.objects)
    if code:
        files["changes.py"] = "\n".join([*code, ""])
        files[NAME] = program(planned.objects, wrappers, module)
    words = [shlex.quote(word) for word in way.words(module and not code)]
    words += [f'"$(dirname "$0")/{NAME}"'] if code else []
    own_words, asks, _ = secrets.in_shell([script, *arguments], os.environ)
    lines += [*asks, " ".join([*words, *own_words]), ""]
    files["run.sh"] = "\n".join(lines)
    for name, text in files.items():
        (directory / name).write_text(text)
    (directory / "run.sh").chmod(0o755)
    return sorted(path for path in directory.iterdir() if path.is_file())


# -----------------------------------------------------------------------------
# The lines that would make the same changes in the script itself.


def promises(objects: Mapping[str, Value]) -> list[str]:
    """What the script has to keep to in every step, of which a trial has seen the first ones only.

    Args:
        objects: knobs that are not as the script has them.

    """
    return [
        f"{record.name}={str(record.of(objects)).lower()} promises that {record.promise[1]}, as "
        "the steps that were measured did; a later one that does not ends training "
        f"({front.given().key(f'~runner.knobs.{record.name}')} searches without it)"
        for record in RECORDS
        if record.promise is not None and record.of(objects) is record.promise[0]
    ]


def code_lines(objects: Mapping[str, Value]) -> list[str]:
    """What to change where the script builds its objects."""
    lines = [f"# {line}" for line in promises(objects)] + _sharding_lines(objects)
    lines += ddp.code_lines(objects) + loader.script_code_lines(objects)
    implementation = optimizer.IMPLEMENTATION.of(objects)
    if implementation not in (None, optimizer.DEFAULT):
        lines += [f"# optimizer = ...(parameters, ..., {implementation}=True)"]
    lines += model.script_code_lines(objects) + process.code_lines(objects)
    return lines + collection.code_lines(objects)


def _sharding_lines(objects: Mapping[str, Value]) -> list[str]:
    """What to change where modules are sharded, by the script or by a framework."""
    lines: list[str] = []
    stage = fsdp.STAGE.of(objects)
    if stage is not None:
        strategy = "FULL_SHARD" if stage == 3 else "SHARD_GRAD_OP"
        lines += [
            f"# fully_shard(module, ..., reshard_after_forward={stage == 3})",
            f"# or FullyShardedDataParallel(..., sharding_strategy=ShardingStrategy.{strategy})",
        ]
    prefetch = fsdp.FSDP1_BACKWARD.of(objects)
    if prefetch is not None:
        kind = (
            f"BackwardPrefetch.BACKWARD_{str(prefetch).upper()}" if prefetch != "none" else "None"
        )
        lines += [f"# FullyShardedDataParallel(..., backward_prefetch={kind})"]
    forward = fsdp.FSDP1_FORWARD.of(objects)
    if forward is not None:
        lines += [f"# FullyShardedDataParallel(..., forward_prefetch={forward})"]
    keys: dict[str, Value] = {} if stage is None else {"reshard_after_forward": stage == 3}
    offload = fsdp.CPU_OFFLOAD.of(objects)
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
    for way, record in (("forward", fsdp.FORWARD_PREFETCH), ("backward", fsdp.BACKWARD_PREFETCH)):
        ahead = record.of(objects)
        if ahead is not None:
            following = "next" if way == "forward" else "previous"
            call = f"set_modules_to_{way}_prefetch([the {following} {ahead}])"
            lines += [f"# each fully_shard unit: {call}"]
    return lines


# -----------------------------------------------------------------------------
# ``start.py``: it starts the script with the settings, and needs torch alone.

_HEAD = '''"""Starts a script with the settings that a search has found; it needs torch alone.

    python start.py SCRIPT ARGUMENTS...
    torchrun TORCHRUN_OPTIONS start.py SCRIPT ARGUMENTS...

Each constructor gets the arguments below in place of the script's own. `changes.py` says how to
write them into the script instead, after which this file is not needed.
"""

from __future__ import annotations

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
if not sys.flags.safe_path:
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
if not sys.flags.safe_path:
    sys.path[0] = os.getcwd()
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def program(objects: Mapping[str, Value], wrappers: list[str], module: bool) -> str:
    """The text of ``start.py``.

    Args:
        objects: knobs of what the script builds.
        wrappers: kinds of data-parallel wrappers that it makes.
        module: whether the script is started as a module.

    """
    parts = _ddp(objects) + _loader(objects) + _optimizer(objects)
    parts += sharding_parts(objects, wrappers)
    parts += [model.script_program(objects), collection.script_program(objects)]
    switches = process.code_lines(process.set_by_code(objects))
    if switches:
        parts.append("\n".join(["\n\nimport torch\n", *switches, ""]))
    parts = [part for part in parts if part]
    if parts:
        body = textwrap.indent("".join(parts).replace("\n\n\n", "\n\n").lstrip("\n"), "    ")
        parts = [f"\n\ndef put_into_force():\n{_SAYS}{body}", _AFTER_TORCH]
    return "".join([_HEAD, *parts, _MODULE if module else _SCRIPT])


def _ddp(objects: Mapping[str, Value]) -> list[str]:
    arguments = ddp.script_arguments(objects)
    without = tuple(n for n in ddp.replaced_arguments(objects) if n not in arguments)
    return [_DDP.format(arguments=arguments, without=without)] if arguments or without else []


def _loader(objects: Mapping[str, Value]) -> list[str]:
    found, without = loader.script_arguments(objects)
    return [_LOADER.format(arguments=found, without=without)] if found else []


def _optimizer(objects: Mapping[str, Value]) -> list[str]:
    name = optimizer.IMPLEMENTATION.of(objects)
    if name in (None, optimizer.DEFAULT):
        return []
    return [_OPTIMIZER.format(name=name, foreach=name == "foreach", fused=name == "fused")]


# -----------------------------------------------------------------------------
# Its part that gives sharded models what was found.

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
    stage, offload = fsdp.STAGE.of(objects), fsdp.CPU_OFFLOAD.of(objects)
    ahead, behind = fsdp.FORWARD_PREFETCH.of(objects), fsdp.BACKWARD_PREFETCH.of(objects)
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
    stage = fsdp.STAGE.of(objects)
    if stage is not None:
        strategy = "FULL_SHARD" if stage == 3 else "SHARD_GRAD_OP"
        given.append(f'"sharding_strategy": fsdp.ShardingStrategy.{strategy}')
    prefetch = fsdp.FSDP1_BACKWARD.of(objects)
    if prefetch is not None:
        kind = f"fsdp.BackwardPrefetch.BACKWARD_{str(prefetch).upper()}"
        given.append(f'"backward_prefetch": {"None" if prefetch == "none" else kind}')
    if fsdp.FSDP1_FORWARD.of(objects) is not None:
        given.append(f'"forward_prefetch": {bool(fsdp.FSDP1_FORWARD.of(objects))}')
    return [_FSDP1.format(arguments=", ".join(given))] if given else []
