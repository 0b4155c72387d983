"""What a rank keeps between trials: the job, its starting state, and its process groups."""

from __future__ import annotations

import gc
import importlib
from typing import Any

import torch

from perfsearch.parallel.base import BuildContext, TrainStep, load
from perfsearch.workers import measure, prepared, progress
from perfsearch.workers.bootstrap import Groups
from perfsearch.workers.messages import TrialRequest
from perfsearch.workers.state import GlobalSwitches, Snapshot, seed_everything
from perfsearch.workloads.base import Job
from perfsearch.workloads.copying import copy_job, empty_on
from perfsearch.workloads.spec import WorkloadSpec


class Trainer:
    """The warm part of a rank.

    Args:
        groups: the rank's process groups.

    Attributes:
        phase: what it is doing: ``start``, ``connect``, ``build``, ``train`` or ``look``.

    """

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.phase = "start"
        # the first wrapper and the first optimizer would import it, within a trial
        importlib.import_module("torch._dynamo")
        self._workload = WorkloadSpec(**groups.spec.workload)
        self._switches = GlobalSwitches.read()
        job = prepared.take(groups.spec.workload, groups.spec.seed) or self._make_job()
        self._bare = _bare(job)
        progress.note("the job is built")
        self._snapshot = Snapshot(job.model, leaving=groups.device.type == "cuda")
        self._warm: Job | None = self._placed(job)
        self._untouched = True
        progress.note("its model is on the device")
        _settle_heap()

    def _make_job(self) -> Job:
        return prepared.build(self._workload, self.groups.spec.seed)

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
            _settle_heap()
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
        _settle_heap()
        self.release()
        measure.reset_peaks(self.groups.device)  # the model that was dropped is none of the trial's
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


def _bare(job: Job) -> Job | None:
    """The job without values: from it new models are made in no time."""
    try:
        return copy_job(job, empty_on("meta"))
    except (TypeError, RuntimeError, ValueError) as error:
        print(f"the model cannot be copied, so it is built anew where needed: {error}", flush=True)
        return None


def _settle_heap() -> None:
    """Collect garbage once, and take what remains out of later collections.

    Each trial collects its wrapper, and would otherwise walk over all that torch imported.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
