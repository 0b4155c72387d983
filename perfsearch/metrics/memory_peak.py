"""The most that a rank holds while it trains, by arithmetic alone.

There are two moments to compare. When the backward pass begins, every activation is there and no
gradient; when it ends, every gradient is there and no activation.
"""

from __future__ import annotations

from dataclasses import dataclass

from perfsearch.metrics.memory_at_rest import AtRest, at_rest
from perfsearch.metrics.memory_facts import Layout, MemoryFacts

_UNITS_AT_ONCE = 2  # the unit that computes, and the next one on its way


@dataclass(frozen=True)
class Peak:
    """Bytes of the larger moment, and what it is made of.

    Attributes:
        rest: what is held between steps.
        gathered: parameters that are whole for a while.
        activations: ``None`` where they are not known.
        total: the peak, activations that are not known left out.
        activations_decide: whether the peak is when the backward pass begins.

    """

    rest: AtRest
    gathered: float
    activations: float | None
    total: float
    activations_decide: bool


def peak(facts: MemoryFacts, layout: Layout) -> Peak:
    """The peak of one rank."""
    rest = at_rest(facts, layout)
    known = facts.activation_bytes(layout.precision, layout.checkpoint_every, layout.micro_batch)
    fixed, growing = known or (0.0, 0.0)
    units = _units(facts, layout)
    largest, whole = max(units[1:], default=0.0), sum(units)
    at_once = units[0] + min(_UNITS_AT_ONCE + layout.prefetch, len(units) - 1) * largest
    gathered = 0.0
    if layout.stage == 2:
        gathered = whole
    elif layout.stage == 3:
        gathered = min(whole, at_once)
        if layout.reshard_group:
            gathered = min(whole, gathered + whole / layout.reshard_group)
    kept = _kept_gradients(facts, layout)
    idle = rest.parameters + rest.optimizer + rest.buffers + rest.buckets
    if not layout.sharded:
        # what the wrapper holds from one step to the next, as large as the gradients whether
        # they are views into the buckets or not
        idle += facts.trainable_bytes
    begin = idle + gathered + max(kept, _old_buckets(facts, layout)) + fixed + growing
    temporary = 0.0 if layout.fused or layout.offload else _updated(rest)
    of_unit = _exchanged(facts, layout, units) if layout.sharded else 0.0
    end = rest.total + min(whole, at_once) * layout.sharded + kept + fixed
    end += max(temporary, of_unit)
    return Peak(
        rest=rest,
        gathered=gathered,
        activations=None if known is None else fixed + growing,
        total=max(begin, end),
        activations_decide=begin >= end,
    )


def _exchanged(facts: MemoryFacts, layout: Layout, units: list[float]) -> float:
    """The largest unit's copies beside its parameters, while ranks exchange them.

    That is its gradients and the input of their reduction; or, where little of it is trained, what
    the gathered parameters arrive in.
    """
    trained = _units(facts, layout, trainable_only=True)
    ratio = 1 + _reduce_ratio(facts, layout)
    return max(max(size, own * ratio) for size, own in zip(units, trained, strict=True))


def _units(facts: MemoryFacts, layout: Layout, trainable_only: bool = False) -> list[float]:
    """Bytes of each unit when it is gathered: what lies outside of blocks, then groups of them."""
    groups = -(-facts.blocks // layout.blocks_per_unit) if layout.blocks_per_unit else 0
    units = [0.0] * (groups + 1)
    for parameter in facts.parameters:
        if trainable_only and not parameter.trainable:
            continue
        size = float(parameter.size)
        if layout.precision == "policy" and facts.cast_bytes is not None:
            size = float(parameter.elements * facts.cast_bytes)
        in_group = parameter.block >= 0 and groups
        units[1 + parameter.block // layout.blocks_per_unit if in_group else 0] += size
    return units


def _kept_gradients(facts: MemoryFacts, layout: Layout) -> float:
    """Gradients of earlier micro-batches that are still whole when the next one runs."""
    if layout.accumulation < 2:
        return 0.0
    if layout.sharded and layout.sync_each:
        return 0.0 if layout.offload else facts.trainable_bytes / layout.shard_group
    return float(facts.trainable_bytes)


def _old_buckets(facts: MemoryFacts, layout: Layout) -> float:
    """As much again as DDP's gradients, as was measured in most visits (H100, H200, torch 2.11).

    Very likely its first step's buckets, in the second: it makes them anew between these, and NCCL
    lets go of the old ones with its next collective; or before, which may be the other visits.
    """
    return 0.0 if layout.sharded else float(facts.trainable_bytes)


def _reduce_ratio(facts: MemoryFacts, layout: Layout) -> float:
    """Bytes of the float32 input of a reduction for a byte of the unit's gradient."""
    if layout.precision != "policy" or facts.cast_bytes is None:
        return 1.0
    return 4.0 / facts.cast_bytes


def _updated(rest: AtRest) -> float:
    """Temporary tensors of an optimizer that walks over lists: one for each element updated."""
    return rest.optimizer / 2
