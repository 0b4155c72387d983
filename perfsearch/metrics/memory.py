"""Predicted memory of a configuration, corrected by every trial.

The arithmetic of ``peak_bytes`` is the expectation. Measured peaks correct it through a Bayesian
linear regression with few, tightly bounded terms: what wrappers hold, what is gathered, and the
size of activations, each shared between the configurations that it concerns. So two
neighbouring trials cannot swing a prediction far away from them, and a trial of one stage teaches
something about the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from perfsearch.core.units import GIB

MARGIN_DEVIATIONS = 2.0
"""The stated margin: so many standard deviations to either side."""

_UNKNOWN_SLOPE_GIB = 4.0
"""How uncertain the growth with each sample is where nothing is known of activations."""


@dataclass(frozen=True)
class Observation:
    """What a trial tells of memory.

    Attributes:
        layout: of its configuration.
        peak_gib: measured; ``None`` where it ran out of memory.

    """

    layout: Layout
    peak_gib: float | None


@dataclass(frozen=True)
class Estimate:
    """What is expected of a configuration, in GiB.

    Attributes:
        at_rest_gib: between steps, gradients included.
        peak_gib: the most during a step.
        low_gib: the peak is hardly less.
        high_gib: the peak is hardly more.

    """

    at_rest_gib: float
    peak_gib: float
    low_gib: float
    high_gib: float


class Terms:
    """The arithmetic of a job's configurations, each worked out once for any number of models.

    Args:
        facts: of the job.

    """

    def __init__(self, facts: MemoryFacts) -> None:
        self.facts = facts
        self._known: dict[Layout, tuple[Peak, np.ndarray, float]] = {}

    def of(self, layout: Layout) -> tuple[Peak, np.ndarray, float]:
        """The expected peak, the terms that correct it, and a reading's own deviation in GiB.

        Terms are in units of their prior standard deviation.
        """
        if layout not in self._known:
            found = peak_bytes(self.facts, layout)
            self._known[layout] = found, self._terms(layout, found), self._noise(layout, found)
        return self._known[layout]

    def _terms(self, layout: Layout, found: Peak) -> np.ndarray:
        gradients = self.facts.trainable_bytes / GIB
        wrapped = 0.0 if layout.sharded else 0.5 * gradients
        gathered = 0.3 * found.gathered / GIB
        if found.activations is None:
            growth = _UNKNOWN_SLOPE_GIB * layout.micro_batch
            checkpointed = growth if layout.checkpoint_every else 0.0
            return np.array([0.3, wrapped, gathered, growth, 0.0, checkpointed])
        growth = found.activations / GIB if found.activations_decide else 0.0
        return np.array(
            [
                0.2 + 0.02 * self.facts.parameter_bytes / GIB,
                wrapped,
                gathered,
                0.08 * growth,
                0.0 if layout.sharded else 0.05 * growth,
                0.10 * growth if layout.checkpoint_every else 0.0,
            ]
        )

    def _noise(self, layout: Layout, found: Peak) -> float:
        wrapped = 0.0 if layout.sharded else 0.25 * self.facts.trainable_bytes / GIB
        blind = 0.1 * _UNKNOWN_SLOPE_GIB * layout.micro_batch if found.activations is None else 0.0
        return 0.1 + 0.02 * found.total / GIB + wrapped + blind


class MemoryModel:
    """Expected peaks after some observations; it does not change.

    Args:
        terms: the arithmetic of the job.
        observations: of trials so far.
        capacity_gib: what a device holds; a trial that ran out of memory is taken to have needed
            somewhat more.

    """

    def __init__(
        self,
        terms: Terms,
        observations: Sequence[Observation] = (),
        capacity_gib: float | None = None,
    ) -> None:
        self._terms = terms
        self.capacity_gib = capacity_gib
        self._failed = [o.layout for o in observations if o.peak_gib is None]
        rows = [(o.layout, o.peak_gib) for o in observations if o.peak_gib is not None]
        self._mean, self._covariance = self._fit(rows)
        beyond = [
            (layout, 1.02 * capacity_gib)
            for layout in self._failed
            if capacity_gib is not None and self.predict(layout).peak_gib < capacity_gib
        ]
        if beyond:
            self._mean, self._covariance = self._fit([*rows, *beyond])

    def predict(self, layout: Layout) -> Estimate:
        """What to expect of a configuration."""
        found, terms, noise = self._terms.of(layout)
        mean = found.total / GIB + float(terms @ self._mean)
        variance = float(terms @ self._covariance @ terms) + noise**2
        margin = MARGIN_DEVIATIONS * variance**0.5
        floor = (found.rest.total - found.rest.gradients) / GIB
        mean = max(mean, floor)
        return Estimate(found.rest.total / GIB, mean, max(floor, mean - margin), mean + margin)

    def dominated(self, layout: Layout) -> Layout | None:
        """A configuration that ran out of memory and differs in having no larger micro-batch."""
        for failed in self._failed:
            if failed.micro_batch <= layout.micro_batch and _alike(failed, layout):
                return failed
        return None

    def surely_too_large(self, layout: Layout) -> str:
        """Why a configuration cannot fit, in words; empty where it may."""
        failed = self.dominated(layout)
        if failed is not None:
            return f"micro_batch={failed.micro_batch} ran out of memory with the same other values"
        if self.capacity_gib is None:
            return ""
        estimate = self.predict(layout)
        if estimate.low_gib > self.capacity_gib:
            return (
                f"needs about {estimate.peak_gib:.1f} GiB (surely {estimate.low_gib:.1f}), "
                f"{self.capacity_gib:.1f} GiB are there"
            )
        return ""

    def _fit(self, rows: Sequence[tuple[Layout, float]]) -> tuple[np.ndarray, np.ndarray]:
        """Posterior mean and covariance of the corrections, whose prior is a unit Gaussian."""
        size = 6
        precision, weighted = np.eye(size), np.zeros(size)
        for layout, measured in rows:
            found, terms, noise = self._terms.of(layout)
            residual = measured - found.total / GIB
            precision += np.outer(terms, terms) / noise**2
            weighted += terms * residual / noise**2
        covariance = np.linalg.inv(precision)
        return covariance @ weighted, covariance


def _alike(one: Layout, other: Layout) -> bool:
    """Whether they differ in micro-batch and accumulation only, one accumulating where both do."""
    moved = replace(one, micro_batch=other.micro_batch, accumulation=other.accumulation)
    return moved == other and (one.accumulation < 2 or other.accumulation >= 2)


# -----------------------------------------------------------------------------
# What is known of a job's tensors, and how a configuration lays them out. Plain values only.


@dataclass(frozen=True)
class Parameter:
    """One parameter, counted once however often the model uses it.

    Attributes:
        shape: of the whole tensor.
        item_bytes: of one element.
        trainable: whether it has a gradient and optimizer state.
        block: number of the block that it belongs to; -1 for none.

    """

    shape: tuple[int, ...]
    item_bytes: int
    trainable: bool = True
    block: int = -1

    @property
    def elements(self) -> int:
        """Of the whole tensor."""
        return prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes of the whole tensor."""
        return self.elements * self.item_bytes

    def shard_elements(self, shards: int) -> int:
        """Elements of the largest shard when the first dimension is cut into ``shards``."""
        if not self.shape:
            return 1
        return -(-self.shape[0] // shards) * prod(self.shape[1:])


@dataclass(frozen=True)
class MemoryFacts:
    """A job's tensors, and what a step of it holds beside them.

    Attributes:
        parameters: each once.
        buffer_bytes: of all buffers.
        blocks: number of repeated blocks.
        block_class: name of their class.
        optimizer_bytes: bytes of state an element, by the parameter's item size.
        cast_bytes: item size that mixed precision computes in; ``None`` without.
        activations: ``precision/spacing`` to bytes that do not and that do grow with the
            micro-batch (for each sample), at the moment of the largest sum; for small ones.
        activations_large: the same for large micro-batches, where that may be another moment.
        activation_error: why ``activations`` is empty.

    """

    parameters: tuple[Parameter, ...]
    buffer_bytes: int = 0
    blocks: int = 0
    block_class: str = ""
    optimizer_bytes: Mapping[int, float] = field(default_factory=lambda: {4: 8.0})
    cast_bytes: int | None = None
    activations: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    activation_error: str = ""
    activations_large: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> MemoryFacts:
        """Rebuild it from what ``perfsearch.training.memory_probe`` described."""
        return cls(
            parameters=tuple(
                Parameter(tuple(p["shape"]), p["item_bytes"], p["trainable"], p["block"])
                for p in record["parameters"]
            ),
            buffer_bytes=record["buffer_bytes"],
            blocks=record["blocks"],
            block_class=record["block_class"],
            optimizer_bytes={int(k): float(v) for k, v in record["optimizer_bytes"].items()},
            cast_bytes=record["cast_bytes"],
            activations={k: (v[0], v[1]) for k, v in record["activations"].items()},
            activation_error=record["activation_error"],
            activations_large={
                k: (v[0], v[1]) for k, v in record.get("activations_large", {}).items()
            },
        )

    @cached_property
    def parameter_bytes(self) -> int:
        """Of the whole model."""
        return sum(p.size for p in self.parameters)

    @cached_property
    def trainable_bytes(self) -> int:
        """Of what has gradients."""
        return sum(p.size for p in self.parameters if p.trainable)

    def activation_bytes(
        self, precision: str, every: int, micro_batch: int
    ) -> tuple[float, float] | None:
        """Bytes that do not and that do grow with the micro-batch; ``None`` where not known.

        Args:
            precision: ``none``, ``autocast`` or ``policy``.
            every: spacing of checkpointed blocks.
            micro_batch: samples, which the second part is for.

        """
        lines = [
            line
            for table in (self.activations, self.activations_large)
            if (line := self._line(table, precision, every)) is not None
        ]
        if not lines:
            return None
        sizes = [(fixed, slope * micro_batch) for fixed, slope in lines]
        return max(sizes, key=sum)

    def _line(
        self, table: Mapping[str, tuple[float, float]], precision: str, every: int
    ) -> tuple[float, float] | None:
        """Of a table, between those without and with every block checkpointed."""
        plain = table.get(f"{precision}/0")
        whole = table.get(f"{precision}/1", plain)
        if plain is None or whole is None:
            return None
        share = (self.blocks // every) / self.blocks if every and self.blocks else 0.0
        low, high = (p + share * (w - p) for p, w in zip(plain, whole, strict=True))
        return low, high


@dataclass(frozen=True)
class Layout:
    """A configuration as the memory model sees it.

    Attributes:
        stage: ZeRO stage.
        world_size: ranks.
        micro_batch: samples of one forward pass.
        accumulation: micro-batches of a step.
        shard_group: ranks that one copy of the model is spread over, in stages 2 and 3.
        checkpoint_every: spacing of checkpointed blocks, 0 for none.
        blocks_per_unit: blocks that are gathered together.
        reshard_group: ranks that parameters are spread over between forward and backward, in
            stage 3; 0 for the whole shard group.
        prefetch: units that are gathered ahead beyond the library's own.
        sync_each: whether gradients are reduced after every micro-batch.
        offload: whether what is at rest lies in the host's memory.
        precision: ``none``, ``autocast`` or ``policy``.
        bucket_view: whether gradients are views into the buckets of stages 0 and 1.
        fused: whether the optimizer needs no temporary tensors.

    """

    stage: int
    world_size: int
    micro_batch: int
    accumulation: int = 1
    shard_group: int = 1
    checkpoint_every: int = 0
    blocks_per_unit: int = 1
    reshard_group: int = 0
    prefetch: int = 0
    sync_each: bool = False
    offload: bool = False
    precision: str = "none"
    bucket_view: bool = False
    fused: bool = False

    @property
    def sharded(self) -> bool:
        """Whether parameters themselves are spread over ranks."""
        return self.stage >= 2


# -----------------------------------------------------------------------------
# The most that a rank holds while it trains, by arithmetic alone.
#
# There are two moments to compare. When the backward pass begins, every activation is there and
# no gradient; when it ends, every gradient is there and no activation.

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


def peak_bytes(facts: MemoryFacts, layout: Layout) -> Peak:
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


# -----------------------------------------------------------------------------
# Bytes that a rank holds between two steps, from the shapes of the model's tensors.
#
# The stages are those of ZeRO (Rajbhandari et al. 2020) as torch builds them: 0 keeps
# everything, 1 spreads optimizer state by whole parameters, 2 and 3 spread every tensor by its
# first dimension, and differ only while a step runs.


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
