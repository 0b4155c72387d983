"""Kernels of normalisations."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from perfsearch.parallel.soap.kernels import (
    Function,
    Inputs,
    Parameters,
    Piece,
    SumOver,
    alone,
    kernel,
)


@kernel("layer_norm")
def layer_norm(piece: Piece) -> Function:
    """Of whole rows."""
    shape, eps = piece["normalized_shape"], piece["eps"]

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        weight, bias = parameters.get("weight"), parameters.get("bias")
        return functional.layer_norm(inputs[0], shape, weight, bias, eps)

    return run


@kernel("rms_norm")
def rms_norm(piece: Piece) -> Function:
    """Of whole rows."""
    shape, eps = piece["normalized_shape"], piece["eps"]

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        return functional.rms_norm(inputs[0], shape, parameters.get("weight"), eps)

    return run


class _Normalised(torch.autograd.Function):  # type: ignore[misc]
    """Centred and scaled by statistics of all parts; the backward pass exchanges two sums."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor, *rest: Any
    ) -> torch.Tensor:
        sum_over, count = rest
        shape = [1, -1] + [1] * (value.dim() - 2)
        normal = (value - mean.view(shape)) * scale.view(shape)
        ctx.save_for_backward(normal, scale)
        ctx.sum_over, ctx.count = sum_over, count
        return normal

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        normal, scale = ctx.saved_tensors
        dims = [d for d in range(gradient.dim()) if d != 1]
        sums = torch.stack([gradient.sum(dims), (gradient * normal).sum(dims)])
        means = ctx.sum_over(sums) / ctx.count
        shape = [1, -1] + [1] * (gradient.dim() - 2)
        centred = gradient - means[0].view(shape) - normal * means[1].view(shape)
        return centred * scale.view(shape), None, None, None, None


def _unshared_norm(piece: Piece, kept: list[torch.Tensor]) -> Function:
    """Torch's own, where the part has all of its channels' elements."""
    eps, momentum = piece["eps"], piece["momentum"]
    mean, variance = kept if kept else (None, None)

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        weight, bias = parameters.get("weight"), parameters.get("bias")
        return functional.batch_norm(inputs[0], mean, variance, weight, bias, True, momentum, eps)

    return run


@kernel("batch_norm")
def batch_norm(piece: Piece) -> Function:
    """Statistics of the whole batch, summed over the parts in double precision."""
    eps, momentum, count = piece["eps"], piece["momentum"], piece["count"]
    sum_over: SumOver = piece.surroundings.sum_over_channels
    low, high = piece.rectangle[1]
    kept = [
        piece.surroundings.buffers[n][low:high]
        for n in piece["running"]
        if n in piece.surroundings.buffers
    ]
    if sum_over is alone:
        return _unshared_norm(piece, kept)
    dims = [d for d in range(len(piece.rectangle)) if d != 1]
    local = 1
    for dim in dims:
        local *= piece.sizes[dim]

    def statistics(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        variance, mean = torch.var_mean(value, dims, correction=0)
        mean, variance = mean.double(), variance.double()
        sums = sum_over(torch.stack([mean * local, (variance + mean * mean) * local])) / count
        return sums[0], (sums[1] - sums[0] * sums[0]).clamp_(min=0)

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        given = inputs[0]
        assert given is not None
        # as fused kernels do: half precision in and out, not in between
        value = given.float() if given.dtype.itemsize < 4 else given
        with torch.no_grad():
            mean, variance = statistics(value)
            if kept:
                unbiased = variance * (count / max(count - 1, 1))
                kept[0].lerp_(mean.to(kept[0].dtype), momentum)
                kept[1].lerp_(unbiased.to(kept[1].dtype), momentum)
            scale = (variance + eps).rsqrt().to(value.dtype)
            mean = mean.to(value.dtype)
        normal: torch.Tensor = _Normalised.apply(value, mean, scale, sum_over, count)
        shape = [1, -1] + [1] * (value.dim() - 2)
        if "weight" in parameters:
            normal = normal * parameters["weight"].view(shape)
        if "bias" in parameters:
            normal = normal + parameters["bias"].view(shape)
        return normal.to(given.dtype)

    return run
