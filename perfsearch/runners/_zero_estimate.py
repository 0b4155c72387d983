"""The table of ``mode=estimate``: what would fit, stage by micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from perfsearch.core.errors import BadInputError
from perfsearch.core.knob import Value
from perfsearch.metrics.memory_facts import GIB
from perfsearch.metrics.memory_model import MARGIN_DEVIATIONS, Estimate
from perfsearch.runners._zero_batch import Batch
from perfsearch.runners._zero_memory import Memory
from perfsearch.workloads.spec import WorkloadSpec

_CHECKPOINTED = {0: "none", 1: "all"}
_COLUMNS = 8
_SMALL_GIB = 0.1
_STAGES = (
    (0, "0 replicated"),
    (1, "1 optimizer sharded"),
    (2, "2 + gradients"),
    (3, "3 + parameters"),
)


def table(
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
        if stage in offered["zero_stage"]
        for every in _spacings(offered["activation_checkpointing"], facts.blocks)
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
    sizes = sorted(int(v or 1) for v in offered["micro_batch"])
    if batch.rule == "fixed":
        return {m: batch.share // m for m in sizes if batch.share % m == 0}
    every = sorted(int(v or 1) for v in offered["gradient_accumulation"])
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
        "zero_stage": stage,
        "activation_checkpointing": every,
        "micro_batch": micro,
        "gradient_accumulation": accumulation,
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
