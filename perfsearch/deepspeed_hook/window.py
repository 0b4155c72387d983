"""The steps of an engine: let their times settle, score a window of them, and say what was seen."""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from perfsearch.deepspeed_hook.request import Request, leave, result_file
from perfsearch.workers import measure
from perfsearch.workers.phases import phases_of
from perfsearch.workers.trial import FIRST_LOSSES, MAX_DISCARDED, RankResult

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

    """

    def __init__(self, request: Request, engine: Any) -> None:
        self._request = request
        self._engine = engine
        self._device = torch.device(engine.device)
        self._clock = measure.make_clock(self._device)
        self._begin = time.perf_counter()
        self._discarded: list[float] = []
        self._count: int | None = None
        self._scored = 0
        self._losses: list[torch.Tensor] = []
        self._loss_dtype = ""
        self._now: list[torch.Tensor] = []
        self._divided = False
        self._fed: int | None = None
        self._pruned = ""

    def mark(self, phase: str) -> None:
        """Note that a phase of the step ends here."""
        if self._count is not None:
            self._clock.mark(phase)

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

    def stepped(self) -> bool:
        """Note that a global step ended; return whether the trial is over."""
        self._take_losses()
        if self._count is None:
            return self._settle()
        self._clock.mark("optimizer")
        self._clock.mark("step")
        self._scored += 1
        return self._scored >= self._count

    def _take_losses(self) -> None:
        if self._now:
            total = torch.stack(self._now).sum()
            whole = total if self._divided else total / len(self._now)
            self._losses = [*self._losses[:FIRST_LOSSES], whole]
        self._now = []

    def _settle(self) -> bool:
        measure.synchronize(self._device)
        now = time.perf_counter()
        self._discarded += measure.slowest([now - self._begin], self._device)
        if not self._is_steady():
            self._begin = time.perf_counter()
            return False
        # The first step makes the optimizer's state and compiles; it tells nothing of the others.
        typical = min(self._discarded[1:] or self._discarded)
        limit = self._request.stop_above_s
        if limit is not None and typical > limit:
            self._pruned = f"steps take {typical:.4g} s, more than {limit:.4g} s"
            return True
        steps = self._request.profile_steps
        self._count = (
            measure.steps_to_fill(
                self._request.scored_seconds, self._discarded[-1], self._request.scored_steps
            )
            if steps is None
            else steps[1] - steps[0] + 1
        )
        self._clock = measure.make_clock(self._device)
        self._clock.mark("start")
        return False

    def _is_steady(self) -> bool:
        steps = self._request.profile_steps
        if steps is not None:
            return len(self._discarded) >= steps[0] - 1
        spent = sum(self._discarded[1:])
        enough = len(self._discarded) >= MAX_DISCARDED or spent > 2 * self._request.scored_seconds
        return measure.is_steady(self._discarded) or (len(self._discarded) >= 3 and enough)

    def write(self, rank: int) -> None:
        """Agree with the other ranks on what was measured, and leave this one's part of it."""
        measure.synchronize(self._device)
        result = self._pruned_result() if self._pruned else self._scored_result()
        if self._request.survive and result.status == "ok":
            self._save_checkpoint(rank)
            result.peaks = measure.read_peaks(self._device)
        leave(result_file(self._request.log_directory, rank), asdict(result))
        measure.slowest([0.0], self._device)

    def _agreed(self) -> dict[str, Any]:
        return {
            "discarded_steps": len(self._discarded),
            "discarded_seconds": sum(self._discarded),
            "samples_per_step": int(self._engine.train_batch_size()),
        }

    def _pruned_result(self) -> RankResult:
        agreed = {**self._agreed(), "step_seconds": self._discarded[1:]}
        return RankResult("pruned", self._pruned, agreed, peaks=measure.read_peaks(self._device))

    def _scored_result(self) -> RankResult:
        seconds, by_step = self._clock.read_steps()
        phases_ms, timing = phases_of(seconds, by_step)
        agreed = self._agreed()
        agreed["step_seconds"] = measure.slowest(seconds, self._device)
        values: list[float] = []
        if self._losses:
            values = measure.mean_over_ranks(torch.stack(self._losses).to(self._device))
        finite = [v for v in values[:FIRST_LOSSES] if math.isfinite(v)]
        agreed["first_losses"] = finite
        result = RankResult(
            "ok",
            agreed=agreed,
            phases_ms=phases_ms,
            peaks=measure.read_peaks(self._device),
            in_force=self._in_force(),
            evidence={**self._evidence(), **timing},
            environment={"loss_dtype": self._loss_dtype},
        )
        bad = next((i for i, v in enumerate(values) if not math.isfinite(v)), None)
        if bad is not None:
            where = f"step {bad + 1}" if bad < FIRST_LOSSES else "the last scored step"
            result.status, result.reason = "diverged", f"the loss is {values[bad]} at {where}"
        return result

    def _in_force(self) -> dict[str, Any]:
        """What DeepSpeed itself says is in force."""
        engine = self._engine
        settings = engine._config.zero_config
        found: dict[str, Any] = {
            "zero_stage": int(engine.zero_optimization_stage()),
            "micro_batch": int(engine.train_micro_batch_size_per_gpu()),
            "gradient_accumulation": int(engine.gradient_accumulation_steps()),
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
        too_small = measure.slowest([float(free < 2 * needed)], self._device)[0]
        if too_small:
            print(f"no checkpoint is saved: {free / 2**30:.1f} GiB are free", flush=True)
            return
        self._engine.save_checkpoint(str(directory))
        measure.slowest([0.0], self._device)
        if rank == 0:
            shutil.rmtree(directory, ignore_errors=True)
