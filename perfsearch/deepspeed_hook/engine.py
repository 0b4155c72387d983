"""DeepSpeed's engine, wrapped: which calls are a step, and what passes through them."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from perfsearch.deepspeed_hook.window import Window

if TYPE_CHECKING:
    from perfsearch.deepspeed_hook.rank import Rank

_LEAVING_S = 10.0
"""After that long a rank whose script holds on to it is ended all the same."""


class Hook:
    """Wraps ``deepspeed.initialize`` and the methods of the engine that make a step.

    The first engine that the job makes is the one that is measured.

    Args:
        rank: this process.
        module: DeepSpeed, just imported.

    """

    def __init__(self, rank: Rank, module: ModuleType) -> None:
        self._rank = rank
        self._window: Window | None = None
        self._engine: Any = None
        self._in_backward = False
        deepspeed: Any = module
        deepspeed.initialize = self._around_initialize(deepspeed.initialize)
        kind = deepspeed.DeepSpeedEngine
        kind.forward = self._around_forward(kind.forward)
        kind.backward = self._around_backward(kind.backward)
        kind.step = self._around_step(kind.step)
        pipeline = getattr(deepspeed, "PipelineEngine", None)
        if pipeline is not None:
            pipeline.train_batch = self._around_train_batch(pipeline.train_batch)
        tensor: Any = torch.Tensor
        tensor.backward = self._around_tensor_backward(tensor.backward)

    def _around_initialize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def initialize(*args: Any, **kwargs: Any) -> Any:
            if self._engine is not None:
                return original(*args, **kwargs)
            self._rank.phase = "build"
            bound = signature.bind(*args, **kwargs)
            if self._rank.request.config:
                _replace_config(bound.arguments, self._rank.request.config)
            made = original(*bound.args, **bound.kwargs)
            self._engine = made[0]
            self._window = Window(self._rank.request, self._engine)
            self._rank.phase = "train"
            return made

        return initialize

    def _measures(self, engine: Any) -> bool:
        return engine is self._engine and self._window is not None

    def _around_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward(engine: Any, *args: Any, **kwargs: Any) -> Any:
            window = self._window
            if window is None or not self._measures(engine) or not engine.training:
                return original(engine, *args, **kwargs)
            window.fed(_batch_size(args, kwargs))
            window.mark("dataloader_next")
            result = original(engine, *args, **kwargs)
            window.mark("forward")
            return result

        return forward

    def _around_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(engine: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
            window = self._window
            if window is None or not self._measures(engine):
                return original(engine, loss, *args, **kwargs)
            self._in_backward = True
            try:
                result = original(engine, loss, *args, **kwargs)
            finally:
                self._in_backward = False
            # whoever says that DeepSpeed need not divide has divided by the accumulation already
            window.loss(loss, divided=kwargs.get("scale_wrt_gas", True) is False)
            window.mark("backward")
            return result

        return backward

    def _around_tensor_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(tensor, *args, **kwargs)
            if self._window is not None and not self._in_backward and tensor.numel() == 1:
                self._window.loss(tensor, divided=False)
                self._window.mark("backward")
            return result

        return backward

    def _around_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(engine: Any, *args: Any, **kwargs: Any) -> Any:
            before = engine.global_steps
            result = original(engine, *args, **kwargs)
            if self._measures(engine) and engine.global_steps > before:
                self._stepped()
            return result

        return step

    def _around_train_batch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def train_batch(engine: Any, *args: Any, **kwargs: Any) -> Any:
            self._in_backward = True  # its micro-batches' losses come back as one
            try:
                result = original(engine, *args, **kwargs)
            finally:
                self._in_backward = False
            if self._window is not None and self._measures(engine):
                self._window.loss(result, divided=True)
                self._stepped()
            return result

        return train_batch

    def _stepped(self) -> None:
        assert self._window is not None
        self._rank.steps += 1
        if self._window.stepped():
            self._window.write(self._rank.rank)
            self._rank.finished = True
            self._leave()

    def _leave(self) -> None:
        """End the script here, on every rank after the same step."""

        def end() -> None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

        timer = threading.Timer(_LEAVING_S, end)
        timer.daemon = True
        timer.start()
        raise SystemExit(0)


def _replace_config(arguments: dict[str, Any], path: str) -> None:
    """Give ``initialize`` another configuration, wherever it would have found its own."""
    given = arguments.get("args")
    if given is not None and getattr(given, "deepspeed_config", None) is not None:
        given.deepspeed_config = path
        return
    arguments.pop("config_params", None)
    arguments["config"] = path


def _batch_size(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Length of the first dimension of the first tensor that the model is given."""
    for value in _leaves([*args, *kwargs.values()]):
        if isinstance(value, torch.Tensor) and value.dim():
            return int(value.shape[0])
    return None


def _leaves(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, Mapping):
            yield from _leaves(value.values())
        elif isinstance(value, list | tuple):
            yield from _leaves(value)
        else:
            yield value
