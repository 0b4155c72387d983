"""What the pictures of a page are drawn with: scales, shapes and numbers for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDE, NARROW = 860.0, 358.0
"""Pixels of a picture on a screen and on a telephone, where it is drawn anew: text that was shrunk
could not be read."""

LEFT, RIGHT = 64.0, 12.0

Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """A scale from values to pixels.

    Attributes:
        low: value at ``start``.
        high: value at ``end``; above ``low``.
        start: pixel of ``low``.
        end: pixel of ``high``.
        whole: whether only whole numbers mean something.
        log: whether equal lengths are equal factors; all values are above zero then.

    """

    low: float
    high: float
    start: float
    end: float
    whole: bool = False
    log: bool = False

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
        log: bool = False,
    ) -> Axis:
        """A scale that shows all values, with zero if asked for, and never has no extent."""
        finite = [v for v in values if math.isfinite(v)] or [0.0]
        low, high = min(finite), max(finite)
        if log:
            room = (high / low) ** margin if high > low else 2.0
            return cls(low / room, high * room, start, end, whole, log)
        if zero:
            low, high = min(0.0, low), max(0.0, high)
        room = (high - low) * margin or abs(high) * margin or 1.0
        return cls(low if zero and low == 0 else low - room, high + room, start, end, whole)

    def __call__(self, value: float) -> float:
        """Pixel of a value."""
        share = (value - self.low) / (self.high - self.low)
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values inside the scale, about ``count`` of them."""
        if self.log:
            return self._log_ticks(count)
        raw = (self.high - self.low) / max(1, count)
        size = 10.0 ** math.floor(math.log10(raw))
        step = next(m * size for m in (1, 2, 2.5, 5, 10) if m * size >= raw * 0.999)
        step = math.ceil(step) if self.whole else step
        first = math.ceil(self.low / step)
        values = [(first + i) * step for i in range(int((self.high - self.low) / step) + 2)]
        return [v for v in values if v <= self.high + 1e-9 * step]

    def _log_ticks(self, count: int) -> list[float]:
        lowest, highest = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        for digits in ((1, 2, 5), (1, 3), (1,)):
            known = [d * 10.0**place for place in range(lowest, highest + 1) for d in digits]
            inside = [value for value in known if self.low <= value <= self.high]
            if len(inside) <= count:
                return inside
        return inside[:: -(-len(inside) // count)]


@dataclass(frozen=True)
class Shape:
    """An element of a picture.

    Attributes:
        tag: its SVG element.
        attributes: of the element.
        text: what it says.
        title: what it says when pointed at; ``None``: nothing.

    """

    tag: str
    attributes: Mapping[str, str]
    text: str = ""
    title: str | None = None


class Canvas:
    """Shapes with classes of the report's style sheet.

    Args:
        width: pixels.
        height: pixels.
        label: what it shows, for readers who do not see it.

    """

    def __init__(self, width: float, height: float, label: str) -> None:
        self.shapes: list[Shape] = []
        self.width = width
        self.height = height
        self.label = label

    def line(self, begin: Point, end: Point, style: str) -> None:
        """A straight line."""
        ends = {"x1": begin[0], "y1": begin[1], "x2": end[0], "y2": end[1]}
        self._add("line", style, ends)

    def path(self, points: Sequence[Point], style: str, title: str | None = None) -> None:
        """A line through points, with a text that shows when it is pointed at."""
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._add("polyline", style, title=title, points=places)

    def dot(self, at: Point, style: str, title: str = "", radius: float = 4) -> None:
        """A disc, with a text that shows when it is pointed at."""
        self._add("circle", style, {"cx": at[0], "cy": at[1], "r": radius}, title=title)

    def cross(self, at: Point, style: str, title: str = "", size: float = 4) -> None:
        """An oblique cross."""
        (x, y), long = at, 2 * size
        strokes = f"M{x - size:.1f} {y - size:.1f}l{long} {long}m0 {-long}l{-long} {long}"
        self._add("path", style, title=title, d=strokes)

    def box(self, corner: Point, size: Point, style: str, title: str = "") -> None:
        """A filled rectangle from its upper left corner."""
        (x, y), (width, height) = corner, size
        place = {"x": x, "y": y, "width": max(0.0, width), "height": height}
        self._add("rect", style, place, title=title)

    def area(self, points: Sequence[Point], style: str) -> None:
        """A filled polygon."""
        self._add("polygon", style, points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points))

    def key(self, names: Mapping[str, str], left: float, top: float, pitch: float) -> float:
        """A coloured box for each name, by its style, in rows; return where the next row is.

        They are ``pitch`` apart, or farther where a name takes more.
        """
        pitch = max(pitch, 24 + 6.8 * max(map(len, names), default=0))
        across = max(1, int((self.width - left) // pitch))
        for place, (name, style) in enumerate(names.items()):
            x, y = left + pitch * (place % across), top + 18 * (place // across)
            self.box((x, y - 9), (10, 10), style)
            self.text((x + 14, y), name, "tick")
        return top + 18 * -(-len(names) // across)

    def text(self, at: Point, words: str, style: str = "", anchor: str = "start") -> None:
        """Words whose anchor is ``start``, ``middle`` or ``end``."""
        place = {"x": at[0], "y": at[1]}
        self._add("text", style, place, text=words, **{"text-anchor": anchor})

    def _add(
        self,
        tag: str,
        style: str,
        pixels: Mapping[str, float] | None = None,
        *,
        text: str = "",
        title: str | None = None,
        **attributes: str,
    ) -> None:
        places = {name: f"{value:.1f}" for name, value in (pixels or {}).items()}
        self.shapes.append(Shape(tag, {"class": style, **places, **attributes}, text, title))

    def frame(self, x: Axis | None, y: Axis | None, x_label: str = "", y_label: str = "") -> None:
        """Grid lines with their values, and the axes' labels."""
        bottom = self.height - 34
        for value in y.ticks() if y else ():
            assert y is not None
            self.line((LEFT, y(value)), (self.width - RIGHT, y(value)), "grid")
            self.text((LEFT - 6, y(value) + 4), number(value), "tick", "end")
        for value in x.ticks(8 if self.width > NARROW else 4) if x else ():
            assert x is not None
            self.line((x(value), bottom), (x(value), bottom + 4), "axis")
            self.text((x(value), bottom + 17), number(value), "tick", "middle")
        self.line((x.start if x else LEFT, bottom), (self.width - RIGHT, bottom), "axis")
        self.text((self.width - RIGHT, self.height - 3), x_label, "tick", "end")
        self.text((4, 12), y_label, "tick")


def number(value: float) -> str:
    """A number for people: at most four digits that count."""
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
