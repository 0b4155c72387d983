"""What is known of a job's tensors, and how a configuration lays them out. Plain values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

GIB = 2.0**30


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
        """Rebuild it from what ``parallel.facts.describe`` gave."""
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
