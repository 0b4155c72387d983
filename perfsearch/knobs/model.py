"""What becomes of a model before it is wrapped: its memory layout, compiling. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from perfsearch.core.knob import Kind, Knob, Numerics, Part, Value
from perfsearch.knobs.base import NO_CONVOLUTIONS, Job, Record, Use

NOT_COMPILED = "none"
_DEFAULT_MODE = "default"


def _graphs_need_a_gpu(knob: Knob, job: Job) -> Knob:
    return replace(knob, values=(*knob.values, "reduce-overhead")) if job.on_gpu else knob


def _for_images(knob: Knob, job: Job) -> Knob | str:
    return knob if job.may_convolve else NO_CONVOLUTIONS


COMPILE = Record(
    Knob(
        "compile_mode", Kind.CATEGORICAL, NOT_COMPILED,
        values=(NOT_COMPILED, _DEFAULT_MODE, "max-autotune"), numerics=Numerics.REORDERED,
        help="torch.compile; off unless asked for, since compiling takes minutes",
        shortens=(Part.COMPUTING,), redraws=True,
    ),
    uses=frozenset({Use.DDP}), effect=78, fit=_graphs_need_a_gpu, searched=False,
)  # fmt: skip

CHANNELS_LAST = Record(
    Knob(
        "channels_last", Kind.BOOLEAN, False, numerics=Numerics.REORDERED,
        help="memory layout of images and convolutions", shortens=(Part.COMPUTING,), redraws=True,
    ),
    uses=frozenset({Use.DDP}), effect=76, fit=_for_images,
)  # fmt: skip

RECORDS = (COMPILE, CHANNELS_LAST)


def is_compiled(configuration: Mapping[str, Value]) -> bool:
    """Whether the model is compiled."""
    return COMPILE.of(configuration) not in (None, NOT_COMPILED)


def apply(configuration: Mapping[str, Value], module: Any) -> Any:
    """The module in its layout, and compiled."""
    import torch

    if CHANNELS_LAST.of(configuration):
        module = module.to(memory_format=torch.channels_last)
    if is_compiled(configuration):
        mode = COMPILE.of(configuration)
        module = torch.compile(module, mode=None if mode == _DEFAULT_MODE else str(mode))
    return module


def is_channels_last(module: Any) -> bool:
    """Whether every convolution's weights are laid out so."""
    import torch

    images = [p for p in module.parameters() if p.dim() == 4 and p.shape[1] > 1 and p.shape[2] > 1]
    return bool(images) and all(p.is_contiguous(memory_format=torch.channels_last) for p in images)


def code_lines(configuration: Mapping[str, Value]) -> list[str]:
    """Statements that do the same to ``model``."""
    lines = []
    if CHANNELS_LAST.of(configuration):
        lines += [
            "model = model.to(memory_format=torch.channels_last)",
            "# and each batch: images = images.contiguous(memory_format=torch.channels_last)",
        ]
    if is_compiled(configuration):
        mode = COMPILE.of(configuration)
        argument = "" if mode == _DEFAULT_MODE else f", mode={mode!r}"
        lines += [f"model = torch.compile(model{argument})"]
    return lines
