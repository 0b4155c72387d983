"""Describe a job's memory in a process of its own: ``python -m perfsearch.training.memory_probe``.

Reads a JSON object with ``workload``, ``seed``, ``device`` from standard input, and writes one with
the facts to standard output. No device is touched and no weight initialised: how many bytes a
step's activations take is found on tensors without storage.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from perfsearch.training.checkpointing import CheckpointedBlocks
from perfsearch.workloads.base import Job, copy_job, empty_on

LIMIT_S = 120
"""Seconds after which it ends itself, whatever the user's code does."""

_PROBE_SHAPE = (8, 8)
_PAIRS = ((1, 2), (2, 3))
"""Micro-batches whose difference tells the growth; the second where one sample alone is refused, as
by batch normalisation without further dimensions."""

_LARGE = 256
"""A micro-batch in which activations outweigh what a step holds beside them for a while, such as
the gradient of a large matrix. Growth is told there, too; the most that is held is on the higher of
both lines."""

_NEGLIGIBLE = 0.01
"""Of the growth with one sample: where no more than this does not grow, large micro-batches need no
count of their own."""

_LARGE_BYTES = 2**28
"""What the samples of one may take on the host, where they are collated."""

_SPACINGS = (0, 1)
"""Checkpointing of no block and of every block; others lie between, by their share of blocks."""


def main() -> int:
    """Answer one request."""
    signal.alarm(LIMIT_S)
    request = json.load(sys.stdin)
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what user code prints must not mix with the answer
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

    from perfsearch.workloads.spec import WorkloadSpec

    torch.set_num_threads(1)
    torch.manual_seed(request["seed"])
    workload = WorkloadSpec(**request["workload"])
    module = importlib.import_module(f"perfsearch.workloads.{workload.name}")
    with parameters_on_meta():
        job = module.build(workload, request["seed"])
    json.dump(describe_job(job, request["device"]), answer)
    answer.flush()
    return 0


def describe_job(job: Job, device: str) -> dict[str, Any]:
    """The tensors of a job and what a step of it holds; ``metrics.memory_facts`` reads this.

    Args:
        job: its model may be on ``meta``.
        device: type of the device that it is to train on; decides on mixed precision.

    """
    dtype = job.autocast_dtype.get(device)
    return {
        "parameters": _parameters(job),
        "buffer_bytes": sum(b.numel() * b.element_size() for b in job.model.buffers()),
        "blocks": len(job.blocks),
        "block_class": type(job.blocks[0]).__name__ if job.blocks else "",
        "optimizer_bytes": _optimizer_bytes(job),
        "cast_bytes": None if dtype is None else dtype.itemsize,
        **_activations(job, dtype),
    }


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Let modules that are built inside keep shapes only, so that a large one costs nothing.

    Buffers and everything else that a factory makes stay what they are.
    """
    own = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        own(module, name, parameter)

    nn.Module.register_parameter = register
    try:
        yield
    finally:
        nn.Module.register_parameter = own


def _parameters(job: Job) -> list[dict[str, Any]]:
    """Each parameter once, however often it is used."""
    block_of = {
        id(parameter): number
        for number, block in enumerate(job.blocks)
        for parameter in block.parameters()
    }
    return [
        {
            "shape": list(parameter.shape),
            "item_bytes": parameter.element_size(),
            "trainable": parameter.requires_grad,
            "block": block_of.get(id(parameter), -1),
        }
        for parameter in job.model.parameters()
    ]


def _optimizer_bytes(job: Job) -> dict[str, float]:
    """Bytes of optimizer state for an element of a parameter, by the parameter's item size.

    Found by one step on a small parameter; what does not grow with it (a count of steps) is left
    out.
    """
    found: dict[str, float] = {}
    for dtype in {p.dtype for p in job.model.parameters() if p.requires_grad}:
        probe = nn.Parameter(torch.ones(_PROBE_SHAPE, dtype=dtype))
        optimizer = job.optimizer([probe])
        probe.grad = torch.ones_like(probe)
        optimizer.step()
        state = [v for v in optimizer.state[probe].values() if isinstance(v, torch.Tensor)]
        held = sum(v.numel() * v.element_size() for v in state if v.numel() >= probe.numel())
        found[str(dtype.itemsize)] = held / probe.numel()
    return found


def _activations(job: Job, dtype: torch.dtype | None) -> dict[str, Any]:
    """Bytes of activations as ``fixed + slope x micro-batch``, by precision and spacing.

    A job that cannot run without real tensors has none of these; then ``activation_error`` says
    why, and only measured steps can tell.
    """
    errors = []
    for pair in _PAIRS:
        try:
            small = _growth(job, dtype, pair)
            most = _largest(job)
            bent = {kind: line for kind, line in small.items() if _may_bend(line)}
            large = small
            if bent and most // 2 > pair[1]:
                large = {**small, **_growth(job, dtype, (most // 2, most), bent)}
        except Exception as error:  # whatever user code does on tensors without values
            errors.append(f"{type(error).__name__}: {error}")
            continue
        return {"activations": small, "activations_large": large, "activation_error": ""}
    return {"activations": {}, "activations_large": {}, "activation_error": errors[0]}


def _may_bend(line: tuple[float, float]) -> bool:
    """Whether growth may be steeper for large micro-batches.

    What does not grow is never below 0, so that another moment of the step, smaller for one sample
    and steeper, is steeper by no more than what does not grow at this one.
    """
    fixed, slope = line
    return fixed > _NEGLIGIBLE * slope


def _largest(job: Job) -> int:
    """The micro-batch at which growth is told for large ones."""
    sample = [t for t in tree_leaves(job.data[0]) if isinstance(t, torch.Tensor)]
    held: int = sum(t.numel() * t.element_size() for t in sample)
    return min(_LARGE, _LARGE_BYTES // max(1, held))


def _growth(
    job: Job,
    dtype: torch.dtype | None,
    pair: tuple[int, int],
    kinds: Collection[str] | None = None,
) -> dict[str, tuple[float, float]]:
    """The line through two micro-batches: bytes that do not and that do grow with each sample.

    Of each kind, ``precision/spacing``; ``kinds`` are those that are wanted, by default all.
    """
    table: dict[str, tuple[float, float]] = {}
    precisions = ("none",) if dtype is None else ("autocast", "policy")
    for precision, every in product(precisions, _SPACINGS if job.blocks else (0,)):
        kind = f"{precision}/{every}"
        if kinds is not None and kind not in kinds:
            continue
        less, more = (peak_bytes(job, m, every, precision, dtype) for m in pair)
        slope = (more - less) / (pair[1] - pair[0])
        table[kind] = less - pair[0] * slope, slope
    return table


# -----------------------------------------------------------------------------
# Bytes that a step holds, counted on torch's ``meta`` device.
#
# Operations compute shapes only there, and every storage that appears is counted for as long as it
# lives. Autocast and attention kernels exist on real devices only, so both are imitated: casts as
# autocast's lists order them, and an attention that saves what the memory-efficient kernels save
# (Dao et al. 2022: no matrix of scores). So is a norm that GPUs have a kernel of its own for, which
# saves less than its composition.


def peak_bytes(
    job: Job, micro_batch: int, checkpoint_every: int, precision: str, dtype: torch.dtype | None
) -> int:
    """The most that one forward and backward pass holds beside parameters and their gradients.

    Args:
        job: on any device; its model's values are not read.
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


if __name__ == "__main__":
    sys.exit(main())
