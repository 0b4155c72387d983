"""What every trial starts from: weights, torch's switches, seeds, and the order of the data."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from perfsearch.core.knob import Value
from perfsearch.knobs import process
from perfsearch.training.base import LoaderOptions
from perfsearch.workloads.base import Job

_CHUNK_BYTES = 2**28
"""Page-locked memory is taken in pieces of this size; torch rounds each up to a power of two."""

_ALIGNMENT = 64

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class Snapshot:
    """Weights, buffers and flags of a model, kept on the host.

    Memory formats are kept, so that ``channels_last`` of one trial does not reach the next.

    Args:
        model: in the state to keep.
        to_gpu: the model is on its way from the host to a GPU, so its tensors themselves are
            kept. They become page-locked when they are first restored, from where a GPU copies
            several times as fast: a process of one trial never needs that.

    """

    def __init__(self, model: torch.nn.Module, to_gpu: bool = False) -> None:
        self._to_pin = to_gpu
        self._tensors: dict[str, torch.Tensor] = {
            name: tensor.detach().to("cpu", copy=not (to_gpu and tensor.device.type == "cpu"))
            for name, tensor in _tensors(model).items()
        }
        self._requires_grad = {name: p.requires_grad for name, p in model.named_parameters()}
        self._training = {name: module.training for name, module in model.named_modules()}

    def values_of(self, model: torch.nn.Module) -> dict[int, torch.Tensor]:
        """The kept tensors on the host, by the ``id`` of the tensor of ``model`` they are for."""
        return {id(tensor): self._tensors[name] for name, tensor in _tensors(model).items()}

    def restore(self, model: torch.nn.Module) -> None:
        """Give ``model`` back what it had, gradients gone."""
        if self._to_pin:
            self._tensors, self._to_pin = packed(self._tensors, pin=True), False
        with torch.no_grad():
            for name, tensor in _tensors(model).items():
                kept = self._tensors[name]
                if tensor.stride() != kept.stride():
                    tensor.data = torch.empty_strided(
                        kept.size(), kept.stride(), dtype=kept.dtype, device=tensor.device
                    )
                tensor.copy_(kept, non_blocking=True)
        for name, parameter in model.named_parameters():
            parameter.grad = None
            parameter.requires_grad_(self._requires_grad[name])
        for name, module in model.named_modules():
            module.training = self._training[name]


def packed(tensors: dict[str, torch.Tensor], pin: bool) -> dict[str, torch.Tensor]:
    """Copies of host tensors, in their memory formats, that share a few large allocations."""
    copies: dict[str, torch.Tensor] = {}
    chunk, used = torch.empty(0, dtype=torch.uint8), 0
    left = sum(_aligned_bytes(tensor) for tensor in tensors.values())
    for name, tensor in tensors.items():
        size = _aligned_bytes(tensor)
        if used + size > chunk.numel():
            wanted = max(size, min(left, _CHUNK_BYTES))
            chunk, used = torch.empty(wanted, dtype=torch.uint8, pin_memory=pin), 0
        strides = torch.empty_like(tensor, device="meta").stride()
        place = chunk[used : used + size].view(tensor.dtype).as_strided(tensor.size(), strides)
        copies[name] = place.copy_(tensor)
        used += size
        left -= size
    return copies


def _aligned_bytes(tensor: torch.Tensor) -> int:
    return -(-int(tensor.nbytes) // _ALIGNMENT) * _ALIGNMENT


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@dataclass(frozen=True)
class GlobalSwitches:
    """torch's settings that hold for the whole process, as the user's own code left them."""

    matmul_precision: str
    cudnn_benchmark: bool
    cudnn_deterministic: bool
    deterministic: bool
    deterministic_warn_only: bool
    threads: int
    attention: Value
    default_dtype: Any

    @classmethod
    def read(cls) -> GlobalSwitches:
        """What holds now."""
        return cls(
            matmul_precision=torch.get_float32_matmul_precision(),
            cudnn_benchmark=torch.backends.cudnn.benchmark,
            cudnn_deterministic=torch.backends.cudnn.deterministic,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            deterministic_warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            threads=torch.get_num_threads(),
            attention=process.ATTENTION.get(),
            default_dtype=torch.get_default_dtype(),
        )

    def restore(self) -> None:
        """Make them hold again."""
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
        torch.use_deterministic_algorithms(
            self.deterministic, warn_only=self.deterministic_warn_only
        )
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        process.ATTENTION.put(self.attention)
        torch.set_default_dtype(self.default_dtype)


def seed_everything(seed: int) -> None:
    """Reset each random number generator that is loaded."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


# -----------------------------------------------------------------------------
# The same batches in every trial, whatever loads them.


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
    of_workers = {"worker_init_fn": job.worker_init} if options.workers else {}
    return DataLoader(
        job.data,
        batch_sampler=batches,
        collate_fn=job.collate,
        generator=torch.Generator().manual_seed(seed + rank),
        **options.arguments,
        **of_workers,
    )


def to_device(
    batch: Any, device: torch.device, non_blocking: bool, channels_last: bool = False
) -> Any:
    """Copy each tensor of a nested batch; images also take the layout of the model."""
    if isinstance(batch, torch.Tensor):
        moved = batch.to(device, non_blocking=non_blocking)
        layout = _CHANNELS_LAST.get(moved.dim()) if channels_last else None
        return moved if layout is None else moved.contiguous(memory_format=layout)
    move: Callable[[Any], Any] = lambda part: to_device(part, device, non_blocking, channels_last)  # noqa: E731
    if isinstance(batch, dict):
        return {key: move(part) for key, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(part) for part in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(move(part) for part in batch)
    return batch
