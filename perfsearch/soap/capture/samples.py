"""Functions without a rule: split over samples where running parts of a batch shows the same.

What a function does with its samples is not written down anywhere. So it is run once on random
values, whole and in parts, forward and backward: where parts give what the whole gives, and the
gradients of what is not cut add up, samples do not know of each other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from perfsearch.soap.capture.lower import Value
from perfsearch.soap.executor.kernels import PartContext, Piece, raw_call
from perfsearch.soap.graph import WHOLE, Role, Shape, Stage, share

_PARTS = (2, 3)
_MOST_TRIES = 64
_MOST_FLOPS = 1e12
"""Beyond, running a function three times would take longer than it is worth."""

_REAL = frozenset({"float64", "float32", "float16", "bfloat16"})
_WHOLE_NUMBERS = frozenset({"int64", "int32", "int16", "int8", "uint8"})
_TOLERANCE = 1e-9
_SINGLE_TOLERANCE = 1e-4
"""Of functions that compute in float32, whatever they are given."""


@dataclass(frozen=True)
class SampleSplit:
    """Which dimension of each tensor is the samples.

    Attributes:
        operands: of what the function takes; ``None``: it is taken whole.
        outputs: of what it gives, in the order asked for.

    """

    operands: tuple[int | None, ...]
    outputs: tuple[int, ...]


_known: dict[str, SampleSplit | None] = {}


def sample_split(
    attributes: dict[str, Any],
    operands: Sequence[Value],
    outputs: Sequence[tuple[int | None, Shape]],
    flops: float,
) -> SampleSplit | None:
    """How a function can be split over samples; ``None``: it is not known to be right.

    Args:
        attributes: of the stage that calls it.
        operands: tensors, in the order of the stage's slots.
        outputs: of the function that are used, each with its shape; ``None``: the only one.
        flops: of the function.

    """
    key = repr(
        (attributes, [(v.shape, v.dtype, v.labels, v.weighted) for v in operands], list(outputs))
    )
    if key not in _known:
        _known[key] = None if flops > _MOST_FLOPS else _found(attributes, operands, outputs)
    return _known[key]


def _found(
    attributes: dict[str, Any],
    operands: Sequence[Value],
    outputs: Sequence[tuple[int | None, Shape]],
) -> SampleSplit | None:
    labelled = [_sample_dim(value) for value in operands]
    sizes = {v.shape[d] for v, d in zip(operands, labelled, strict=True) if d is not None}
    if len(sizes) != 1 or any(v.dtype not in _REAL | _WHOLE_NUMBERS | {"bool"} for v in operands):
        return None
    (size,) = sizes
    if size < 2:
        return None
    trial = _Trial(attributes, operands, outputs)
    if not trial.runs():
        return None
    for dims in itertools.islice(_candidates(operands, labelled, size), _MOST_TRIES):
        found = trial.split(dims, size)
        if found is not None:
            return SampleSplit(dims, found)
    return None


def _sample_dim(value: Value) -> int | None:
    return next((d for d, label in enumerate(value.labels) if label is Role.SAMPLE), None)


def _candidates(
    operands: Sequence[Value], labelled: Sequence[int | None], size: int
) -> Iterator[tuple[int | None, ...]]:
    """Dimensions that may be the samples: also of tensors that the model makes, as zeros."""
    choices: list[list[int | None]] = []
    for value, dim in zip(operands, labelled, strict=True):
        if dim is not None:
            choices.append([dim])
        elif value.weighted and not value.sampled:
            choices.append([None])
        else:
            choices.append([*(d for d, n in enumerate(value.shape) if n == size), None])
    return itertools.product(*choices)


class _Trial:
    """Runs the function on random values.

    Args:
        attributes: of the stage.
        operands: tensors it takes.
        outputs: that are used.

    """

    def __init__(
        self,
        attributes: dict[str, Any],
        operands: Sequence[Value],
        outputs: Sequence[tuple[int | None, Shape]],
    ) -> None:
        stage = Stage(WHOLE, (), (), attributes)
        self._function = raw_call(Piece(stage, (), (), PartContext(torch.device("cpu"))))
        self._operands, self._outputs = operands, outputs
        self._single = any(value.dtype != "float64" for value in operands)

    def runs(self) -> bool:
        """Draw values that the function takes; whole numbers may be indices into something."""
        real = [n for v in self._operands if v.dtype in _REAL for n in v.shape if n > 1]
        bounds = sorted({2, *real}, reverse=True)
        if not any(v.dtype in _WHOLE_NUMBERS for v in self._operands):
            bounds = [2]
        for bound in bounds:
            generator = torch.Generator().manual_seed(0)
            self._values = [_random(value, bound, generator) for value in self._operands]
            try:
                self._whole = self._run([None] * len(self._values), (0, 0))
            except Exception:  # whatever a function says of values that it cannot take
                continue
            return True
        return False

    def split(self, dims: Sequence[int | None], size: int) -> tuple[int, ...] | None:
        """The outputs' dimensions of samples, where parts give the same."""
        try:
            by_degree = [
                [self._run(dims, share(size, degree, i)) for i in range(degree)]
                for degree in _PARTS
                if degree <= size
            ]
        except Exception:  # as of shapes that do not fit
            return None
        outputs: list[int] = []
        for place, (whole, _) in enumerate(self._whole):
            dim = _grown(whole, [part[place][0] for part in by_degree[0]])
            if dim is None or whole.shape[dim] != size:
                return None
            outputs.append(dim)
        for parts in by_degree:
            for place, dim in enumerate(outputs):
                joined = torch.cat([part[place][0] for part in parts], dim)
                if not self._same(joined, self._whole[place][0]):
                    return None
            if not self._gradients_agree(parts, dims, outputs):
                return None
        return tuple(outputs)

    def _run(
        self, dims: Sequence[int | None], span: tuple[int, int]
    ) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
        """Outputs, each with what was cut of the operands to get it."""
        given = [
            (value if dim is None else value.narrow(dim, span[0], span[1] - span[0]))
            .detach()
            .clone()
            .requires_grad_(value.is_floating_point())
            for value, dim in zip(self._values, dims, strict=True)
        ]
        result = self._function(given, {})
        return [
            (result if number is None else result[number], given) for number, _ in self._outputs
        ]

    def _gradients_agree(
        self,
        parts: Sequence[Sequence[tuple[torch.Tensor, list[torch.Tensor]]]],
        dims: Sequence[int | None],
        outputs: Sequence[int],
    ) -> bool:
        above = [torch.cos(torch.arange(w.numel())).view(w.shape) for w, _ in self._whole]
        whole = _gradients(self._whole, above)
        pieces = []
        start = 0
        for part in parts:
            count = part[0][0].shape[outputs[0]]
            cut = [a.narrow(dim, start, count) for a, dim in zip(above, outputs, strict=True)]
            pieces.append(_gradients(part, cut))
            start += count
        for place, dim in enumerate(dims):
            if whole[place] is None:
                continue
            mine: list[Any] = [piece[place] for piece in pieces]
            joined = torch.stack(mine).sum(0) if dim is None else torch.cat(mine, dim)
            if not self._same(joined, whole[place]):
                return False
        return True

    def _same(self, mine: Any, whole: Any) -> bool:
        if not whole.is_floating_point():
            return bool(torch.equal(mine, whole))
        single = whole.dtype != torch.float64
        error = (mine.double() - whole.double()).abs().max() if whole.numel() else mine.sum()
        scale = whole.double().abs().max().clamp(min=1.0) if whole.numel() else 1.0
        return bool(error <= (_SINGLE_TOLERANCE if single else _TOLERANCE) * scale)


def _gradients(
    results: Sequence[tuple[torch.Tensor, list[torch.Tensor]]], above: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Of each operand; ``None`` where it has none."""
    given = results[0][1]
    wanted = [tensor for tensor in given if tensor.requires_grad]
    pairs = [
        (value, gradient.to(value.dtype))
        for (value, _), gradient in zip(results, above, strict=True)
        if value.requires_grad
    ]
    if not wanted or not pairs:
        return [None] * len(given)
    found = iter(
        torch.autograd.grad(
            [value for value, _ in pairs],
            wanted,
            [gradient for _, gradient in pairs],
            allow_unused=True,
            materialize_grads=True,
            retain_graph=True,  # the whole is compared with several ways to cut it
        )
    )
    return [next(found) if tensor.requires_grad else None for tensor in given]


def _grown(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> int | None:
    """The only dimension along which parts are smaller than the whole, and add up to it."""
    if any(part.dim() != whole.dim() for part in parts):
        return None
    smaller = [d for d in range(whole.dim()) if any(p.shape[d] != whole.shape[d] for p in parts)]
    if len(smaller) != 1:
        return None
    (dim,) = smaller
    return dim if sum(part.shape[dim] for part in parts) == whole.shape[dim] else None


def _random(value: Value, bound: int, generator: torch.Generator) -> torch.Tensor:
    if value.dtype in _REAL:
        return torch.rand(value.shape, dtype=torch.float64, generator=generator) + 0.1
    # of masks, most is true: a row of attention with nothing to look at is not a number
    made = torch.randint(0, 8 if value.dtype == "bool" else bound, value.shape, generator=generator)
    return made.to(getattr(torch, value.dtype))


# -----------------------------------------------------------------------------
# Several outputs of one function as one tensor, so that it is run once.


@dataclass(frozen=True)
class Packed:
    """One of several outputs, as it lies in the tensor that all are put into.

    Attributes:
        number: of the output.
        shape: of it.
        samples: its dimension of samples, which the packed tensor has first; ``None``: the packed
            tensor has one dimension.
        start: where its elements begin.

    """

    number: int
    shape: Shape
    samples: int | None
    start: int

    @property
    def width(self) -> int:
        """Elements, of each sample if these are apart."""
        count = math.prod(self.shape)
        return count if self.samples is None else count // self.shape[self.samples]


def packed(
    outputs: Sequence[tuple[int, Shape]], samples: Sequence[int | None]
) -> tuple[list[Packed], Shape]:
    """Lay outputs side by side; the shape of all of them."""
    found: list[Packed] = []
    start = 0
    for (number, shape), dim in zip(outputs, samples, strict=True):
        found.append(Packed(number, shape, dim, start))
        start += found[-1].width
    first = found[0]
    if first.samples is None:
        return found, (start,)
    return found, (first.shape[first.samples], start)
