"""What a part of an operator reads: of its inputs, of its parameters, stage by stage."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from perfsearch.soap.graph import Axis, Block, Operator, Rectangle, Summand, Summed, share


def input_rectangle(operator: Operator, index: int, output: Rectangle) -> Rectangle | None:
    """What a part needs of input ``index``; ``None`` where it needs nothing of it.

    It may be more than what the part's output depends on, never less.
    """
    return _read_first(operator, operator.stages[0].reads[index], output)


def parameter_rectangles(operator: Operator, output: Rectangle) -> dict[str, Rectangle]:
    """What a part needs of each parameter, by the parameter's name in the operator."""
    found = {}
    for parameter in operator.parameters:
        rectangle = _read_first(operator, parameter.axes, output)
        assert rectangle is not None
        found[parameter.name] = rectangle
    return found


def _read_first(operator: Operator, axes: Iterable[Axis], output: Rectangle) -> Rectangle | None:
    """What a part reads through the axes of the first stage."""
    first, axes = stage_rectangles(operator, output)[0], tuple(axes)
    if isinstance(output, Summand) and any(isinstance(axis, Summed) for axis in axes):
        first = output.of_all(first)
        axes = tuple(_of_share(axis, output) for axis in axes)
    return read(axes, first)


def _of_share(axis: Axis, part: Summand) -> Axis:
    if not isinstance(axis, Summed):
        return axis
    return Block(*share(axis.size, part.members, part.place))


def stage_rectangles(operator: Operator, output: Rectangle) -> list[Rectangle]:
    """What each stage computes for a part; the last is the part itself."""
    rectangles = [output]
    for stage in reversed(operator.stages[1:]):
        before = read(stage.reads[0], rectangles[0])
        assert before is not None
        rectangles.insert(0, before)
    return rectangles


def read(axes: Iterable[Axis], output: Rectangle) -> Rectangle | None:
    """The rectangle that ``output`` reads through ``axes``; ``None`` where it is empty."""
    rectangle = tuple(axis.reads(output) for axis in axes)
    return rectangle if all(low < high for low, high in rectangle) else None


def signature(operator: Operator, output: Rectangle) -> Hashable:
    """What the time of a part depends on: functions and sizes, not names, places or devices.

    Parts of equal signature take the same time; its ``repr`` is the same in every process.
    """
    needs = [input_rectangle(operator, i, output) for i in range(len(operator.inputs))]
    return (
        tuple(
            (stage.kind, sizes(rectangle), stage.dtype, _plain(stage.attributes))
            for stage, rectangle in zip(
                operator.stages, stage_rectangles(operator, output), strict=True
            )
        ),
        tuple(need and sizes(need) for need in needs),
        tuple(sizes(r) for r in parameter_rectangles(operator, output).values()),
    )


def sizes(rectangle: Rectangle) -> tuple[int, ...]:
    """Its shape."""
    return tuple(high - low for low, high in rectangle)


def _plain(value: object) -> Hashable:
    if isinstance(value, dict):
        return tuple(sorted((str(k), _plain(v)) for k, v in value.items()))
    if isinstance(value, list | tuple):
        return tuple(_plain(part) for part in value)
    return value if isinstance(value, Hashable) else repr(value)
