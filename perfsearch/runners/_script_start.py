"""A small program that starts a script with found settings, and needs torch alone."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from perfsearch.core.knob import Value
from perfsearch.parallel.wrapper import wrapper_arguments
from perfsearch.runners import _script_start_sharding

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
    parts += _script_start_sharding.parts(objects, wrappers)
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
