"""Kernels of functions that move elements."""

from __future__ import annotations

import torch

from perfsearch.parallel.soap.kernels import Function, Inputs, Parameters, Piece, kernel
from perfsearch.parallel.soap.rules import sizes


def _only(inputs: Inputs) -> torch.Tensor:
    value = inputs[0]
    assert value is not None
    return value


@kernel("permute")
def permute(piece: Piece) -> Function:
    """A view."""
    dims = piece["dims"]
    return lambda inputs, parameters: _only(inputs).permute(dims)


@kernel("reshape")
def reshape(piece: Piece) -> Function:
    """A reshape of the part; of whole blocks first where the part cuts through some."""
    shape = list(piece.sizes)
    cuts = []
    source = piece.reads[0]
    assert source is not None
    for dim, before, block in piece["folds"]:
        start = piece.rectangle[dim][0] - source[before][0] * block
        covered = (source[before][1] - source[before][0]) * block
        if covered != shape[dim]:
            cuts.append((dim, start, shape[dim]))
        shape[dim] = covered

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        value = _only(inputs).reshape(shape)
        for dim, start, length in cuts:
            value = value.narrow(dim, start, length)
        return value

    return run


@kernel("slice")
def slice_(piece: Piece) -> Function:
    """What is read begins and ends where the part does; steps and single indices remain."""
    picks = tuple(slice(None, None, step) if step else 0 for step in piece["steps"])
    return lambda inputs, parameters: _only(inputs)[picks]


@kernel("expand")
def expand(piece: Piece) -> Function:
    """A view."""
    shape = piece.sizes
    return lambda inputs, parameters: _only(inputs).expand(shape)


@kernel("concatenate")
def concatenate(piece: Piece) -> Function:
    """Of the inputs that reach into the part."""
    dim = piece["dim"]

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        return torch.cat([value for value in inputs if value is not None], dim)

    return run


@kernel("stack")
def stack(piece: Piece) -> Function:
    """All inputs."""
    dim = piece["dim"]

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        return torch.stack([value for value in inputs if value is not None], dim)

    return run


@kernel("index")
def index(piece: Piece) -> Function:
    """Indexed dimensions are whole, so that indices hold."""
    before: tuple[slice, ...] = (slice(None),) * piece["first"]
    assert all(r is not None and sizes(r) for r in piece.reads)

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        return _only(inputs)[(*before, *inputs[1:])]

    return run
