"""Kernels of convolutions and pooling: padding is only at the edges of the whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from perfsearch.parallel.soap.axes import Rectangle, Window
from perfsearch.parallel.soap.kernels import Function, Inputs, Parameters, Piece, kernel


def margins(rectangle: Rectangle, windows: Sequence[Window]) -> list[int]:
    """Padding of the part, last dimension first, as ``functional.pad`` takes it."""
    found: list[int] = []
    for window in reversed(windows):
        low, high = rectangle[window.dim]
        start, end = window.reads(rectangle)
        first = low * window.stride - window.padding
        last = (high - 1) * window.stride - window.padding
        last += window.dilation * (window.kernel - 1) + 1
        found += [start - first, last - end]
    return found


def _symmetric(found: Sequence[int]) -> list[int] | None:
    """Both sides alike and none cut off: the function can pad by itself, without a copy."""
    pairs = list(zip(found[::2], found[1::2], strict=True))[::-1]
    return [a for a, b in pairs] if all(a == b >= 0 for a, b in pairs) else None


@kernel("convolution")
def convolution(piece: Piece) -> Function:
    """On the part's window."""
    windows = piece["windows"]
    function = (functional.conv1d, functional.conv2d, functional.conv3d)[len(windows) - 1]
    padding = margins(piece.rectangle, windows)
    own = _symmetric(padding)
    stride, dilation, groups = piece["stride"], piece["dilation"], piece["groups"]

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        value = inputs[0] if own is not None else functional.pad(inputs[0], padding)
        bias = parameters.get("bias")
        return function(value, parameters["weight"], bias, stride, own or 0, dilation, groups)

    return run


@kernel("max_pool")
def max_pool(piece: Piece) -> Function:
    """Padded with what is never the largest."""
    padding = margins(piece.rectangle, piece["windows"])
    kernel_size, stride, dilation = piece["kernel"], piece["stride"], piece["dilation"]

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        value = inputs[0]
        if any(padding):
            value = functional.pad(value, padding, value=float("-inf"))
        return functional.max_pool2d(value, kernel_size, stride, 0, dilation)

    return run


@kernel("average_pool")
def average_pool(piece: Piece) -> Function:
    """Padding counts."""
    padding = margins(piece.rectangle, piece["windows"])
    kernel_size, stride = piece["kernel"], piece["stride"]

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        value = functional.pad(inputs[0], padding) if any(padding) else inputs[0]
        return functional.avg_pool2d(value, kernel_size, stride)

    return run
