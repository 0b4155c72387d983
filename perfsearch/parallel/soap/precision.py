"""What autocast makes of dtypes, spelled out per stage."""

from __future__ import annotations

import torch

from perfsearch.parallel.soap.graph import WHOLE
from perfsearch.parallel.soap.lowering import Call, Lowered

_LOWER = frozenset(
    [
        "linear",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "addmm",
        "addmv",
        "addr",
        "addbmm",
        "baddbmm",
        "mm",
        "mv",
        "bmm",
        "matmul",
        "einsum",
        "scaled_dot_product_attention",
    ]
)
_FULL = frozenset(
    [
        "acos",
        "asin",
        "cosh",
        "erfinv",
        "exp",
        "expm1",
        "log",
        "log10",
        "log2",
        "log1p",
        "reciprocal",
        "rsqrt",
        "sinh",
        "tan",
        "pow",
        "softplus",
        "prod",
        "cumprod",
        "cumsum",
        "sum",
        "norm",
        "linalg_vector_norm",
        "linalg_matrix_norm",
        "dist",
        "cdist",
        "pdist",
        "renorm",
        "logsumexp",
        "cosine_similarity",
        "kl_div",
        "binary_cross_entropy_with_logits",
        "layer_norm",
        "group_norm",
        "softmax",
        "log_softmax",
    ]
)
"""Functions that ``torch.autocast`` casts on GPUs, beside losses, where no rule says it already."""


class Autocast:
    """Casts of one step.

    Matrix products and convolutions run in the lower dtype, normalisations and losses in float32,
    the rest in the widest dtype of what it is given, as ``torch.autocast`` has it on GPUs.

    Args:
        dtype: the lower one; ``None``: nothing is cast.

    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._lower = None if dtype is None else str(dtype).removeprefix("torch.")

    def apply(self, lowered: Lowered, call: Call) -> str:
        """Note in the stage what it casts to; return the dtype of its output."""
        if self._lower is None or not _floating(call.dtype) or lowered.kind == "cast":
            return call.dtype
        precision = self._of(lowered, call)
        if precision == "lower" and call.dtype == "float32":
            lowered.attributes["cast"] = self._lower
            return self._lower
        if precision == "full" and call.dtype == "float32":
            lowered.attributes["cast"] = "float32"
            return "float32"
        given = [v.dtype for v, _ in lowered.operands if _floating(v.dtype)]
        given += [v.dtype for v, _ in lowered.parameters.values() if _floating(v.dtype)]
        if lowered.kind in ("batch_norm", "embedding", "embedding_bag"):
            given = given[:1]  # the input decides; a table is the only one that is floating
        if not given or call.dtype != "float32":
            return call.dtype
        widest: torch.dtype = getattr(torch, given[0])
        for name in given[1:]:
            widest = torch.promote_types(widest, getattr(torch, name))
        return str(widest).removeprefix("torch.")

    def _of(self, lowered: Lowered, call: Call) -> str:
        if lowered.precision != "keep":
            return lowered.precision
        if call.name in _LOWER:
            return "lower"
        if call.name in _FULL or call.name.endswith("_loss"):
            return "full"
        # the widest: what is not called by a rule of ours may not take mixed dtypes
        given = {v.dtype for v, _ in lowered.operands if _floating(v.dtype)}
        return "full" if lowered.kind == WHOLE and len(given) > 1 else "keep"


def _floating(name: str) -> bool:
    dtype = getattr(torch, name, None)
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point
