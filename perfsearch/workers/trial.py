"""One trial on one rank: from the common start, which a ``Trainer`` keeps, to numbers."""

from __future__ import annotations

import contextlib
import gc
import importlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from perfsearch.knobs.base import Use
from perfsearch.knobs.loader import values_of
from perfsearch.knobs.model import graphs_compiled, why_not_scored
from perfsearch.metrics.slow_steps import SLOW_STEPS
from perfsearch.training import clock
from perfsearch.training.base import BuildContext, TrainStep, load
from perfsearch.training.clock import (
    USABLE,
    Clock,
    FirstLosses,
    RankWindow,
    State,
    WindowRule,
)
from perfsearch.training.process_groups import Groups
from perfsearch.training.state import (
    GlobalSwitches,
    Snapshot,
    make_loader,
    seed_everything,
    to_device,
)
from perfsearch.workers import log
from perfsearch.workers.messages import PROFILING, TrialRequest
from perfsearch.workers.prepared_job import build_job, take_prepared_job
from perfsearch.workers.profile import most_steps, take_profile
from perfsearch.workloads.base import Job, copy_job, empty_on
from perfsearch.workloads.spec import WorkloadSpec

_EXAMINING = 10  # usual steps that an examination may take the time of


@dataclass
class RankResult:
    """What one rank has to say of a trial that ran to its end.

    Attributes:
        status: ``ok``, ``pruned``, ``diverged`` or ``not_applied``.
        reason: why it is not ``ok``.
        agreed: fields of the measurement that are the same on every rank.
        phases_ms: this rank's phases.
        peaks: this rank's memory.
        in_force: read back from the libraries.
        evidence: numbers for the diagnosis.
        environment: what else is known of this rank and its steps, as plain values.

    """

    status: str
    reason: str = ""
    agreed: dict[str, Any] = field(default_factory=dict)
    phases_ms: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, float | None] = field(default_factory=dict)
    in_force: dict[str, Any] = field(default_factory=dict)
    evidence: dict[str, float] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)


class _Feed:
    """Micro-batches on the device, their phases marked on the present clock."""

    def __init__(self, trainer: Trainer, step: TrainStep, global_batch: int) -> None:
        groups = trainer.groups
        loader = make_loader(
            step.job,
            step.loader,
            global_batch,
            groups.rank,
            groups.world_size,
            groups.spec.seed,
        )
        self._batches: Iterator[Any] = iter(loader)
        self.in_force: dict[str, Any] = values_of(loader, Use.DDP)
        self.device = groups.device
        self.rank = groups.rank
        self._options = step.loader
        self.clock: Clock = clock.make_clock(groups.device)

    def __call__(self) -> Any:
        batch = next(self._batches)
        self.clock.mark("dataloader_next")
        moved = to_device(batch, self.device, self._options.pin_memory, self._options.channels_last)
        self.clock.mark("to_device")
        return moved


def run_trial(trainer: Trainer, request: TrialRequest) -> RankResult:
    """Build the configuration, warm it up, and score it.

    Every exception of the library or of the user's code leaves it, to be reported by the caller.
    """
    started = time.perf_counter()
    groups = trainer.groups
    trainer.reset()
    clock.reset_peaks(groups.device)
    trainer.phase = "connect"
    groups.ensure(request.group_values, request.group_env, request.timeout_s)
    log.note("the trial begins")
    step = trainer.build(request)
    try:
        feed = _Feed(trainer, step, request.samples_per_step)
        trainer.phase = "train"
        clock.synchronize(groups.device)
        log.note("the step is built")
        rewrap_s = clock.slowest([time.perf_counter() - started], groups.device)[0]
        result = _measured(step, feed, request, rewrap_s)
        if request.detail == "full" and result.status == "ok":
            trainer.phase = PROFILING
            _add_profile(result, step, feed, request)
        if request.recipe_options.get("examine") and result.status == "ok":
            trainer.phase = PROFILING
            _examine(result, step, feed, request)
    except Exception:
        # on a broken device taking things apart fails too; the first failure is the one to tell
        with contextlib.suppress(Exception):
            step.close()
        raise
    step.close()
    log.note("the trial has ended")
    return result


def _measured(step: TrainStep, feed: _Feed, request: TrialRequest, rewrap_s: float) -> RankResult:
    device = feed.device
    losses = FirstLosses()
    rule = WindowRule(
        request.scored_steps,
        request.scored_seconds,
        stop_above_s=request.stop_above_s,
        look_steps=request.look_steps,
        look_seconds=request.look_seconds,
        limit_s=USABLE * request.timeout_s - rewrap_s,
        grows=request.scored_steps[0] < request.scored_steps[1],
    )
    window = RankWindow(rule, device)

    def make_step() -> torch.Tensor:
        feed.clock = window.clock
        loss = step.run(feed, window.clock.mark)
        window.end_step()
        losses.note(loss)
        return loss

    while window.state is State.WARM_UP:
        make_step()
    log.note(f"step times are steady after {len(window.warmup_s)} steps")
    agreed: dict[str, Any] = {
        "rewrap_seconds": rewrap_s,
        "samples_per_step": request.samples_per_step,
    }
    if window.state is State.STOPPED:
        agreed.update(window.result(), step_seconds=window.warmup_s[2:])
        return RankResult("pruned", window.why_stopped, agreed, peaks=clock.read_peaks(device))
    graphs = graphs_compiled()
    while window.state is State.SCORED:
        window.open()
        while window.is_open:
            loss = make_step()
    peaks = clock.read_peaks(device)
    log.note(f"{window.made} steps are scored")
    phases_ms, evidence = window.read()
    if device.type != "cpu":
        evidence["host_ms"] = window.timer.host_s * 1e3
    agreed.update(window.result(step.compiles))
    agreed["first_losses"], diverged = losses.read(device)
    anew = (
        why_not_scored(request.configuration, graphs_compiled() - graphs) if step.compiles else ""
    )
    lost = step.lost or anew
    result = RankResult(
        "diverged" if diverged else "not_applied" if lost else "ok",
        diverged or lost,
        agreed=agreed,
        phases_ms=phases_ms,
        peaks=peaks,
        in_force={**feed.in_force, **step.in_force()},
        evidence={**step.evidence(), **evidence},
        environment={
            "loss_dtype": str(loss.dtype).removeprefix("torch."),
            SLOW_STEPS: window.slow_steps(),
        },
    )
    if request.recipe_options.get("survive"):
        step.survive()
        result.peaks = clock.read_peaks(device)
    return result


def _add_profile(result: RankResult, step: TrainStep, feed: _Feed, request: TrialRequest) -> None:
    """Take a profile, unless the trial's time would be over: its score must not be lost."""
    agreed = result.agreed  # the same on every rank, so that all decide alike
    typical = statistics.median(agreed["step_seconds"])
    steps_before = agreed["discarded_steps"] + len(agreed["step_seconds"])
    if not _has_time(result, request, "close look", most_steps(request, typical, steps_before)):
        return
    begin = time.perf_counter()
    profile = take_profile(step, feed, request, typical, steps_before)
    result.phases_ms = profile.phases_ms
    result.evidence.update(profile.evidence)
    result.environment.update(profile.environment)
    agreed["detail_seconds"] = clock.slowest([time.perf_counter() - begin], feed.device)[0]


def _examine(result: RankResult, step: TrainStep, feed: _Feed, request: TrialRequest) -> None:
    """Let the recipe say what its step is made of, in steps of its own."""
    if not _has_time(result, request, "examination", _EXAMINING):
        return
    begin = time.perf_counter()
    feed.clock = clock.make_clock(feed.device)
    result.environment.update(step.examine(feed))
    spent = clock.slowest([time.perf_counter() - begin], feed.device)[0]
    result.agreed["detail_seconds"] = result.agreed.get("detail_seconds", 0.0) + spent


def _has_time(result: RankResult, request: TrialRequest, what: str, steps: int) -> bool:
    """Whether so many further steps fit the trial's time; all ranks decide alike."""
    agreed = result.agreed
    parts = ("rewrap_seconds", "discarded_seconds", "detail_seconds")
    spent = sum(agreed["step_seconds"]) + sum(agreed.get(part, 0.0) for part in parts)
    needed = statistics.median(agreed["step_seconds"]) * steps
    if spent + needed <= USABLE * request.timeout_s:
        return True
    why = f"it takes about {needed:.0f} s, and little of limits.trial_s is left"
    result.environment.setdefault("unsupported", {})[what] = why
    return False


class Trainer:
    """The warm part of a rank.

    Args:
        groups: the rank's process groups.

    Attributes:
        phase: what it is doing: ``start``, ``connect``, ``build``, ``train`` or ``profile``.

    """

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.phase = "start"
        # the first wrapper and the first optimizer would import it, within a trial
        importlib.import_module("torch._dynamo")
        self._workload = WorkloadSpec(**groups.spec.workload)
        self._switches = GlobalSwitches.read()
        job = take_prepared_job(groups.spec.workload, groups.spec.seed) or self._make_job()
        self._bare = _without_values(job)
        log.note("the job is built")
        self._snapshot = Snapshot(job.model, to_gpu=groups.device.type == "cuda")
        self._warm: Job | None = self._placed(job)
        self._untouched = True
        log.note("its model is on the device")
        _freeze_heap()

    def _make_job(self) -> Job:
        return build_job(self._workload, self.groups.spec.seed)

    def _new_job(self) -> Job:
        """A job with a model of its own, whose values are yet to be restored."""
        if self._bare is None:
            return self._make_job()
        return copy_job(self._bare, empty_on(self.groups.device))

    def _placed(self, job: Job) -> Job:
        job.model.to(self.groups.device)
        return job

    def job(self, reuse: bool) -> Job:
        """The job in its starting state, on the device.

        Args:
            reuse: whether the model may be the object of earlier trials, its values restored;
                otherwise it is a new one, and the old one is dropped.

        """
        untouched, self._untouched = self._untouched, False
        if self._warm is None or not reuse:
            self._warm = None
            _freeze_heap()
            job = self._placed(self._new_job())
            self._warm = job if reuse else None
        else:
            job = self._warm
            if untouched:
                return job
        self._snapshot.restore(job.model)
        return job

    def host_job(self) -> Job:
        """A job of its own in its starting state, its model still on the host.

        For what moves a model to the device part by part, and may be too large for it as a whole.
        Where the device is another one, the values are the snapshot's own and must not be written.
        """
        self._warm = None
        self._untouched = False
        _freeze_heap()
        self.release()
        clock.reset_peaks(self.groups.device)  # the model that was dropped is none of the trial's
        if self._bare is None:
            job = self._make_job()
            self._snapshot.restore(job.model)
            return job
        kept = self._snapshot.values_of(self._bare.model)
        shared = self.groups.device.type != "cpu"
        return copy_job(
            self._bare, lambda t: kept[id(t)].detach() if shared else kept[id(t)].clone()
        )

    def reset(self) -> None:
        """Put memory, torch's switches and the random generators back to where trials start."""
        self.release()
        self._switches.restore()
        seed_everything(self.groups.spec.seed + self.groups.rank)

    def build(self, request: TrialRequest) -> TrainStep:
        """Put the requested configuration into force."""
        self.phase = "build"
        context = BuildContext(
            configuration=request.configuration,
            groups=self.groups,
            local_batch=request.samples_per_step // self.groups.world_size,
            job=self.job,
            host_job=self.host_job,
            options=request.recipe_options,
        )
        return load(request.recipe).build(context)

    def release(self) -> None:
        """Free what a trial left, after its objects have been let go; wrappers form cycles."""
        if self._warm is not None:
            for parameter in self._warm.model.parameters():
                parameter.grad = None
        gc.collect()
        if self.groups.device.type == "cuda":
            torch.cuda.empty_cache()

    def info(self) -> dict[str, Any]:
        """What the controller wants to know once."""
        job = self._warm or self.job(reuse=True)
        return {
            "tokens_per_sample": job.tokens_per_sample,
            "flops_per_sample": job.flops_per_sample,
            "precision": precision_of(job, self.groups.device),
            "parameters": sum(p.numel() for p in job.model.parameters()),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }


def precision_of(job: Job, device: torch.device) -> str:
    """What the job's matrix products are computed in: ``bf16``, ``fp16``, ``tf32`` or ``fp32``."""
    parameters = (p.dtype for p in job.model.parameters() if p.is_floating_point())
    dtype = job.autocast_dtype.get(device.type) or next(parameters, torch.float32)
    if dtype is torch.float32 and device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    return names.get(dtype, str(dtype).removeprefix("torch."))


def _without_values(job: Job) -> Job | None:
    """The job without values: from it new models are made in no time."""
    try:
        return copy_job(job, empty_on("meta"))
    except (TypeError, RuntimeError, ValueError) as error:
        print(f"the model cannot be copied, so it is built anew where needed: {error}", flush=True)
        return None


def _freeze_heap() -> None:
    """Collect garbage once, and take what remains out of later collections.

    Each trial collects its wrapper, and would otherwise walk over all that torch imported.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
