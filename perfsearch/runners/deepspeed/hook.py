"""DeepSpeed's engine, wrapped: which calls are a step, and what is measured of them."""

from __future__ import annotations

import functools
import inspect
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from perfsearch.core.trial import DRAWS_IN_FORWARD
from perfsearch.instrument.tape import ForwardDraws
from perfsearch.knobs.batch import ACCUMULATION, MICRO_BATCH
from perfsearch.knobs.fsdp import STAGE
from perfsearch.metrics.slow_steps import SLOW_STEPS
from perfsearch.runners.deepspeed.request import Request, result_file, so_far_file, write_whole
from perfsearch.training.clock import (
    FirstLosses,
    RankWindow,
    State,
    WindowRule,
    read_peaks,
    slowest,
)
from perfsearch.workers.trial import RankResult

if TYPE_CHECKING:
    from perfsearch.runners.deepspeed.rank import Rank

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
            window.forward.begin()
            result = original(engine, *args, **kwargs)
            window.forward.end()
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
        if self._rank.steps == 1:
            self._rank.at_first_step()
        if self._window.stepped(self._rank.rank):
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


# -----------------------------------------------------------------------------
# The window of global steps that is scored.

_FIELDS = {
    "reduce_bucket_size": "reduce_bucket_size",
    "allgather_bucket_size": "allgather_bucket_size",
    "overlap_comm": "overlap_comm",
    "reduce_scatter": "reduce_scatter",
    "contiguous_gradients": "contiguous_gradients",
    "allgather_partitions": "allgather_partitions",
    "round_robin_gradients": "round_robin_gradients",
    "stage3_prefetch_bucket_size": "prefetch_bucket_size",
    "stage3_param_persistence_threshold": "param_persistence_threshold",
    "stage3_max_live_parameters": "max_live_parameters",
    "stage3_max_reuse_distance": "max_reuse_distance",
    "sub_group_size": "sub_group_size",
}
"""Knobs by the name that DeepSpeed's own settings have for them."""

_BYTES_A_PARAMETER = 16
"""Of a checkpoint: weights, the optimizer's copy of them and its two states, at most."""


class Window:
    """Counts global steps; collectives run before and after the scored ones, never between.

    Args:
        request: the trial.
        engine: DeepSpeed's.

    Attributes:
        forward: whether random numbers are drawn in the model.

    """

    def __init__(self, request: Request, engine: Any) -> None:
        self._request = request
        self._engine = engine
        self._device = torch.device(engine.device)
        self._window = RankWindow(_rule(request), self._device)
        self._losses = FirstLosses()
        self._loss_dtype = ""
        self._now: list[torch.Tensor] = []
        self._divided = False
        self._fed: int | None = None
        self.forward = ForwardDraws()

    def mark(self, phase: str) -> None:
        """Note that a phase of the step ends here."""
        if self._window.is_open:
            self._window.clock.mark(phase)

    def fed(self, samples: int | None) -> None:
        """Note how many samples the model was given at once."""
        if self._fed is None:
            self._fed = samples

    def loss(self, loss: Any, divided: bool) -> None:
        """Note the loss of a micro-batch.

        Args:
            loss: as it was given to the backward pass.
            divided: whether the script has divided it by the accumulation.

        """
        if isinstance(loss, torch.Tensor):
            self._now.append(loss.detach().float().reshape(()))
            self._loss_dtype = str(loss.dtype).removeprefix("torch.")
            self._divided = divided

    def stepped(self, rank: int) -> bool:
        """Note that a global step ended; return whether the trial is over.

        What was measured so far is left in case that the script ends before there is more.
        """
        self._take_losses()
        window = self._window
        self.mark("optimizer")
        window.end_step()
        if window.state is State.SCORED and not window.is_open:
            if window.made:
                so_far = so_far_file(self._request.log_directory, rank)
                write_whole(so_far, asdict(self._scored_result()))
            window.open()
        return window.state in (State.STOPPED, State.OVER)

    def _take_losses(self) -> None:
        if self._now:
            total = torch.stack(self._now).sum()
            self._losses.note(total if self._divided else total / len(self._now))
        self._now = []

    def write(self, rank: int) -> None:
        """Agree with the other ranks on what was measured, and leave this one's part of it."""
        stopped = self._window.state is State.STOPPED
        result = self._pruned_result() if stopped else self._scored_result()
        if self._request.survive and result.status == "ok":
            self._save_checkpoint(rank)
            result.peaks = read_peaks(self._device)
        write_whole(result_file(self._request.log_directory, rank), asdict(result))
        slowest([0.0], self._device)

    def _agreed(self) -> dict[str, Any]:
        return {**self._window.result(), "samples_per_step": int(self._engine.train_batch_size())}

    def _pruned_result(self) -> RankResult:
        window = self._window
        agreed = {**self._agreed(), "step_seconds": window.warmup_s[1:]}
        return RankResult("pruned", window.why_stopped, agreed, peaks=read_peaks(self._device))

    def _scored_result(self) -> RankResult:
        phases_ms, timing = self._window.read()
        agreed = self._agreed()
        agreed["first_losses"], diverged = self._losses.read(self._device)
        return RankResult(
            "diverged" if diverged else "ok",
            diverged,
            agreed=agreed,
            phases_ms=phases_ms,
            peaks=read_peaks(self._device),
            in_force=self._in_force(),
            evidence={**self._evidence(), **timing},
            environment={
                "loss_dtype": self._loss_dtype,
                SLOW_STEPS: self._window.slow_steps(),
                DRAWS_IN_FORWARD: bool(self.forward.draws),
            },
        )

    def _in_force(self) -> dict[str, Any]:
        """What DeepSpeed itself says is in force."""
        engine = self._engine
        settings = engine._config.zero_config
        found: dict[str, Any] = {
            STAGE.name: int(engine.zero_optimization_stage()),
            MICRO_BATCH.name: int(engine.train_micro_batch_size_per_gpu()),
            ACCUMULATION.name: int(engine.gradient_accumulation_steps()),
        }
        for name, field in _FIELDS.items():
            value = getattr(settings, field, None)
            if value is not None:
                found[name] = bool(value) if isinstance(value, bool) else int(value)
        for name in ("offload_optimizer", "offload_param"):
            part = getattr(settings, name, None)
            device = getattr(part, "device", None)
            found[name] = str(getattr(device, "value", device) or "none")
        return found

    def _evidence(self) -> dict[str, float]:
        counts = [
            (int(getattr(p, "ds_numel", p.numel())), p.requires_grad)
            for p in self._engine.module.parameters()
        ]
        evidence = {
            "parameters": float(sum(n for n, _ in counts)),
            "trainable_parameters": float(sum(n for n, trains in counts if trains)),
        }
        if self._fed is not None:
            evidence["fed_samples"] = float(self._fed)
        return evidence

    def _save_checkpoint(self, rank: int) -> None:
        """Save one as a real run does, and remove it; left out where the disk is too small."""
        directory = Path(self._request.log_directory) / "checkpoint"
        needed = _BYTES_A_PARAMETER * self._evidence()["parameters"]
        free = shutil.disk_usage(self._request.log_directory).free
        too_small = slowest([float(free < 2 * needed)], self._device)[0]
        if too_small:
            print(f"no checkpoint is saved: {free / 2**30:.1f} GiB are free", flush=True)
            return
        self._engine.save_checkpoint(str(directory))
        slowest([0.0], self._device)
        if rank == 0:
            shutil.rmtree(directory, ignore_errors=True)


def _rule(request: Request) -> WindowRule:
    """How the trial is measured: DeepSpeed's own steps to profile, where the user has set them."""
    rule = WindowRule(
        request.scored_steps,
        request.scored_seconds,
        stop_above_s=request.stop_above_s,
        look_steps=request.look_steps,
        look_seconds=request.look_seconds,
        limit_s=request.limit_s,
    )
    if request.profile_steps is None:
        return rule
    first, last = request.profile_steps
    before, count = max(1, first - 1), last - first + 1
    return replace(
        rule,
        warmup_steps=(before, before),
        scored_steps=(count, count),
        look_steps=0,
        grows=False,
    )
