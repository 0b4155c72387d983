"""Which indices of an input's dimension a range of the output's indices reads."""

from __future__ import annotations

from dataclasses import dataclass

Range = tuple[int, int]
"""Half-open."""

Rectangle = tuple[Range, ...]
"""Half-open range per dimension."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Whole:
    """All of it, whatever part of the output is computed."""

    size: int

    def reads(self, rectangle: Rectangle) -> Range:
        """The range of this dimension that the rectangle of the output needs."""
        return (0, self.size)


@dataclass(frozen=True)
class Same:
    """Index for index as dimension ``dim`` of the output."""

    dim: int

    def reads(self, rectangle: Rectangle) -> Range:
        """The range of this dimension that the rectangle of the output needs."""
        return rectangle[self.dim]


@dataclass(frozen=True)
class Window:
    """A window that slides over a padded dimension, as convolution and pooling have it."""

    dim: int
    size: int
    kernel: int
    stride: int
    padding: int
    dilation: int = 1

    def reads(self, rectangle: Rectangle) -> Range:
        """The range of this dimension that the rectangle of the output needs, its halo included."""
        low, high = rectangle[self.dim]
        first = low * self.stride - self.padding
        last = (high - 1) * self.stride - self.padding + self.dilation * (self.kernel - 1)
        start = min(max(first, 0), self.size - 1)
        return (start, max(min(last, self.size - 1), start) + 1)


@dataclass(frozen=True)
class Strided:
    """Every ``step``-th index from ``start`` on, as a slice takes them."""

    dim: int
    start: int
    step: int = 1

    def reads(self, rectangle: Rectangle) -> Range:
        """The range of this dimension that the rectangle of the output needs."""
        low, high = rectangle[self.dim]
        return (self.start + low * self.step, self.start + (high - 1) * self.step + 1)


@dataclass(frozen=True)
class Joined:
    """``size`` indices that lie from ``offset`` on in the output, as concatenation puts them."""

    dim: int
    offset: int
    size: int

    def reads(self, rectangle: Rectangle) -> Range:
        """The range of this dimension that the rectangle of the output needs; may be empty."""
        low, high = rectangle[self.dim]
        start, end = max(low - self.offset, 0), min(high - self.offset, self.size)
        return (start, end) if start < end else (0, 0)


@dataclass(frozen=True)
class Fixed:
    """One index that the output has no dimension for."""

    index: int

    def reads(self, rectangle: Rectangle) -> Range:
        """The range of this dimension that the rectangle of the output needs."""
        return (self.index, self.index + 1)


@dataclass(frozen=True)
class Unfolded:
    """Split by a reshape; dimension ``dim`` of the output counts blocks of ``block`` of these."""

    dim: int
    block: int

    def reads(self, rectangle: Rectangle) -> Range:
        """The range of this dimension that the rectangle of the output needs."""
        low, high = rectangle[self.dim]
        return (low * self.block, high * self.block)


@dataclass(frozen=True)
class Folded:
    """The outermost of dimensions that a reshape merged into ``dim``; one is ``block`` of those.

    Where a range of the output begins or ends within a block, the whole block is read.
    """

    dim: int
    block: int

    def reads(self, rectangle: Rectangle) -> Range:
        """The range of this dimension that the rectangle of the output needs."""
        low, high = rectangle[self.dim]
        return (low // self.block, -(-high // self.block))


Axis = Whole | Same | Window | Strided | Joined | Fixed | Unfolded | Folded
"""One dimension of an input, as a function of the output's rectangle."""
