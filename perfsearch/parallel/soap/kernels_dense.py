"""Kernels of matrix products, embeddings and attention."""

from __future__ import annotations

import torch
from torch.nn import functional

from perfsearch.parallel.soap.kernels import Function, Inputs, Parameters, Piece, kernel
from perfsearch.parallel.soap.kernels_calls import filled, whole_mask
from perfsearch.parallel.soap.rectangles import within


@kernel("linear")
def linear(piece: Piece) -> Function:
    """Rows of the weight, or blocks of rows."""
    blocks = piece.stage.attributes.get("blocks", 0)
    split = piece.sizes[-blocks:] if blocks else ()

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        weight, bias = parameters["weight"], parameters.get("bias")
        if not split:
            return functional.linear(inputs[0], weight, bias)
        rows = weight.flatten(0, -2)
        flat = None if bias is None else bias.flatten()
        return functional.linear(inputs[0], rows, flat).unflatten(-1, split)

    return run


@kernel("matmul")
def matmul(piece: Piece) -> Function:
    """As torch broadcasts it."""
    left, right = (filled(slot, piece.surroundings.device) for slot in piece["operands"])

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        return torch.matmul(left(inputs, parameters), right(inputs, parameters))

    return run


@kernel("embedding")
def embedding(piece: Piece) -> Function:
    """Columns of the table."""
    padding = piece["padding_idx"]
    padding = None if padding is None or padding < 0 else padding
    return lambda inputs, parameters: functional.embedding(
        inputs[0], parameters["weight"], padding_idx=padding
    )


@kernel("embedding_bag")
def embedding_bag(piece: Piece) -> Function:
    """Bags of one size are rows of indices; ragged ones begin at the offsets."""
    size, mode = piece["bag_size"], piece["mode"]
    padding = piece["padding_idx"]
    padding = None if padding is None or padding < 0 else padding

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        indices, table = inputs[0], parameters["weight"]
        assert indices is not None
        if size is None:
            return functional.embedding_bag(
                indices, table, inputs[1], mode=mode, padding_idx=padding
            )
        if size == 1 and padding is None:
            return functional.embedding(indices, table)  # the same at a fraction of the launches
        return functional.embedding_bag(
            indices.view(-1, size), table, mode=mode, padding_idx=padding
        )

    return run


@kernel("attention")
def attention(piece: Piece) -> Function:
    """Fused where the part has all query positions and draws nothing; else in its pieces."""
    count = len(piece.stage.shape)
    rows = piece.rectangle[count - 2]
    scores: tuple[int, ...] = piece["scores"]
    order = tuple(range(len(scores)))
    causal, scale, probability = piece["causal"], piece["scale"], piece["probability"]
    partial = rows != (0, piece.stage.shape[-2])
    of_scores = (*piece.rectangle[:-1], (0, scores[-1]))
    mine = within(of_scores, tuple((0, size) for size in scores))

    def allowed(device: torch.device) -> torch.Tensor:
        below = torch.ones(rows[1] - rows[0], scores[-1], dtype=torch.bool, device=device)
        return below.tril(rows[0])

    kept = allowed(piece.surroundings.device) if causal and (partial or probability) else None

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        query, key, value = inputs[:3]
        mask = inputs[3] if len(inputs) > 3 else kept
        assert query is not None and key is not None and value is not None
        if not probability:
            return functional.scaled_dot_product_attention(
                query, key, value, mask, is_causal=causal and not partial, scale=scale
            )
        weights = query @ key.transpose(-2, -1)
        weights = weights * (query.shape[-1] ** -0.5 if scale is None else scale)
        if mask is not None and mask.dtype == torch.bool:
            weights = weights.masked_fill(~mask, float("-inf"))
        elif mask is not None:
            weights = weights + mask
        weights = weights.softmax(-1)
        drawn = whole_mask(scores, order, probability, weights.dtype, weights.device)[mine]
        return (weights * drawn) @ value

    return run
