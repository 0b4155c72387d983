"""Put a rank back to the state that every trial starts from."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch

_CHUNK_BYTES = 2**28
"""Page-locked memory is taken in pieces of this size; torch rounds each up to a power of two."""

_ALIGNMENT = 64


class Snapshot:
    """Weights, buffers and flags of a model, kept on the host.

    Memory formats are kept, so that ``channels_last`` of one trial does not reach the next.

    Args:
        model: in the state to keep.
        leaving: the model is on its way from the host to a GPU, so its tensors themselves are
            kept. They become page-locked when they are first restored, from where a GPU copies
            several times as fast: a process of one trial never needs that.

    """

    def __init__(self, model: torch.nn.Module, leaving: bool = False) -> None:
        self._to_pin = leaving
        self._tensors: dict[str, torch.Tensor] = {
            name: tensor.detach().to("cpu", copy=not (leaving and tensor.device.type == "cpu"))
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
        torch.set_default_dtype(self.default_dtype)


def seed_everything(seed: int) -> None:
    """Reset each random number generator that is loaded."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
