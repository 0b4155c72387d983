"""How many bytes a step's activations take, found on tensors without storage.

The step runs on torch's ``meta`` device, where operations compute shapes only, and every storage
that appears is counted for as long as it lives. Autocast and attention kernels exist on real
devices only, so both are imitated: casts as autocast's lists order them, and an attention that
saves what the memory-efficient kernels save (Dao et al. 2022: no matrix of scores). So is a norm
that GPUs have a kernel of its own for, which saves less than its composition.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from perfsearch.parallel.checkpointing import CheckpointedBlocks
from perfsearch.workloads.base import Job
from perfsearch.workloads.copying import copy_job, empty_on

_LOWER = frozenset(
    {
        functional.linear,
        functional.bilinear,
        torch.conv1d,
        torch.conv2d,
        torch.conv3d,
        torch.conv_transpose2d,
        torch.matmul,
        torch.mm,
        torch.bmm,
        torch.mv,
        torch.addmm,
        torch.baddbmm,
        torch.einsum,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
        torch.Tensor.mm,
        torch.Tensor.bmm,
    }
)
_FULL = frozenset(
    {
        functional.layer_norm,
        functional.group_norm,
        functional.softmax,
        functional.log_softmax,
        functional.cross_entropy,
        functional.nll_loss,
        functional.mse_loss,
        functional.binary_cross_entropy_with_logits,
        torch.softmax,
        torch.log_softmax,
        torch.exp,
        torch.log,
        torch.pow,
        torch.sum,
        torch.Tensor.softmax,
        torch.Tensor.exp,
        torch.Tensor.pow,
        torch.Tensor.sum,
    }
)


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """Saves query, key, value, the result and a number a row, as the fused kernels do."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any) -> torch.Tensor:
        shape = (*query.shape[:-1], value.shape[-1])
        # heads are the third dimension in memory, so that joining them again copies nothing
        out = query.new_empty(shape[0], shape[2], shape[1], shape[3]).transpose(1, 2)
        rows = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, rows)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class _RmsNorm(torch.autograd.Function):  # type: ignore[misc]
    """Saves the input and a number a row, as the fused kernel does; off GPUs torch composes it."""

    @staticmethod
    def forward(ctx: Any, rows: Any, weight: Any, dimensions: int) -> torch.Tensor:
        scales = rows.new_empty(rows.shape[: rows.dim() - dimensions], dtype=torch.float32)
        ctx.save_for_backward(rows, weight, scales)
        return torch.empty_like(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight, _ = ctx.saved_tensors
        return torch.empty_like(rows), None if weight is None else torch.empty_like(weight), None


def _normed_at_once(
    rows: torch.Tensor, shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor | None:
    """What the fused kernel gives; ``None`` where torch would compose the norm on a GPU, too."""
    if not hasattr(torch.ops.aten, "_fused_rms_norm_backward"):  # an older torch
        return None
    if weight is not None and weight.dtype != rows.dtype:
        return None
    normed: torch.Tensor = _RmsNorm.apply(rows, weight, len(shape))
    return normed


class _Imitation(TorchFunctionMode):  # type: ignore[misc]
    """Autocast to ``dtype`` (none where ``None``), and kernels that only real devices have."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self._dtype = dtype
        self._weights: dict[int, torch.Tensor] = {}

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._weights.clear()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = dict(kwargs or {})
        attention = func is functional.scaled_dot_product_attention
        if self._dtype is not None and (attention or func in _LOWER):
            args, named = self._cast(args, self._dtype), self._cast(named, self._dtype)
        elif self._dtype is not None and func in _FULL:
            args, named = self._cast(args, torch.float32), self._cast(named, torch.float32)
        if attention and args[0].dim() == 4:
            return _Attention.apply(*args[:3])
        if func is functional.rms_norm:
            normed = _normed_at_once(*args, **named)
            if normed is not None:
                return normed
        return func(*args, **named)

    def _cast(self, values: Any, dtype: torch.dtype) -> Any:
        def cast(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point() or tensor.dtype == dtype:
                return tensor
            if not isinstance(tensor, nn.Parameter) or dtype == torch.float32:
                return tensor.to(dtype)
            if id(tensor) not in self._weights:  # autocast keeps these until it ends
                self._weights[id(tensor)] = tensor.to(dtype)
            return self._weights[id(tensor)]

        return tree_map_only(torch.Tensor, cast, values)


class _LiveBytes(TorchDispatchMode):  # type: ignore[misc]
    """Bytes of the storages that came into being and still live, and the most there were."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._note, result)
        return result

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._seen:
            self._seen.add(key)
            size = storage.nbytes()
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._forget, key, size)
        return tensor

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


def peak_bytes(
    job: Job, micro_batch: int, checkpoint_every: int, precision: str, dtype: torch.dtype | None
) -> int:
    """The most that one forward and backward pass holds beside parameters and their gradients.

    Args:
        job: on any device; its model's values are not looked at.
        micro_batch: samples.
        checkpoint_every: spacing of checkpointed blocks, 0 for none.
        precision: ``autocast``: casts operation by operation; ``policy``: parameters and inputs
            are cast as a whole.
        dtype: what is cast to; ``None`` casts nothing.

    """
    dummy = copy_job(job, _meta_place(dtype if precision == "policy" else None))
    batch = _meta_batch(job, micro_batch, dtype if precision == "policy" else None)
    known = [*dummy.model.parameters(), *dummy.model.buffers(), *_tensors(batch)]
    for parameter in dummy.model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
    counter = _LiveBytes(known)
    imitation = _Imitation(dtype if precision == "autocast" else None)

    def contexts() -> tuple[Any, Any]:
        # backward() itself is a function that a mode steps aside for, so it is entered again
        return nullcontext(), imitation

    CheckpointedBlocks(dummy.blocks, checkpoint_every, False, contexts)
    with counter:
        with imitation:
            loss = dummy.loss(dummy.model, batch)
        loss.backward()
    return counter.peak


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _meta_place(dtype: torch.dtype | None) -> Callable[[torch.Tensor], torch.Tensor]:
    plain = empty_on("meta")

    def place(tensor: torch.Tensor) -> torch.Tensor:
        made = plain(tensor)
        return made.to(dtype) if dtype is not None and made.is_floating_point() else made

    return place


def _meta_batch(job: Job, size: int, dtype: torch.dtype | None) -> Any:
    from torch.utils.data import default_collate

    samples = [job.data[0]] * size
    batch = (job.collate or default_collate)(samples)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.to("meta")
        return made.to(dtype) if dtype is not None and made.is_floating_point() else made

    return tree_map_only(torch.Tensor, move, batch)


def _tensors(nested: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, found.append, nested)
    return found
