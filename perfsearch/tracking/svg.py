"""Just enough of SVG for a report that needs nothing from outside."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """A linear scale from values to pixels.

    Attributes:
        low: value at ``start``.
        high: value at ``end``; above ``low``.
        start: pixel of ``low``.
        end: pixel of ``high``.
        whole: whether only whole numbers mean something.

    """

    low: float
    high: float
    start: float
    end: float
    whole: bool = False

    @classmethod
    def around(
        cls,
        values: Sequence[float],
        start: float,
        end: float,
        *,
        zero: bool = False,
        margin: float = 0.06,
        whole: bool = False,
    ) -> Axis:
        """A scale that shows all values, with zero if asked for, and never has no extent."""
        finite = [v for v in values if math.isfinite(v)] or [0.0]
        low, high = min(finite), max(finite)
        if zero:
            low, high = min(0.0, low), max(0.0, high)
        room = (high - low) * margin or abs(high) * margin or 1.0
        return cls(low if zero and low == 0 else low - room, high + room, start, end, whole)

    def __call__(self, value: float) -> float:
        """Pixel of a value."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values inside the scale, about ``count`` of them."""
        raw = (self.high - self.low) / max(1, count)
        size = 10.0 ** math.floor(math.log10(raw))
        step = next(m * size for m in (1, 2, 2.5, 5, 10) if m * size >= raw * 0.999)
        step = math.ceil(step) if self.whole else step
        first = math.ceil(self.low / step)
        values = [(first + i) * step for i in range(int((self.high - self.low) / step) + 2)]
        return [v for v in values if v <= self.high + 1e-9 * step]


class Canvas:
    """Shapes with classes of the report's style sheet; every text is escaped.

    Args:
        width: pixels.
        height: pixels.
        label: what it shows, for readers who do not see it.

    """

    def __init__(self, width: float, height: float, label: str) -> None:
        self._parts: list[str] = []
        self.width = width
        self.height = height
        self._label = label

    def line(self, begin: Point, end: Point, style: str) -> None:
        """A straight line."""
        (x1, y1), (x2, y2) = begin, end
        self._parts.append(
            f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
        )

    def path(self, points: Sequence[Point], style: str) -> None:
        """A line through points."""
        listed = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline class="{style}" points="{listed}"/>')

    def dot(self, at: Point, style: str, title: str = "", radius: float = 4) -> None:
        """A disc, with a text that shows when it is pointed at."""
        x, y = at
        self._parts.append(
            f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}">'
            f"<title>{escape(title)}</title></circle>"
        )

    def cross(self, at: Point, style: str, title: str = "", size: float = 4) -> None:
        """An oblique cross."""
        x, y = at
        self._parts.append(
            f'<path class="{style}" d="M{x - size:.1f} {y - size:.1f}l{2 * size} {2 * size}'
            f'm0 {-2 * size}l{-2 * size} {2 * size}"><title>{escape(title)}</title></path>'
        )

    def box(self, corner: Point, size: Point, style: str, title: str = "") -> None:
        """A filled rectangle from its upper left corner."""
        (x, y), (width, height) = corner, size
        self._parts.append(
            f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" '
            f'height="{height:.1f}"><title>{escape(title)}</title></rect>'
        )

    def text(self, at: Point, words: str, style: str = "", anchor: str = "start") -> None:
        """Words whose anchor is ``start``, ``middle`` or ``end``."""
        x, y = at
        self._parts.append(
            f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
            f"{escape(words)}</text>"
        )

    def frame(self, x: Axis | None, y: Axis | None, x_label: str = "", y_label: str = "") -> None:
        """Grid lines with their values, and the axes' labels."""
        bottom, left = self.height - 34, 64.0
        for value in y.ticks() if y else ():
            assert y is not None
            self.line((left, y(value)), (self.width - 12, y(value)), "grid")
            self.text((left - 6, y(value) + 4), number(value), "tick", "end")
        for value in x.ticks(8) if x else ():
            assert x is not None
            self.line((x(value), bottom), (x(value), bottom + 4), "axis")
            self.text((x(value), bottom + 17), number(value), "tick", "middle")
        self.line((left, bottom), (self.width - 12, bottom), "axis")
        self.text((self.width - 12, self.height - 4), x_label, "tick", "end")
        self.text((4, 12), y_label, "tick")

    def render(self) -> str:
        """The whole element."""
        return (
            f'<svg viewBox="0 0 {self.width:.0f} {self.height:.0f}" role="img" '
            f'aria-label="{escape(self._label)}">{"".join(self._parts)}</svg>'
        )


def number(value: float) -> str:
    """A number for people: at most four digits that count."""
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
