"""ZeRO stages, micro-batches and checkpointing from knobs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from perfsearch.core.knob import Value
from perfsearch.parallel.backward import run_backward
from perfsearch.parallel.base import BuildContext, LoaderOptions, Mark, NextBatch, TrainStep
from perfsearch.parallel.checkpointing import CheckpointedBlocks
from perfsearch.parallel.optimizers import DEFAULT, implementation_of
from perfsearch.parallel.replication import ReplicatedModel
from perfsearch.parallel.residence import resident
from perfsearch.parallel.sharding import ShardedModel, Sharding
from perfsearch.parallel.survival import longest_batch, save_checkpoint

_GIB = 2.0**30


class ZeroStep(TrainStep):
    """Micro-batches forward and backward, one reduction of gradients, optimizer."""

    def __init__(self, context: BuildContext) -> None:
        configuration = context.configuration
        self._configuration = configuration
        self._device = context.device
        stage = int(configuration["zero_stage"] or 0)
        self._micro_batch = int(configuration["micro_batch"] or context.local_batch)
        self._accumulation, rest = divmod(context.local_batch, self._micro_batch)
        if rest:
            raise ValueError(
                f"micro_batch={self._micro_batch}: a rank's {context.local_batch} samples cannot "
                "be cut into such"
            )
        self.loader = LoaderOptions(micro_batch=self._micro_batch)
        # shards are cut from the host's copy, so the whole model need not fit on the device
        self.job = context.job(True) if stage < 2 else context.host_job()
        dtype = self.job.autocast_dtype.get(self._device.type)
        self._by_policy = stage >= 2 and configuration.get("mixed_precision") != "autocast"
        every = int(configuration.get("activation_checkpointing") or 0)
        self._checkpointing = CheckpointedBlocks(self.job.blocks, every)
        self._wrapped: ReplicatedModel | ShardedModel
        if stage < 2:
            self._wrapped = ReplicatedModel(self.job, configuration, self._device)
        else:
            sharding = _sharding(configuration, context.groups.world_size, stage)
            if self._by_policy:
                sharding = _with_dtype(sharding, dtype)
            implementation = configuration.get("optimizer_implementation")
            self._wrapped = ShardedModel(self.job, sharding, context.groups, implementation)
        self.net = self._wrapped.net
        self.optimizer = self._wrapped.optimizer
        self._autocast: dict[str, Any] = {
            "device_type": self._device.type,
            "dtype": dtype,
            "enabled": dtype is not None and not self._by_policy,
        }
        self._steps = 0
        self._seen_batch: int | None = None
        self._forwards = 0
        # in the other stages gathering waits all over the step, which only the kernels show
        self.marks_communication = isinstance(self._wrapped, ReplicatedModel)
        self._alone = False
        self._evidence: dict[str, float] = {}

    def run(self, next_batch: NextBatch, mark: Mark) -> torch.Tensor:
        """Train one global batch; the mean over micro-batches is that over all its samples."""
        losses = []
        for number in range(self._accumulation):
            batch = next_batch()
            losses.append(self._micro_step(batch, number + 1 == self._accumulation, mark))
        if self._steps == 0:
            leaves = [t for t in tree_leaves(batch) if isinstance(t, torch.Tensor) and t.dim()]
            self._seen_batch = leaves[0].shape[0] if leaves else None
            self._forwards = len(losses)
        self.optimizer.step()
        self._steps += 1
        if self._steps == 2:
            self._look()
        self.optimizer.zero_grad(set_to_none=True)
        mark("optimizer")
        return torch.stack(losses).mean()

    def _micro_step(self, batch: Any, last: bool, mark: Mark) -> torch.Tensor:
        with self._wrapped.accumulating(last and not self._alone):
            with torch.autocast(**self._autocast):
                loss = self.job.loss(self.net, batch)
            if self._steps == 0:
                self._wrapped.after_first_forward()
            mark("forward")
            scaled = loss / self._accumulation if self._accumulation > 1 else loss
            run_backward(scaled, mark, self.marks_communication and last)
        return loss.detach()

    def _look(self) -> None:
        """Take stock of what is held when the optimizer has stepped and gradients are there."""
        held = resident(self.job.model, self.optimizer, self._device)
        self._evidence = {f"resident_{name}_gib": size / _GIB for name, size in held.items()}
        if self._device.type == "cuda":
            allocated = torch.cuda.memory_allocated(self._device)
            self._evidence["at_rest_allocated_gib"] = allocated / _GIB

    def in_force(self) -> dict[str, Value]:
        """Read back from wrappers, blocks, the optimizer, and the batches that came."""
        found = {
            "micro_batch": self.loader.micro_batch,
            "micro_batch_seen": self._seen_batch,
            "gradient_accumulation": self._forwards,
            "activation_checkpointing": self._checkpointing.every,
            "optimizer_implementation": self._optimizer_in_force(),
            **self._wrapped.in_force(),
        }
        return {name: value for name, value in found.items() if value is not None}

    def _optimizer_in_force(self) -> Value:
        asked = self._configuration.get("optimizer_implementation")
        if asked in (None, DEFAULT):
            return DEFAULT
        return implementation_of(getattr(self.optimizer, "optim", self.optimizer))

    def evidence(self) -> dict[str, float]:
        """GiB that lie on the device between steps, from the tensors and from the allocator."""
        return self._evidence

    def alone(self) -> AbstractContextManager[Any] | None:
        """Leave out the all-reduces of stages 0 and 1."""
        return self._unsynchronised() if isinstance(self._wrapped, ReplicatedModel) else None

    @contextmanager
    def _unsynchronised(self) -> Iterator[None]:
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    def survive(self) -> None:
        """Train on the longest batch that the data can give, and make a checkpoint."""
        batch = longest_batch(self.job, self._micro_batch, self._device)
        for number in range(self._accumulation):
            self._micro_step(batch, number + 1 == self._accumulation, lambda phase: None)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        written = save_checkpoint(self.net, self.optimizer)
        print(f"survived its longest batch and a checkpoint of {written} B", flush=True)

    def close(self) -> None:
        """Undo what was done to a model that is used again."""
        self._checkpointing.undo()
        self._wrapped.close()


def _sharding(configuration: Mapping[str, Value], world_size: int, stage: int) -> Sharding:
    def number(name: str) -> int:
        return int(configuration.get(name) or 0)

    return Sharding(
        reshard=False if stage == 2 else number("reshard_group_size") or True,
        shard_group=number("shard_group_size") or world_size,
        blocks_per_unit=number("blocks_per_unit") or 1,
        forward_prefetch=number("forward_prefetch"),
        backward_prefetch=number("backward_prefetch"),
        sync_each=bool(configuration.get("gradient_sync_each")),
        offload=bool(configuration.get("cpu_offload")),
    )


def _with_dtype(sharding: Sharding, dtype: torch.dtype | None) -> Sharding:
    from dataclasses import replace

    return replace(sharding, dtype=dtype)


def build(context: BuildContext) -> ZeroStep:
    """Put the configuration into force."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, message=".*broadcast_buffers.*")
        return ZeroStep(context)
