"""Cutting a tensor into pieces for sending, and putting pieces together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from perfsearch.parallel.soap.axes import Rectangle
from perfsearch.parallel.soap.rectangles import volume, within
from perfsearch.parallel.soap.rules import sizes


class Scatterer:
    """Copies pieces of a tensor side by side into one buffer.

    Args:
        held: what the tensor holds.
        pieces: of it, in their order.

    """

    def __init__(self, held: Rectangle, pieces: Sequence[Rectangle]) -> None:
        self._cuts = [within(piece, held) for piece in pieces]
        self._whole = len(pieces) == 1 and pieces[0] == held

    def flat(self, value: torch.Tensor) -> torch.Tensor:
        """The buffer."""
        if self._whole:
            return value.reshape(-1).contiguous()
        if not self._cuts:
            return value.new_empty(0)
        return torch.cat([value[cut].reshape(-1) for cut in self._cuts])


class Gatherer:
    """Puts pieces together to a tensor, in as few copies as their places allow.

    Args:
        target: what the tensor holds.
        pieces: that will be given, in their order.
        add: whether pieces may overlap, and leave gaps: sum them over zeros.

    """

    def __init__(self, target: Rectangle, pieces: Sequence[Rectangle], add: bool) -> None:
        self._shape = sizes(target)
        self._places = [within(piece, target) for piece in pieces]
        self._add = add
        self._single = len(pieces) == 1 and pieces[0] == target
        self._dim, self._order = _stack(target, pieces)

    def __call__(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor."""
        if self._single:
            return pieces[0]
        if self._dim is not None:
            return torch.cat([pieces[i] for i in self._order], self._dim)
        if not self._add:
            whole = pieces[0].new_empty(self._shape)
            for place, piece in zip(self._places, pieces, strict=True):
                whole[place] = piece
            return whole
        whole = pieces[0].new_zeros(self._shape)
        for place, piece in zip(self._places, pieces, strict=True):
            whole[place] += piece
        return whole


def _stack(target: Rectangle, pieces: Sequence[Rectangle]) -> tuple[int | None, list[int]]:
    """The dimension along which the pieces make up the target without gap or overlap."""
    varying = [d for d, span in enumerate(target) if any(p[d] != span for p in pieces)]
    if len(varying) != 1 or sum(volume(p) for p in pieces) != volume(target):
        return None, []
    dim = varying[0]
    order = sorted(range(len(pieces)), key=lambda i: pieces[i][dim])
    ends = [pieces[i][dim][1] for i in order]
    starts = [pieces[i][dim][0] for i in order[1:]]
    return (dim, order) if ends[:-1] == starts else (None, [])
