"""Kernels of losses: a part gives its share of the sum over all parts."""

from __future__ import annotations

import torch
from torch.nn import functional

from perfsearch.parallel.soap.kernels import Function, Inputs, Parameters, Piece, kernel
from perfsearch.parallel.soap.kernels_calls import call


def _scale(piece: Piece) -> float:
    """What the user's code multiplies the loss by."""
    return float(piece.stage.attributes.get("scale", 1.0))


@kernel("elementwise_loss")
def elementwise_loss(piece: Piece) -> Function:
    """The sum of the part's terms over the number of all terms."""
    summed = call(piece)
    factor = _scale(piece) / piece["terms"]
    return lambda inputs, parameters: summed(inputs, parameters) * factor


@kernel("total")
def total(piece: Piece) -> Function:
    """The same of the values themselves."""
    factor = _scale(piece) / piece["terms"]

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        value = inputs[0]
        assert value is not None
        return value.sum() * factor

    return run


@kernel("class_loss")
def class_loss(piece: Piece) -> Function:
    """What is divided by is known only when all parts have counted their targets."""
    function = functional.cross_entropy if piece["normalise"] else functional.nll_loss
    options = {"ignore_index": piece["ignore_index"], "reduction": "sum"}
    if piece["normalise"]:
        options["label_smoothing"] = piece["label_smoothing"]
    mean, weighted, ignored = piece["mean"], piece["weighted"], piece["ignore_index"]
    scale = _scale(piece)
    sum_over = piece.surroundings.sum_over_all

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        value, target = inputs[:2]
        weight = inputs[2] if weighted else None
        assert value is not None and target is not None
        terms: torch.Tensor = function(value, target, weight, **options)
        if not mean:
            return terms * scale
        counted = target != ignored
        counts = counted.to(terms.dtype)
        if weight is not None:
            counts = counts * weight[target.masked_fill(~counted, 0)]
        return terms * (scale / sum_over(counts.sum()))

    return run
