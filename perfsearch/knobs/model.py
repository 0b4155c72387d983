"""What becomes of a model: its memory layout, compiling. torch only inside functions.

Of a built-in job it becomes so before it is wrapped, of a script once it has made a step, which is
when it can be told what it trains. The functions for scripts need torch alone and stand as they are
in what is handed over.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from perfsearch.core.knob import Kind, Knob, Numerics, Part, Scope, Value
from perfsearch.knobs.base import NO_CONVOLUTIONS, Job, Record, Taker, Use

NOT_COMPILED = "none"
_DEFAULT_MODE = "default"

COMPILES_ITSELF = "the script compiles its model itself"
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


def _for_images(knob: Knob, job: Job) -> Knob | str:
    there = job.may_convolve if job.seen is None else job.seen.images is not False
    return _why_not(job) or (knob if there else NO_CONVOLUTIONS)


COMPILE = Record(
    Knob(
        "compile_mode", Kind.CATEGORICAL, NOT_COMPILED,
        values=(NOT_COMPILED, _DEFAULT_MODE, "max-autotune"), numerics=Numerics.REORDERED,
        help="torch.compile; off unless asked for, since compiling takes minutes",
        shortens=(Part.COMPUTING,), redraws=True,
    ),
    uses=frozenset({Use.DDP, Use.SCRIPT}), effect=78, fit=_compiled, searched=False,
    takers=(Taker.MODULE,), missing="no torch module was seen to be trained",
    script_scope=Scope.PROCESS,
)  # fmt: skip

CHANNELS_LAST = Record(
    Knob(
        "channels_last", Kind.BOOLEAN, False, numerics=Numerics.REORDERED,
        help="memory layout of images and convolutions", shortens=(Part.COMPUTING,), redraws=True,
    ),
    uses=frozenset({Use.DDP, Use.SCRIPT}), effect=76, fit=_for_images,
    takers=(Taker.MODULE,), missing=COMPILE.missing,
)  # fmt: skip

RECORDS = (COMPILE, CHANNELS_LAST)


def is_compiled(configuration: Mapping[str, Value]) -> bool:
    """Whether the model is compiled."""
    return COMPILE.of(configuration) not in (None, NOT_COMPILED)


def mode_of(configuration: Mapping[str, Value]) -> str | None:
    """What ``torch.compile`` calls the mode."""
    mode = COMPILE.of(configuration)
    return None if mode == _DEFAULT_MODE else str(mode)


def apply(configuration: Mapping[str, Value], module: Any) -> Any:
    """The module in its layout, and compiled."""
    import torch

    if CHANNELS_LAST.of(configuration):
        lay_out(module, True, [])
    if is_compiled(configuration):
        import_compiler()
        module = torch.compile(module, mode=mode_of(configuration))
    return module


def import_compiler() -> None:
    """Import it, in seconds that are none of the first compiled step's."""
    importlib.import_module("torch._inductor.compile_fx")


def is_channels_last(module: Any) -> bool:
    """Whether every convolution's weights are laid out so, as far as that can be told."""
    import torch

    last = {4: torch.channels_last, 5: torch.channels_last_3d}
    told = [w for w in image_weights(module) if w.shape[1] > 1 and w[0, 0].numel() > 1]
    return bool(told) and all(w.is_contiguous(memory_format=last[w.dim()]) for w in told)


def code_lines(configuration: Mapping[str, Value]) -> list[str]:
    """Statements that do the same to ``model``."""
    lines = []
    if CHANNELS_LAST.of(configuration):
        lines += [
            "model = model.to(memory_format=torch.channels_last)",
            "# and each batch: images = images.contiguous(memory_format=torch.channels_last)",
        ]
    if is_compiled(configuration):
        mode = mode_of(configuration)
        argument = "" if mode is None else f", mode={mode!r}"
        lines += [f"model = torch.compile(model{argument})"]
    return lines


def script_code_lines(knobs: Mapping[str, Value]) -> list[str]:
    """What to change where a script builds its model, before it is wrapped."""
    lines = [f"# {line.removeprefix('# ')}" for line in code_lines(knobs)]
    off = CHANNELS_LAST.of(knobs) is False
    return [*lines, *(["# model: without memory_format=torch.channels_last"] if off else [])]


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
        waiting.extend([optimizer, compile_when_called(called, {mode!r})[1]])


register_optimizer_step_post_hook(settle_models)
'''


def script_program(knobs: Mapping[str, Value]) -> str:
    """The part of a program that does the same to whatever a script trains; it needs torch alone.

    Empty where nothing is to be done.
    """
    compiles, layout = is_compiled(knobs), CHANNELS_LAST.of(knobs)
    if layout is None and not compiles:
        return ""
    functions = (trained_modules, image_weights, lay_out, compile_when_called)
    return _PROGRAM.format(
        functions="\n\n".join(inspect.getsource(function) for function in functions),
        layout=layout,
        compiles=compiles,
        mode=mode_of(knobs) if compiles else None,
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


def compile_when_called(
    modules: Iterable[Any], mode: str | None
) -> tuple[list[Any], Callable[[], None]]:
    """Have what is called to train be compiled in place, from its second call on.

    That is the outermost module that is called, or what is in its ``DistributedDataParallel``.

    Returns:
        The modules that were compiled so far, and what gives up waiting for further calls.

    """
    import torch
    from torch.nn.parallel import DistributedDataParallel

    compiled: list[Any] = []
    hooks: dict[int, Any] = {}

    def call_of(module: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: module._call_impl(*args, **kwargs)

    def compile_it(module: Any, args: Any) -> None:
        trained = any(parameter.requires_grad for parameter in module.parameters())
        if trained and torch.is_grad_enabled():
            for inner in module.modules():
                if id(inner) in hooks:
                    hooks.pop(id(inner)).remove()
            whole = module.module if isinstance(module, DistributedDataParallel) else module
            # not module.compile(), which compiles nothing of torch's own containers
            whole._compiled_call_impl = torch.compile(call_of(whole), mode=mode)
            compiled.append(whole)

    def give_up() -> None:
        while hooks:
            hooks.popitem()[1].remove()

    for outer in modules:
        for module in outer.modules():
            hooks[id(module)] = module.register_forward_pre_hook(compile_it)
    return compiled, give_up
