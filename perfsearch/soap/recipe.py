"""A training step that is split and placed operator by operator, from a strategy."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from perfsearch.core.knob import Value
from perfsearch.knobs import loader
from perfsearch.soap.capture.capture import Captured, capture
from perfsearch.soap.capture.trace import CaptureError
from perfsearch.soap.executor.exchange import communicators
from perfsearch.soap.executor.execute import (
    Execution,
    Recording,
    make_capturable,
    shard_optimizer,
    time_operators,
)
from perfsearch.soap.formats import parse_plan
from perfsearch.soap.plan import Plan, data_parallel
from perfsearch.training.base import BuildContext, LoaderOptions, Mark, NextBatch, TrainStep
from perfsearch.training.rounding import perturb
from perfsearch.training.state import seed_everything
from perfsearch.workloads.base import Job

_MOST_SPANS = 10_000
"""Of a timed step on all ranks; more are left out of the journal."""
_STEPS_BEFORE_RECORDING = 2  # lazy state, of libraries and of the optimizer, is there by then

_SAMPLES_COMPARED = 16

_captured: dict[tuple[int, str], Captured] = {}


class SoapStep(TrainStep):
    """Forward, backward and optimizer of one rank's parts.

    The configuration's ``plan`` is the text of a strategy file; data parallelism where there is
    none. ``recipe_options["cuda_graph"]`` (default: true) lets steps on GPUs be recorded;
    ``recipe_options["perturbed"]`` has weights changed after the first step as rounding does.
    The loader's knobs are taken as elsewhere.
    """

    def __init__(self, context: BuildContext) -> None:
        groups, self._device = context.groups, context.device
        self._world = groups.world_size
        self.job = context.host_job()
        configuration = context.configuration
        self.loader = LoaderOptions(context.local_batch, loader.arguments(configuration))
        captured = captured_of(self.job, context.local_batch * self._world, self._device)
        self._planned = captured.graph.planned
        self._execution = Execution(
            captured,
            self._plan(captured, configuration.get("plan")),
            self.job.model,
            self._device,
            communicators(id(groups), groups.generation, self._device),
        )
        whole = {
            key: tuple((0, size) for size in shape) for key, shape in self._execution.shapes.items()
        }
        stored = {key: self._execution.stored(key) for key in self._execution.parameters}
        self.optimizer = shard_optimizer(
            self.job.optimizer,
            self._execution.parameters,
            whole,
            stored,
            dict(self.job.model.named_parameters()),
        )
        self._by_rows = self._execution.update_rows(self.optimizer)
        self._perturbed = bool(context.options.get("perturbed"))
        autocast = self.job.autocast_dtype.get(self._device.type)
        self._autocast = () if autocast is None else (autocast,)
        self._records = self._device.type == "cuda" and bool(
            context.options.get("cuda_graph", True)
        )
        self._optimizer_recorded = self._records and make_capturable(self.optimizer)
        self._recording: Recording | None = None
        self._steps = 0
        # every rank draws what one device would, and keeps what its parts need
        seed_everything(groups.spec.seed)

    def _plan(self, captured: Captured, text: Value) -> Plan:
        if text is None:
            return data_parallel(captured.graph, range(self._world))
        return parse_plan(str(text), captured.graph, self._world)

    def run(self, next_batch: NextBatch, mark: Mark) -> torch.Tensor:
        """Train one global batch, of which this rank loads an even share."""
        leaves: list[torch.Tensor] = tree_leaves(next_batch())
        self._execution.require_fit(leaves)
        if self._records and self._steps == _STEPS_BEFORE_RECORDING:
            self._record(leaves)
        self._steps += 1
        if self._recording is not None:
            self._replay(self._recording, leaves, mark)
        else:
            self._loss = self._execution.passes.forward(leaves)
            mark("forward")
            self._execution.passes.backward()
            mark("backward")
            self._execution.apply_gradients(self.optimizer)
            mark("optimizer")
        if self._perturbed and self._steps == 1:
            for seed, parameter in enumerate(self._execution.parameters.values()):
                perturb(parameter, seed, self._autocast)
        # the mean over ranks of this is the sum of what each has of the loss
        return self._loss * self._world

    def _record(self, leaves: list[torch.Tensor]) -> None:
        execution = self._execution

        def forward() -> None:
            self._loss = execution.passes.forward(recording.inputs)

        def optimize() -> None:
            execution.apply_gradients(self.optimizer)

        phases = [forward, execution.passes.backward]
        if self._optimizer_recorded:
            phases.append(optimize)
        recording = Recording(phases, leaves, self._device)
        execution.release()  # recorded steps have memory of their own
        if recording.record():
            self._recording = recording
        else:
            execution.passes.reset()
            print(f"the step is launched, not replayed: {recording.reason}", flush=True)

    def _replay(self, recording: Recording, leaves: list[torch.Tensor], mark: Mark) -> None:
        recording.give(leaves)
        recording.replay(0)
        mark("forward")
        recording.replay(1)
        mark("backward")
        if self._optimizer_recorded:
            recording.replay(2)
        else:
            self._execution.apply_gradients(self.optimizer)
        mark("optimizer")

    def in_force(self) -> dict[str, Value]:
        """Whether steps are replayed."""
        return {"cuda_graph": self._recording is not None}

    def evidence(self) -> dict[str, float]:
        """What a rank sends to others in a step, and what gradients it sums with others, in MiB."""
        found = {name: size / 2**20 for name, size in self._execution.traffic_bytes().items()}
        return {**found, "tables_by_rows": float(len(self._by_rows))}

    def examine(self, next_batch: NextBatch) -> dict[str, Any]:
        """Time each operator, by name; from then on steps are launched."""
        self.close()  # launched steps need its memory
        self._records = False
        times, spans = time_operators(
            self._execution, self.optimizer, lambda: tree_leaves(next_batch()), self._device
        )
        planned = {operator.name for operator in self._planned}
        names = self._execution.operators
        shown = [[d, names[place], *rest] for d, place, *rest in spans if names[place] in planned]
        return {
            "operators": {n: t.to_json() for n, t in times.items() if n in planned},
            "spans": shown if len(shown) <= _MOST_SPANS else [],
        }

    def close(self) -> None:
        """Let go of the graphs, which hold memory and communicators."""
        if self._recording is not None:
            self._recording.close()
        self._recording = None


def captured_of(job: Job, global_batch: int, device: torch.device) -> Captured:
    """The job's graph; a process has one job, so that it is captured once for each batch size."""
    dtype = job.autocast_dtype.get(device.type)
    key = (global_batch, str(dtype))
    if key not in _captured:
        batch = sample_batch(job, global_batch)
        _require_one_shape(job, batch)
        _captured[key] = capture(job.model, job.loss, batch, dtype)
    return _captured[key]


def sample_batch(job: Job, size: int) -> Any:
    """A batch of the first sample, repeated: capturing looks at shapes only."""
    from torch.utils.data import default_collate

    return (job.collate or default_collate)([job.data[0]] * size)


def _require_one_shape(job: Job, batch: Any) -> None:
    """Refuse batches whose tensors are of other sizes where samples differ.

    Only a few samples are looked at; each batch that is trained on is, in its step.
    """
    from torch.utils.data import default_collate

    samples = [job.data[i] for i in range(min(len(job.data), _SAMPLES_COMPARED))]
    try:
        found = tree_leaves((job.collate or default_collate)(samples))
    except RuntimeError as error:
        raise CaptureError(f"samples cannot be put together in a batch: {error}") from error
    for one, several in zip(tree_leaves(batch), found, strict=True):
        if isinstance(one, torch.Tensor) and one.shape[1:] != several.shape[1:]:
            raise CaptureError(
                f"batches have tensors of several shapes: samples of {list(one.shape[1:])} and of "
                f"{list(several.shape[1:])}. runner=soap needs one; pad to a fixed length"
            )


def build(context: BuildContext) -> SoapStep:
    """Put the strategy into force."""
    return SoapStep(context)
