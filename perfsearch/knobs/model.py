"""What becomes of a model: its memory layout, compiling. torch only inside functions.

Of a built-in job it becomes so before it is wrapped, of a script once it has made a step, which is
when it can be told what it trains. The functions for scripts need torch alone and stand as they are
in what is handed over.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from perfsearch.core.knob import Kind, Knob, Numerics, Part, Scope, Value
from perfsearch.core.narrow import SEARCH_ON_GPU
from perfsearch.knobs.base import NO_CONVOLUTIONS, Job, Record, Taker, Use

NOT_COMPILED = "none"
_DEFAULT_MODE = "default"
_WHOLE, _BLOCKS = "model", "blocks"

COMPILES_ITSELF = "the script compiles its model itself"
_NO_BLOCKS = "the model repeats no block"
_SHARDED = "its model is sharded"


def _why_not(job: Job) -> str:
    """Why the model of a script is left as it is; empty where it is not."""
    if job.seen is None:
        return ""
    if job.seen.compiled:
        return COMPILES_ITSELF
    return "" if {*job.seen.wrappers} <= {Taker.DDP} else _SHARDED


def _compiled(knob: Knob, job: Job) -> Knob | str:
    """With CUDA graphs among the modes where there is a GPU."""
    graphs = replace(knob, values=(*knob.values, "reduce-overhead")) if job.on_gpu else knob
    return _why_not(job) or graphs


def _in_parts(knob: Knob, job: Job) -> Knob | str:
    """With the modes of compiling that it goes with."""
    compiled = _compiled(COMPILE.knob, job)
    if isinstance(compiled, str):
        return compiled
    modes = (*compiled.values, *compiled.on_request)
    on = tuple(mode for mode in modes if mode != NOT_COMPILED)
    return replace(knob, when={COMPILE.name: on}) if job.may_repeat else _NO_BLOCKS


def _for_images(knob: Knob, job: Job) -> Knob | str:
    there = job.may_convolve if job.seen is None else job.seen.images is not False
    return _why_not(job) or (knob if there else NO_CONVOLUTIONS)


COMPILE = Record(
    Knob(
        "compile_mode", Kind.CATEGORICAL, NOT_COMPILED,
        values=(NOT_COMPILED, _DEFAULT_MODE), numerics=Numerics.REORDERED,
        help="torch.compile; on a CPU off unless asked for",
        shortens=(Part.COMPUTING,), redraws=True, on_request=("max-autotune",),
    ),
    uses=frozenset({Use.DDP, Use.SCRIPT}), effect=78, fit=_compiled, searched=SEARCH_ON_GPU,
    takers=(Taker.MODULE,), missing="no torch module was seen to be trained",
    script_scope=Scope.PROCESS,
)  # fmt: skip

SCOPE = Record(
    Knob(
        "compile_scope", Kind.CATEGORICAL, _WHOLE, values=(_WHOLE, _BLOCKS),
        numerics=Numerics.REORDERED,
        help="what is compiled: all of the model, or its repeated blocks, those alike but once",
        shortens=(Part.COMPUTING,), redraws=True,
    ),
    uses=frozenset({Use.DDP, Use.SCRIPT}), effect=77, fit=_in_parts,
    takers=(Taker.MODULE,), missing=COMPILE.missing, script_scope=Scope.PROCESS,
)  # fmt: skip

CHANNELS_LAST = Record(
    Knob(
        "channels_last", Kind.BOOLEAN, False, numerics=Numerics.REORDERED,
        help="memory layout of images and convolutions", shortens=(Part.COMPUTING,), redraws=True,
    ),
    uses=frozenset({Use.DDP, Use.SCRIPT}), effect=76, fit=_for_images,
    takers=(Taker.MODULE,), missing=COMPILE.missing,
)  # fmt: skip

RECORDS = (COMPILE, SCOPE, CHANNELS_LAST)


def is_compiled(configuration: Mapping[str, Value]) -> bool:
    """Whether the model is compiled."""
    return COMPILE.of(configuration) not in (None, NOT_COMPILED)


def mode_of(configuration: Mapping[str, Value]) -> str | None:
    """What ``torch.compile`` calls the mode."""
    mode = COMPILE.of(configuration)
    return None if mode == _DEFAULT_MODE else str(mode)


def in_blocks(configuration: Mapping[str, Value]) -> bool:
    """Whether not all of the model is compiled, but its repeated blocks."""
    return bool(SCOPE.of(configuration) == _BLOCKS)


def apply(configuration: Mapping[str, Value], module: Any) -> tuple[Any, dict[str, Value], str]:
    """The module in its layout, and compiled; blocks are so in place until ``undo``.

    Returns:
        What takes the module's place, what of compiling is in force, and why that is not what was
        asked for, or empty.

    """
    import torch

    if CHANNELS_LAST.of(configuration):
        lay_out(module, True, [])
    if not is_compiled(configuration):
        return module, _in_force(configuration, []), ""
    import_compiler()
    if compiles_itself(module):
        return module, _in_force({}, []), f"{COMPILE.name}: the model is compiled already"
    mode = mode_of(configuration)
    blocks = repeated_blocks(module) if in_blocks(configuration) else []
    for block in blocks:
        compile_in_place(block, mode)
    made = module if blocks else torch.compile(module, mode=mode)
    return made, _in_force(configuration, blocks), ""


def _in_force(configuration: Mapping[str, Value], blocks: Collection[Any]) -> dict[str, Value]:
    mode = COMPILE.of(configuration) or NOT_COMPILED
    return {COMPILE.name: mode, SCOPE.name: _BLOCKS if blocks else _WHOLE}


def undo(module: Any) -> None:
    """Have nothing in the module be compiled any more."""
    for inside in module.modules():
        inside._compiled_call_impl = None


def import_compiler() -> None:
    """Import it, in seconds that are none of the first compiled step's."""
    importlib.import_module("torch._inductor.compile_fx")


def compiles_itself(module: Any) -> bool:
    """Whether any of a module was compiled by who made it."""
    import torch

    kind = torch._dynamo.OptimizedModule
    return any(isinstance(m, kind) or m._compiled_call_impl for m in module.modules())


def scope_of(compiled: Iterable[tuple[Any, list[Any]]]) -> str:
    """What was compiled, as the knob has it, from modules and their compiled parts."""
    return _BLOCKS if any(part is not one for one, parts in compiled for part in parts) else _WHOLE


def graphs_compiled() -> int:
    """Graphs that torch has compiled in this process so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def why_not_scored(configuration: Mapping[str, Value], more: int) -> str:
    """Why steps in which so many graphs were compiled anew are not scored; empty for none."""
    if not more:
        return ""
    return (
        f"{COMPILE.name}={COMPILE.of(configuration)} compiled {more} graphs anew in the scored "
        "steps, as for other shapes: such steps are not scored"
    )


def is_channels_last(module: Any) -> bool:
    """Whether every convolution's weights are laid out so, as far as that can be told."""
    import torch

    last = {4: torch.channels_last, 5: torch.channels_last_3d}
    told = [w for w in image_weights(module) if w.shape[1] > 1 and w[0, 0].numel() > 1]
    return bool(told) and all(w.is_contiguous(memory_format=last[w.dim()]) for w in told)


def code_lines(configuration: Mapping[str, Value]) -> list[str]:
    """Statements that do the same to ``model``."""
    lines = _layout_lines(configuration)
    if not is_compiled(configuration):
        return lines
    if not in_blocks(configuration):
        return [*lines, f"model = torch.compile(model{_mode_argument(configuration, ', ')})"]
    functions = (repeated_blocks, compile_in_place)
    sources = "\n\n".join(inspect.getsource(function) for function in functions)
    call = f"compile_in_place(block, {mode_of(configuration)!r})"
    loop = ["for block in repeated_blocks(model):", f"    {call}"]
    return [*lines, "from typing import Any", "", "", *sources.split("\n"), "", *loop]


def script_code_lines(knobs: Mapping[str, Value]) -> list[str]:
    """What to change where a script builds its model, before it is wrapped."""
    lines = _layout_lines(knobs)
    if CHANNELS_LAST.of(knobs) is False:
        lines += ["model: without memory_format=torch.channels_last"]
    if is_compiled(knobs) and in_blocks(knobs):
        lines += [
            "for block in blocks:  # those that the model repeats, such as its layers",
            f"    block.compile({_mode_argument(knobs)})",
        ]
    elif is_compiled(knobs):
        lines += code_lines({COMPILE.name: COMPILE.of(knobs)})
    return [f"# {line.removeprefix('# ')}" for line in lines]


def _layout_lines(configuration: Mapping[str, Value]) -> list[str]:
    if not CHANNELS_LAST.of(configuration):
        return []
    return [
        "model = model.to(memory_format=torch.channels_last)",
        "# and each batch: images = images.contiguous(memory_format=torch.channels_last)",
    ]


def _mode_argument(configuration: Mapping[str, Value], before: str = "") -> str:
    mode = mode_of(configuration)
    return "" if mode is None else f"{before}mode={mode!r}"


_PROGRAM = '''

import gc

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

{functions}
construct, waiting = DistributedDataParallel.__init__, []


@functools.wraps(construct)
def wrap(self, module, *args, **kwargs):
    """Have buckets be made for the layout of the weights."""
    settle_layout(module, [])
    construct(self, module, *args, **kwargs)


DistributedDataParallel.__init__ = wrap


def settle_layout(module, optimizers):
    """Give a module's weights the layout that was found."""
    if {layout} is not None:
        lay_out(module, {layout}, optimizers)


def settle_models(optimizer, args, kwargs):
    """After the first step, see what is trained; after the second, nothing more is waited for."""
    if waiting and waiting[0] is optimizer:
        waiting[1]()
    elif not waiting:
        objects = gc.get_objects()
        optimizers = [one for one in objects if issubclass(type(one), torch.optim.Optimizer)]
        groups = [group for one in optimizers for group in one.param_groups]
        modules = trained_modules(p for group in groups for p in group["params"])
        for module in modules:
            settle_layout(module, optimizers)
        called = modules if {compiles} else []
        waiting.extend([optimizer, compile_when_called(called, {mode!r}, {blocks})[1]])


register_optimizer_step_post_hook(settle_models)
'''


def script_program(knobs: Mapping[str, Value]) -> str:
    """The part of a program that does the same to whatever a script trains; it needs torch alone.

    Empty where nothing is to be done.
    """
    compiles, layout = is_compiled(knobs), CHANNELS_LAST.of(knobs)
    if layout is None and not compiles:
        return ""
    functions = (
        trained_modules,
        image_weights,
        lay_out,
        repeated_blocks,
        compile_in_place,
        compile_when_called,
    )
    return _PROGRAM.format(
        functions="\n\n".join(inspect.getsource(function) for function in functions),
        layout=layout,
        compiles=compiles,
        mode=mode_of(knobs) if compiles else None,
        blocks=in_blocks(knobs),
    )


# -----------------------------------------------------------------------------
# For any model, as it is: these functions are handed over as they stand here.


def trained_modules(parameters: Iterable[Any]) -> list[Any]:
    """The outermost modules that hold some of these parameters, however deep."""
    import gc

    import torch

    wanted = {id(parameter) for parameter in parameters}
    modules = [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]
    outside: dict[int, list[Any]] = {}
    for module in modules:
        for child in module.__dict__.get("_modules", {}).values():
            outside.setdefault(id(child), []).append(module)
    held = [module.__dict__.get("_parameters", {}).values() for module in modules]
    left = [m for m, own in zip(modules, held, strict=True) if wanted & {id(p) for p in own}]
    found, seen = [], {id(module) for module in left}
    while left:
        module = left.pop()
        further = outside.get(id(module), [])
        if not further:
            found.append(module)
        left += [one for one in further if id(one) not in seen]
        seen |= {id(one) for one in further}
    return found


def image_weights(module: Any) -> list[Any]:
    """Weights of the convolutions over images, flat or solid ones."""
    import torch

    kind = torch.nn.modules.conv._ConvNd
    inside = [one for one in module.modules() if isinstance(one, kind)]
    weights = [one._parameters.get("weight") for one in inside]
    return [weight for weight in weights if weight is not None and weight.dim() > 3]


def lay_out(module: Any, channels_last: bool, optimizers: Iterable[Any]) -> None:
    """Give convolutions' weights a layout, and what optimizers keep of them; in place.

    What goes through a convolution takes its weights' layout, and keeps it from there on.
    """
    import torch

    last = {4: torch.channels_last, 5: torch.channels_last_3d}
    for weight in image_weights(module):
        layout = last[weight.dim()] if channels_last else torch.contiguous_format
        states = [optimizer.state.get(weight, {}).values() for optimizer in optimizers]
        kept = [value for state in states for value in state if hasattr(value, "shape")]
        kept = [value for value in kept if value.shape == weight.shape]
        for tensor in [weight, *kept]:
            tensor.data = tensor.data.contiguous(memory_format=layout)
        if weight.grad is not None:
            weight.grad = weight.grad.contiguous(memory_format=layout)


def repeated_blocks(module: Any) -> list[Any]:
    """Blocks that a model repeats, such as the layers of a transformer; empty where it has none.

    They are of the class of which most stand side by side, wherever they are, and none lies within
    another. Layers without modules of their own are none, nor are torch's containers.
    """
    import torch

    containers = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)
    together: dict[type, int] = {}
    for outer in module.modules():
        inside = [type(one) for one in outer.children() if next(one.children(), None) is not None]
        for kind in inside:
            together[kind] = max(together.get(kind, 0), inside.count(kind))
    several = {kind: n for kind, n in together.items() if n > 1 and kind not in containers}
    chosen: Any = max(several, key=lambda one: several[one], default=None)
    blocks: list[Any] = []
    within: set[int] = set()
    for one in module.modules():
        if type(one) is chosen and one is not module and id(one) not in within:
            blocks.append(one)
            within |= {id(inner) for inner in one.modules()}
    return blocks


def compile_in_place(module: Any, mode: str | None) -> None:
    """Have torch compile what is done when a module is called, from its next call on."""
    import torch

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    # not module.compile(), which compiles nothing of torch's own containers
    module._compiled_call_impl = torch.compile(call, mode=mode)


def compile_when_called(
    modules: Iterable[Any], mode: str | None, in_blocks: bool = False
) -> tuple[list[tuple[Any, list[Any]]], Callable[[], None]]:
    """Have what is called to train be compiled in place, from its second call on.

    That is the outermost module that is called, or what is in its ``DistributedDataParallel``; of
    it the blocks that it repeats, if it has some and they are asked for, and else all.

    Returns:
        The modules that were called so far, each with what of it is compiled, and what gives up
        waiting for further calls.

    """
    import torch
    from torch.nn.parallel import DistributedDataParallel

    compiled: list[tuple[Any, list[Any]]] = []
    hooks: dict[int, Any] = {}

    def compile_it(module: Any, args: Any) -> None:
        trained = any(parameter.requires_grad for parameter in module.parameters())
        if trained and torch.is_grad_enabled():
            for inner in module.modules():
                if id(inner) in hooks:
                    hooks.pop(id(inner)).remove()
            whole = module.module if isinstance(module, DistributedDataParallel) else module
            parts = (repeated_blocks(whole) if in_blocks else []) or [whole]
            for part in parts:
                compile_in_place(part, mode)
            compiled.append((whole, parts))

    def give_up() -> None:
        while hooks:
            hooks.popitem()[1].remove()

    for outer in modules:
        for module in outer.modules():
            hooks[id(module)] = module.register_forward_pre_hook(compile_it)
    return compiled, give_up
