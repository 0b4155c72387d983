"""Bytes that a rank holds between two steps, from the shapes of the model's tensors.

The stages are those of ZeRO (Rajbhandari et al. 2020) as torch builds them: 0 keeps everything, 1
spreads optimizer state by whole parameters, 2 and 3 spread every tensor by its first dimension,
and differ only while a step runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from perfsearch.metrics.memory_facts import Layout, MemoryFacts


@dataclass(frozen=True)
class AtRest:
    """Bytes on the rank that holds most, gradients of the last step included."""

    parameters: float
    gradients: float
    optimizer: float
    buffers: float
    buckets: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.buckets


def at_rest(facts: MemoryFacts, layout: Layout) -> AtRest:
    """What the fullest rank holds on its device."""
    if layout.offload:
        return AtRest(0.0, 0.0, 0.0, facts.buffer_bytes)
    if layout.sharded:
        return _sharded(facts, layout.shard_group)
    owned = partition(facts, layout.world_size if layout.stage == 1 else 1)
    return AtRest(
        parameters=facts.parameter_bytes,
        gradients=facts.trainable_bytes,
        optimizer=max(owned),
        buffers=facts.buffer_bytes,
        buckets=0.0 if layout.bucket_view else facts.trainable_bytes,
    )


def _sharded(facts: MemoryFacts, shards: int) -> AtRest:
    parameters = gradients = optimizer = 0.0
    for parameter in facts.parameters:
        elements = parameter.shard_elements(shards)
        parameters += elements * parameter.item_bytes
        if parameter.trainable:
            gradients += elements * parameter.item_bytes
            optimizer += elements * _state(facts, parameter.item_bytes)
    return AtRest(parameters, gradients, optimizer, facts.buffer_bytes)


def partition(facts: MemoryFacts, ranks: int) -> list[float]:
    """Optimizer bytes of each rank, whole parameters dealt out as ZeroRedundancyOptimizer does.

    Largest first, each to the rank that has the fewest elements so far.
    """
    elements = [0] * ranks
    held = [0.0] * ranks
    trainable = [p for p in facts.parameters if p.trainable]
    for parameter in sorted(trainable, key=lambda p: p.elements, reverse=True):
        rank = elements.index(min(elements))
        elements[rank] += parameter.elements
        held[rank] += parameter.elements * _state(facts, parameter.item_bytes)
    return held


def _state(facts: MemoryFacts, item_bytes: int) -> float:
    known = facts.optimizer_bytes
    return known.get(item_bytes, max(known.values(), default=0.0))
