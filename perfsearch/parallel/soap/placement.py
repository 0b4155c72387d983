"""What each device computes and stores under a plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from perfsearch.parallel.soap.axes import Rectangle
from perfsearch.parallel.soap.configuration import Plan, part_rectangles
from perfsearch.parallel.soap.graph import INPUT, Graph, Operator, Parameter
from perfsearch.parallel.soap.rectangles import hull, volume
from perfsearch.parallel.soap.rules import input_rectangle, parameter_rectangles


def placements(graph: Graph, plan: Plan, device_count: int) -> list[dict[str, Rectangle]]:
    """What each device computes of each operator, the inputs among them, as far as it needs them.

    Args:
        graph: of the model.
        plan: that fits it.
        device_count: devices there are.

    """
    found: list[dict[str, Rectangle]] = [{} for _ in range(device_count)]
    for operator in graph.planned:
        configuration = plan[operator.name]
        parts = part_rectangles(operator, configuration)
        for device, part in zip(configuration.devices, parts, strict=True):
            found[device][operator.name] = part
    for mine in found:
        _add_inputs(graph, mine)
    return found


def _add_inputs(graph: Graph, mine: dict[str, Rectangle]) -> None:
    """Extend it by what its parts read of inputs, consumers before producers."""
    needs: dict[str, list[Rectangle]] = {}
    for operator in reversed(graph.operators):
        if operator.name in graph.inputs and operator.name in needs:
            mine[operator.name] = _computable(operator, hull(needs[operator.name]))
        rectangle = mine.get(operator.name)
        if rectangle is None:
            continue
        for index, name in enumerate(operator.inputs):
            need = input_rectangle(operator, index, rectangle)
            if need is not None and name in graph.inputs:
                needs.setdefault(name, []).append(need)


def _computable(operator: Operator, need: Rectangle) -> Rectangle:
    """What has to be computed for it: all of the dimensions that may not be split."""
    if operator.kind == INPUT:
        return need
    return tuple(
        span if role is not None else (0, size)
        for span, role, size in zip(need, operator.roles, operator.shape, strict=True)
    )


@dataclass(frozen=True)
class Use:
    """One operator's reading of a parameter on one device."""

    operator: str
    name: str
    rectangle: Rectangle


@dataclass(frozen=True)
class Tile:
    """What one device stores of a parameter: all that its operators read of it.

    Attributes:
        rectangle: stored.
        uses: by operators, in topological order.

    """

    rectangle: Rectangle
    uses: tuple[Use, ...]


@dataclass(frozen=True)
class Cell:
    """A piece of a parameter that the same devices store.

    Attributes:
        key: of the parameter.
        rectangle: the piece.
        devices: in ascending order; their gradients are summed where there are several.

    """

    key: str
    rectangle: Rectangle
    devices: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of them."""
        return volume(self.rectangle)


def parameters(graph: Graph) -> dict[str, Parameter]:
    """One entry for each tensor, tied ones once, in order of first use."""
    found: dict[str, Parameter] = {}
    for operator in graph.operators:
        for parameter in operator.parameters:
            found.setdefault(parameter.key, parameter)
    return found


def tiles(graph: Graph, mine: Mapping[str, Rectangle]) -> dict[str, Tile]:
    """What a device stores, by the parameters' keys.

    Args:
        graph: of the model.
        mine: the device's entry of ``placements``.

    """
    uses: dict[str, list[Use]] = {}
    for operator in graph.operators:
        rectangle = mine.get(operator.name)
        if rectangle is not None and operator.parameters:
            _note(operator, rectangle, uses)
    return {key: Tile(hull(u.rectangle for u in each), tuple(each)) for key, each in uses.items()}


def _note(operator: Operator, rectangle: Rectangle, uses: dict[str, list[Use]]) -> None:
    reads = parameter_rectangles(operator, rectangle)
    for parameter in operator.parameters:
        use = Use(operator.name, parameter.name, reads[parameter.name])
        uses.setdefault(parameter.key, []).append(use)


def cells(key: str, stored: Mapping[int, Rectangle]) -> list[Cell]:
    """Cut a parameter so that each piece is stored wholly or not at all by every device.

    Args:
        key: of the parameter.
        stored: what each device has of it.

    """
    distinct = sorted(set(stored.values()))
    if all(_apart(a, b) for i, a in enumerate(distinct) for b in distinct[i + 1 :]):
        return [Cell(key, r, tuple(sorted(d for d in stored if stored[d] == r))) for r in distinct]
    found = []
    for rectangle in _grid(distinct):
        holders = [d for d, r in stored.items() if _covers(r, rectangle)]
        if holders:
            found.append(Cell(key, rectangle, tuple(sorted(holders))))
    return found


def _apart(a: Rectangle, b: Rectangle) -> bool:
    return any(high <= low or top <= start for (start, high), (low, top) in zip(a, b, strict=True))


def _covers(outer: Rectangle, inner: Rectangle) -> bool:
    return all(o[0] <= i[0] and i[1] <= o[1] for o, i in zip(outer, inner, strict=True))


def _grid(rectangles: Iterable[Rectangle]) -> list[Rectangle]:
    """Pieces between all borders of all rectangles."""
    pieces: list[Rectangle] = [()]
    for ranges in zip(*rectangles, strict=True):
        borders = sorted({border for pair in ranges for border in pair})
        spans = list(itertools.pairwise(borders))
        pieces = [(*piece, span) for piece in pieces for span in spans]
    return pieces
