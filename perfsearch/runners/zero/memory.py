"""What a runner knows of memory: predictions, refusals, headroom, and advice when nothing fits."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from perfsearch.core.errors import BadInputError
from perfsearch.core.hardware import torch_version
from perfsearch.core.hints import Prediction
from perfsearch.core.knob import Configuration, Value
from perfsearch.core.python import module_command
from perfsearch.core.space import Space
from perfsearch.core.trial import Measurement, Purpose, Status, Trial
from perfsearch.core.units import GIB
from perfsearch.knobs.batch import ACCUMULATION, MICRO_BATCH, Batch
from perfsearch.knobs.ddp import BUCKET_VIEW
from perfsearch.knobs.fsdp import CPU_OFFLOAD, FORWARD_PREFETCH, STAGE
from perfsearch.knobs.optimizer import IMPLEMENTATION
from perfsearch.knobs.zero import (
    BLOCKS_PER_UNIT,
    CHECKPOINTING,
    MIXED_PRECISION,
    RESHARD_GROUP,
    SHARD_GROUP,
    SYNC_EACH,
)
from perfsearch.metrics.memory import (
    MARGIN_DEVIATIONS,
    Estimate,
    Layout,
    MemoryFacts,
    MemoryModel,
    Observation,
    Terms,
)
from perfsearch.workloads.spec import WorkloadSpec

HEADROOM = 0.05
"""Share of a device's memory to leave unused where nothing else is said."""


class Facts(Protocol):
    """Where facts of the job's tensors come from."""

    error: str

    def get(self) -> MemoryFacts | None:
        """The facts, waited for; ``None`` where there are none, and ``error`` says why."""


class Memory:
    """The memory model of one search.

    Args:
        facts: of the job's tensors.
        batch: the arithmetic of batches.
        pinned: knobs that every configuration shares.
        capacity_gib: of a device; ``None`` where it has no limit of its own.
        on_gpu: whether peaks are those of a device's allocator. On a CPU they are the process's,
            which teaches nothing about tensors.
        headroom: share of the capacity to leave unused.

    """

    def __init__(
        self,
        facts: Facts,
        batch: Batch,
        pinned: Mapping[str, Value],
        capacity_gib: float | None,
        on_gpu: bool,
        headroom: float,
    ) -> None:
        self.facts = facts
        self.capacity_gib = capacity_gib
        self.headroom = headroom
        self._batch = batch
        self._pinned = pinned
        self._on_gpu = on_gpu
        self._terms: Terms | None = None
        self._model: tuple[list[tuple[int, Status]], MemoryModel] | None = None

    @property
    def limit_gib(self) -> float | None:
        """What a configuration may use."""
        return None if self.capacity_gib is None else self.capacity_gib * (1 - self.headroom)

    def layout(self, configuration: Configuration, facts: MemoryFacts) -> Layout:
        """The configuration as the model sees it."""
        whole = {**self._pinned, **configuration}

        stage, world = STAGE.number(whole), self._batch.world_size
        precision = "none"
        if facts.cast_bytes is not None:
            by_policy = stage >= 2 and MIXED_PRECISION.of(whole) != "autocast"
            precision = "policy" if by_policy else "autocast"
        return Layout(
            stage=stage,
            world_size=world,
            micro_batch=MICRO_BATCH.number(whole),
            accumulation=self._batch.accumulation_of(whole),
            shard_group=(SHARD_GROUP.number(whole) or world) if stage >= 2 else 1,
            checkpoint_every=CHECKPOINTING.number(whole),
            blocks_per_unit=(BLOCKS_PER_UNIT.number(whole) or 1) if stage >= 2 else 1,
            reshard_group=RESHARD_GROUP.number(whole) if stage == 3 else 0,
            prefetch=FORWARD_PREFETCH.number(whole) if stage >= 2 else 0,
            sync_each=bool(SYNC_EACH.of(whole)) and stage >= 2,
            offload=bool(CPU_OFFLOAD.of(whole)) and stage >= 2,
            precision=precision,
            bucket_view=bool(BUCKET_VIEW.of(whole)) and stage < 2,
            fused=IMPLEMENTATION.of(whole) == "fused" or not self._on_gpu,
        )

    def model(self, trials: Sequence[Trial]) -> MemoryModel | None:
        """The model after ``trials``; ``None`` where the job's tensors are not known."""
        facts = self.facts.get()
        if facts is None:
            return None
        if self._terms is None:
            self._terms = Terms(facts)
        seen = [(t.number, t.status) for t in trials]
        if self._model is None or self._model[0] != seen:
            observed = [o for t in trials if (o := self._observation(t, facts)) is not None]
            self._model = seen, MemoryModel(self._terms, observed, self.capacity_gib)
        return self._model[1]

    def _observation(self, trial: Trial, facts: MemoryFacts) -> Observation | None:
        if trial.purpose is Purpose.CONFIRM or MICRO_BATCH.name not in {
            **self._pinned,
            **trial.configuration,
        }:
            return None  # a finalist's peak holds its checkpoint too
        layout = self.layout(trial.configuration, facts)
        measured = trial.measurement.peak_allocated_gib if trial.measurement else None
        if measured is not None:
            return Observation(layout, measured) if self._on_gpu else None
        return Observation(layout, None) if trial.status is Status.OOM else None

    def estimate(self, configuration: Configuration, trials: Sequence[Trial]) -> Estimate | None:
        """What to expect of a configuration, with its margin."""
        model, facts = self.model(trials), self.facts.get()
        if model is None or facts is None:
            return None
        return model.predict(self.layout(configuration, facts))

    def predict(self, configuration: Configuration, trials: Sequence[Trial]) -> Prediction:
        """The expected peak, for a strategy."""
        found = self.estimate(configuration, trials)
        return Prediction() if found is None else Prediction(peak_gib=found.peak_gib)

    def refusal(self, configuration: Configuration, trials: Sequence[Trial]) -> str | None:
        """Why a configuration is not worth a trial; ``None`` where it is."""
        model, facts = self.model(trials), self.facts.get()
        if model is None or facts is None:
            return None
        layout = self.layout(configuration, facts)
        for name in (CHECKPOINTING.name, BLOCKS_PER_UNIT.name):
            value = int({**self._pinned, **configuration}.get(name) or 0)
            if value > max(1, facts.blocks) or (value and not facts.blocks and name[0] == "a"):
                return f"{name}={value}: the model has {facts.blocks} blocks"
        return model.surely_too_large(layout) or None

    def lacks_headroom(self, measured: Measurement) -> str:
        """Why a configuration that ran leaves too little of a device; empty where it does not."""
        capacity, limit = self.capacity_gib, self.limit_gib
        if not self._on_gpu or capacity is None or limit is None:
            return ""
        peak = measured.peak_allocated_gib
        if peak is not None and peak > limit:
            return (
                f"it runs, but {peak:.1f} of {capacity:.1f} GiB leave {1 - peak / capacity:.1%} "
                f"unused where runner.memory_headroom={self.headroom:g} asks for "
                f"{self.headroom:.0%}"
            )
        retries = measured.bottleneck_evidence.get("allocator_retries", 0.0)
        if retries > 0 and self.headroom > 0:
            return (
                f"it runs, but the allocator had to give memory back and try again {retries:g} "
                f"times, so runner.memory_headroom={self.headroom:g} is not left"
            )
        return ""

    def advice(self, space: Space, trials: Sequence[Trial]) -> str:
        """What came closest to fitting, by how much it is too large, and what else there is.

        Empty where memory was not what was lacking: no trial ran out of it, and no configuration
        is refused for it.
        """
        points, model, facts = space.listed() or [], self.model(trials), self.facts.get()
        if model is None or facts is None:
            return ""
        layouts = (self.layout(point, facts) for point in points)
        ran_out = any(t.status is Status.OOM for t in trials)
        if not ran_out and not any(map(model.surely_too_large, layouts)):
            return ""
        estimates = [(p, e) for p in points if (e := self.estimate(p, trials)) is not None]
        if not estimates:
            return ""
        point, least = min(estimates, key=lambda pair: pair[1].peak_gib)
        whole = {**self._pinned, **point}
        named = ", ".join(f"{k}={v}" for k, v in point.items())
        text = f"closest: {named or 'the only configuration'}, about {least.peak_gib:.1f} GiB"
        if self.capacity_gib is not None:
            over = least.peak_gib - self.capacity_gib
            text += f", {over:.1f} GiB too much" if over > 0 else ", which should fit"
        return f"{text}; {self._beyond(whole, least.peak_gib, trials)}"

    def _beyond(
        self, closest: Mapping[str, Value], least_gib: float, trials: Sequence[Trial]
    ) -> str:
        """What a configuration outside of the search would need, the mildest that fits first."""
        facts = self.facts.get()
        steps: list[dict[str, Value]] = [
            {STAGE.name: 3, CHECKPOINTING.name: int(bool(facts and facts.blocks))},
            {MICRO_BATCH.name: 1, SYNC_EACH.name: True},
            {CPU_OFFLOAD.name: True} if self._on_gpu else {},
        ]
        changed = dict(closest)
        asked: dict[str, Value] = {}
        said = ""
        for step in steps:
            asked.update({k: v for k, v in step.items() if closest.get(k) != v})
            changed.update(step)
            found = self.estimate(changed, trials)
            if found is None or found.peak_gib >= least_gib:
                continue
            keys = " ".join(f"runner.knobs.{k}={v}" for k, v in asked.items())
            said = f"{keys} would need about {found.peak_gib:.1f} GiB"
            if self.limit_gib is None or found.peak_gib <= self.limit_gib:
                return f"next: {said}"
        if said:
            return f"even {said}: it takes more devices"
        return "no other setting of this runner should need less: it takes more devices"


# -----------------------------------------------------------------------------
# Facts of the job's tensors, from a process that runs beside the search's start.

FACTS_FILE = "model_facts.json"
_DESCRIPTION = 4
"""Raised when the same job is described differently, so that older answers are not used."""

_LIMIT_S = 150.0


class FactsSource:
    """Asks ``python -m perfsearch.training.memory_probe`` once; keeps it beside the journal.

    Args:
        workload: resolved.
        seed: of the search.
        device: type of device that is trained on.
        directory: where the answer is kept; an existing answer to the same question is used, except
            on a factory of the user's.

    Attributes:
        error: why there are no facts, once ``get`` returned ``None``.

    """

    def __init__(self, workload: WorkloadSpec, seed: int, device: str, directory: Path) -> None:
        self._request = {"workload": asdict(workload), "seed": seed, "device": device}
        question = [self._request, torch_version(), _DESCRIPTION]
        words = json.dumps(question, sort_keys=True, default=str)
        self._key = hashlib.blake2b(words.encode(), digest_size=8).hexdigest()
        self._file = directory / FACTS_FILE
        # a user's own code may have changed since, which the request does not tell
        self._reusable = workload.factory is None
        self._process: subprocess.Popen[bytes] | None = None
        self._facts: MemoryFacts | None = None
        self._settled = False
        self.error = ""

    def start(self) -> None:
        """Begin, without waiting; nothing happens where the answer is known."""
        if self._settled or self._process is not None or self._from_file():
            return
        self._process = subprocess.Popen(
            module_command("perfsearch.training.memory_probe"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(self._request, default=str).encode())
        self._process.stdin.close()
        self._process.stdin = None

    def get(self) -> MemoryFacts | None:
        """The facts, waited for; ``None`` where the job cannot be described."""
        if not self._settled:
            self.start()
        if not self._settled:
            self._receive()
        return self._facts

    def _from_file(self) -> bool:
        if not self._reusable or not self._file.exists():
            return False
        try:
            kept = json.loads(self._file.read_text())
        except ValueError:  # torn by a kill; it is asked for again
            return False
        if kept.get("key") != self._key:
            return False
        self._facts = MemoryFacts.from_json(kept["facts"])
        self._settled = True
        return True

    def _receive(self) -> None:
        assert self._process is not None
        try:
            out, errors = self._process.communicate(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.close()
            out, errors = b"", f"it took longer than {_LIMIT_S:g} s".encode()
        code = None if self._process is None else self._process.returncode
        self._process, self._settled = None, True
        try:
            record = json.loads(out) if code == 0 else None
        except ValueError:
            record = None
        if record is None:
            lines = errors.decode(errors="replace").strip().splitlines()
            self.error = lines[-1] if lines else f"it ended with exit code {code}"
            return
        self._facts = MemoryFacts.from_json(record)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps({"key": self._key, "facts": record}))

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


# -----------------------------------------------------------------------------
# The table of ``mode=estimate``: what would fit, stage by micro-batch.

_CHECKPOINTED = {0: "none", 1: "all"}
_COLUMNS = 8
_SMALL_GIB = 0.1
_STAGES = (
    (0, "0 replicated"),
    (1, "1 optimizer sharded"),
    (2, "2 + gradients"),
    (3, "3 + parameters"),
)


def estimate_table(
    memory: Memory, batch: Batch, workload: WorkloadSpec, offered: Mapping[str, Sequence[Value]]
) -> list[str]:
    """Lines to print; one saying why where there is no estimate.

    Args:
        memory: predictions.
        batch: the arithmetic of batches.
        workload: resolved.
        offered: values that a search would try, of each knob.

    Raises:
        BadInputError: the user's factory makes no job that could be trained.

    """
    facts = memory.facts.get()
    _, key, told = memory.facts.error.partition("workload.factory=")
    if facts is None and key:
        raise BadInputError(key + told)  # without the name of the exception's class
    if facts is None:
        return [f"no estimate: the job could not be described ({memory.facts.error})"]
    accumulation_of = _least_accumulations(batch, offered)
    if not accumulation_of:
        raise BadInputError(
            "mode=estimate: no micro_batch with any gradient_accumulation lies within the bounds "
            "of the global batch. Widen runner.knobs or runner.max_train_batch_size"
        )
    columns = _columns(memory, batch, list(accumulation_of))
    accumulation = [accumulation_of[m] for m in columns]
    estimates = {
        (label, every): _estimates(memory, stage, every, columns, accumulation)
        for stage, label in _STAGES
        if stage in offered[STAGE.name]
        for every in _spacings(offered[CHECKPOINTING.name], facts.blocks)
    }
    every_cell = [found for row in estimates.values() for found in row]
    unit = _unit([gib for found in every_cell for gib in (found.at_rest_gib, found.peak_gib)])
    elements = sum(p.elements for p in facts.parameters)
    name = workload.factory or f"{workload.name} {workload.size}"
    lines = [
        f"{name}: {elements / 1e6:.1f} M parameters "
        f"({_in(unit, facts.parameter_bytes / GIB)} {unit}), {facts.blocks} blocks, "
        f"{batch.world_size} rank{'s' * (batch.world_size != 1)}, batch={batch.rule}, "
        f"global batch {batch.global_batch}",
        _budget_line(memory),
    ]
    if facts.activation_error:
        lines.append(f"activations are not known before a trial: {facts.activation_error}")
    rows = [["ZeRO stage", "checkpointing", "at rest", *(f"{m} x {a}" for m, a in
             zip(columns, accumulation, strict=True))]]  # fmt: skip
    rows += [
        [label, _CHECKPOINTED.get(every, f"1 in {every}"), _in(unit, row[-1].at_rest_gib),
         *(f"{_in(unit, found.peak_gib)}{_verdict(memory, found)}" for found in row)]
        for (label, every), row in estimates.items()
    ]  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines += [
        "  ".join(cell.rjust(w) if i > 1 else cell.ljust(w)
                  for i, (cell, w) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]  # fmt: skip
    lines.append(
        f"columns: micro-batch x accumulation; cells: predicted peak in {unit} of a rank's device, "
        "and whether it fits with the headroom (? where the margin leaves it open); "
        f"margin: {MARGIN_DEVIATIONS:g} standard deviations, {_margin(every_cell)} here before "
        "any trial"
    )
    return lines


def _unit(sizes_gib: Sequence[float]) -> str:
    """MiB where every size is so small that GiB would round it away."""
    return "MiB" if max(sizes_gib) < _SMALL_GIB else "GiB"


def _in(unit: str, gib: float) -> str:
    return f"{gib * 1024 if unit == 'MiB' else gib:.2f}"


def _spacings(offered: Sequence[Value], blocks: int) -> list[int]:
    """None and all, between which the others lie; a spacing that alone is offered."""
    if not blocks:
        return [0]
    spacings = sorted(int(v or 0) for v in offered)
    return [v for v in spacings if v in _CHECKPOINTED] or spacings


def _budget_line(memory: Memory) -> str:
    if memory.capacity_gib is None or memory.limit_gib is None:
        return (
            "no limit is known: set runner.device_memory_gib=80 or runner.card=H100 to see what "
            "fits"
        )
    unit = _unit([memory.capacity_gib])
    held, usable = (
        f"{gib * 1024:.2f}" if unit == "MiB" else f"{gib:.1f}"
        for gib in (memory.capacity_gib, memory.limit_gib)
    )
    return (
        f"{held} {unit} a device, of which {usable} may be used "
        f"(runner.memory_headroom={memory.headroom:g})"
    )


def _least_accumulations(batch: Batch, offered: Mapping[str, Sequence[Value]]) -> dict[int, int]:
    """Micro-batches that may be trained, in order, with the least accumulation of each."""
    sizes = sorted(int(v or 1) for v in offered[MICRO_BATCH.name])
    if batch.rule == "fixed":
        return {m: batch.share // m for m in sizes if batch.share % m == 0}
    every = sorted(int(v or 1) for v in offered[ACCUMULATION.name])
    fitting = {m: [t for t in every if batch.may_train(m * t * batch.world_size)] for m in sizes}
    return {m: times[0] for m, times in fitting.items() if times}


def _columns(memory: Memory, batch: Batch, possible: list[int]) -> list[int]:
    """At most ``_COLUMNS`` of them; where the batch is free, doublings up to what fits nowhere."""
    if batch.rule == "fixed":
        return possible[-_COLUMNS:]
    doubled = [m for m in possible if m & (m - 1) == 0] or possible
    least = [memory.estimate(_configuration(3, 1, m, 1), ()) for m in doubled]
    capacity = memory.capacity_gib
    too_large = [
        m for m, e in zip(doubled, least, strict=True)
        if capacity is not None and e is not None and e.low_gib > capacity
    ]  # fmt: skip
    kept = [m for m in doubled if not too_large or m <= too_large[0]]
    return sorted({*kept[-_COLUMNS:], *({batch.micro_batch} & set(possible))})


def _configuration(stage: int, every: int, micro: int, accumulation: int) -> dict[str, Value]:
    return {
        STAGE.name: stage,
        CHECKPOINTING.name: every,
        MICRO_BATCH.name: micro,
        ACCUMULATION.name: accumulation,
    }


def _estimates(
    memory: Memory, stage: int, every: int, columns: list[int], accumulation: list[int]
) -> list[Estimate]:
    """A row's predictions."""
    found = [
        memory.estimate(_configuration(stage, every, micro, times), ())
        for micro, times in zip(columns, accumulation, strict=True)
    ]
    return [estimate for estimate in found if estimate is not None]  # all, as facts are there


def _verdict(memory: Memory, found: Estimate) -> str:
    """Whether it fits; nothing where no limit is known."""
    capacity, limit = memory.capacity_gib, memory.limit_gib
    if capacity is None or limit is None:
        return ""
    verdict = " ok" if found.peak_gib <= limit else " no"
    if found.low_gib <= capacity and found.high_gib > limit:
        verdict += "?"
    return verdict


def _margin(estimates: Sequence[Estimate]) -> str:
    """Half the width of the margin, from the narrowest to the widest."""
    halves = sorted(found.high_gib - found.peak_gib for found in estimates)
    unit = _unit(halves)
    least, most = _in(unit, halves[0]), _in(unit, halves[-1])
    return f"{least} {unit}" if least == most else f"{least} to {most} {unit}"
