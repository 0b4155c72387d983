"""A plan as a picture: a row for each run of like operators, a column for each device, as SVG."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from xml.sax.saxutils import escape

from perfsearch.soap.graph import Graph, Operator, Role
from perfsearch.soap.plan import OperatorConfiguration, Plan

_ROW, _CELL, _LABEL = 22, 64, 380
_LETTERS = 58
"""Of a label, the last ones, which tell operators apart."""
_NARROW = 18
"""Width of a device's cell where there are too many for text in them."""
_MANY = 16
_COLOURS = {
    "samples": "#9ecae9",
    "attributes": "#a1d99b",
    "parameters": "#fdbe85",
    "several": "#cbb8e3",
    "whole": "#d9d9d9",
}
_OF_ROLE = {Role.SAMPLE: "samples", Role.ATTRIBUTE: "attributes", Role.PARAMETER: "parameters"}


@dataclass(frozen=True)
class Row:
    """Operators that follow each other and are split and placed alike.

    Attributes:
        operators: in the program's order.
        configuration: of each.

    """

    operators: tuple[Operator, ...]
    configuration: OperatorConfiguration

    @property
    def words(self) -> str:
        """Which they are."""
        first, *others = self.operators
        shape = "x".join(map(str, first.shape)) or "scalar"
        if not others:
            return f"{first.name} ({first.kind} {shape})"
        return f"{first.name} to {others[-1].name} ({len(self.operators)} operators)"

    @property
    def split(self) -> str:
        """What is divided; one of the colours' names."""
        roles = self.operators[0].roles
        divided = {
            role
            for role, degree in zip(roles, self.configuration.degrees, strict=True)
            if degree > 1 and role is not None
        }
        if len(divided) > 1:
            return "several"
        return _OF_ROLE[divided.pop()] if divided else "whole"


def rows(graph: Graph, plan: Plan) -> list[Row]:
    """Runs of operators of like configurations, whose like dimensions are split."""

    def key(operator: Operator) -> tuple[object, ...]:
        chosen = plan[operator.name]
        roles = [r if d > 1 else None for r, d in zip(operator.roles, chosen.degrees, strict=True)]
        return chosen.devices, [(d, r) for d, r in zip(chosen.degrees, roles, strict=True) if r]

    found = []
    for _, same in itertools.groupby(graph.planned, key):
        operators = tuple(same)
        found.append(Row(operators, plan[operators[0].name]))
    return found


def picture(graph: Graph, plan: Plan, devices: int) -> str:
    """The plan as an SVG file's text."""
    listed = rows(graph, plan)
    cell = _CELL if devices <= _MANY else _NARROW
    width, height = _LABEL + cell * devices + 10, _ROW * (len(listed) + 3)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    place = 8
    for name, colour in _COLOURS.items():
        parts.append(f'<rect x="{place}" y="5" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(place + 16, 15, name))
        place += 90
    for device in range(devices):
        parts.append(_text(_LABEL + cell * device + 3, 2 * _ROW - 6, str(device)))
    for number, row in enumerate(listed):
        parts += _drawn(row, _ROW * (number + 2), cell)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _drawn(row: Row, top: int, cell: int) -> list[str]:
    degrees, devices = row.configuration.degrees, row.configuration.devices
    words = row.words
    words = words if len(words) <= _LETTERS else f"...{words[3 - _LETTERS :]}"
    parts = [_text(8, top + 15, words)]
    places = itertools.product(*(range(degree) for degree in degrees))
    for device, place in zip(devices, places, strict=True):
        left = _LABEL + cell * device
        parts.append(
            f'<rect x="{left}" y="{top + 1}" width="{cell - 2}" height="{_ROW - 2}" '
            f'fill="{_COLOURS[row.split]}"/>'
        )
        if cell == _CELL:
            shares = [f"{i + 1}/{n}" for i, n in zip(place, degrees, strict=True) if n > 1]
            parts.append(_text(left + 4, top + 15, " ".join(shares) or "all"))
    return parts


def _text(left: int, base: int, words: str) -> str:
    return f'<text x="{left}" y="{base}">{escape(words)}</text>'
