"""The same batches in every trial, whatever loads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from perfsearch.parallel.base import LoaderOptions
from perfsearch.workloads.base import Job


class RankBatches(Sampler[list[int]]):  # type: ignore[misc]
    """Indices of one rank's micro-batches, without end.

    Step ``s`` trains entries ``[s * global_batch, (s + 1) * global_batch)`` of an endless sequence
    of shuffled epochs; each rank takes a contiguous share of them, in micro-batches. So the
    samples of a step do not depend on knobs.

    Args:
        samples: size of the dataset.
        global_batch: samples a step over all ranks.
        rank: whose share.
        world_size: how many share.
        micro_batch: indices given at once; a divisor of the share.
        seed: of the shuffling.

    Raises:
        ValueError: the batch cannot be shared out evenly.

    """

    def __init__(
        self,
        samples: int,
        global_batch: int,
        rank: int,
        world_size: int,
        micro_batch: int,
        seed: int,
    ) -> None:
        share, rest = divmod(global_batch, world_size)
        if rest or share % micro_batch:
            raise ValueError(
                f"a global batch of {global_batch} cannot be shared by {world_size} ranks in "
                f"micro-batches of {micro_batch}"
            )
        if samples < 1:
            raise ValueError("the dataset is empty")
        self._samples = samples
        self._global_batch = global_batch
        self._first = rank * share
        self._micro = micro_batch
        self._share = share
        self._seed = seed

    def __iter__(self) -> Iterator[list[int]]:
        start = self._first
        while True:
            for offset in range(0, self._share, self._micro):
                yield self._indices(start + offset, self._micro)
            start += self._global_batch

    def _indices(self, place: int, count: int) -> list[int]:
        """Entries of the endless sequence, cut out whole: this is the host's time in each step."""
        found: list[int] = []
        while len(found) < count:
            epoch, within = divmod(place + len(found), self._samples)
            found += self._order(epoch)[within : within + count - len(found)].tolist()
        return found

    def _order(self, epoch: int) -> torch.Tensor:
        if getattr(self, "_epoch", None) != epoch:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            self._epoch = epoch
            self._permutation = torch.randperm(self._samples, generator=generator)
        return self._permutation


def make_loader(
    job: Job, options: LoaderOptions, global_batch: int, rank: int, world_size: int, seed: int
) -> DataLoader[Any]:
    """A loader at the start of the data; its worker seeds are the same in every trial."""
    batches = RankBatches(
        len(job.data),  # type: ignore[arg-type]
        global_batch,
        rank,
        world_size,
        options.micro_batch,
        seed,
    )
    workers: dict[str, Any] = {}
    if options.workers:
        workers = {"prefetch_factor": options.prefetch_factor, "worker_init_fn": job.worker_init}
    return DataLoader(
        job.data,
        batch_sampler=batches,
        num_workers=options.workers,
        pin_memory=options.pin_memory,
        collate_fn=job.collate,
        generator=torch.Generator().manual_seed(seed + rank),
        **workers,
    )


def to_device(
    batch: Any, device: torch.device, non_blocking: bool, channels_last: bool = False
) -> Any:
    """Copy each tensor of a nested batch; images also take the layout of the model."""
    if isinstance(batch, torch.Tensor):
        moved = batch.to(device, non_blocking=non_blocking)
        if channels_last and moved.dim() == 4:
            moved = moved.contiguous(memory_format=torch.channels_last)
        return moved
    move: Callable[[Any], Any] = lambda part: to_device(part, device, non_blocking, channels_last)  # noqa: E731
    if isinstance(batch, dict):
        return {key: move(part) for key, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(part) for part in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(move(part) for part in batch)
    return batch
