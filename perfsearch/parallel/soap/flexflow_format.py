"""FlexFlow's strategy files, in the text form of its releases up to 22.07.

The number of operators, then for each its name, type of device, number of dimensions, degrees,
number of parts and their devices, apart by white space. Degrees lie innermost first, so in the
reverse of ours; parts are counted with the innermost dimension running fastest, as ours are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from perfsearch.parallel.soap.configuration import (
    OperatorConfiguration,
    Plan,
    PlanError,
    validate,
)
from perfsearch.parallel.soap.graph import Graph

_MOST_DIMENSIONS = 8
_MOST_PARTS = 1024


@dataclass(frozen=True)
class Entry:
    """One operator of a file, degrees in our order."""

    name: str
    degrees: tuple[int, ...]
    devices: tuple[int, ...]


def entries(text: str) -> list[Entry]:
    """What a file says.

    Raises:
        PlanError: it is not such a file; the operator at which it ends being one is named.

    """
    words = iter(text.split())
    count = _number(words, "the number of operators", 0, 100_000)
    found = []
    for position in range(count):
        name = next(words, "")
        if not name:
            raise PlanError(f"FlexFlow strategy: {count} operators are announced, {position} there")
        where = f"operator {name}"
        _number(words, f"{where}: type of device", 0, 1)
        dims = _number(words, f"{where}: number of dimensions", 0, _MOST_DIMENSIONS)
        degrees = [_number(words, f"{where}: degree", 1, _MOST_PARTS) for _ in range(dims)]
        parts = _number(words, f"{where}: number of parts", 1, _MOST_PARTS)
        ids = [_number(words, f"{where}: device", 0, _MOST_PARTS) for _ in range(parts)]
        found.append(Entry(name, tuple(reversed(degrees)), tuple(ids)))
    if next(words, None) is not None:
        raise PlanError(f"FlexFlow strategy: there is more than its {count} operators")
    return found


def is_flexflow(text: str) -> bool:
    """Whether a file begins as one of FlexFlow's does: with a number by itself."""
    first = text.split(maxsplit=1)[:1]
    return bool(first) and first[0].isdecimal()


def parse(text: str, graph: Graph, device_count: int) -> Plan:
    """The plan of a file for a model: by name, or by place where no name is known.

    A loss that the file lacks is split over samples like what it reads.

    Raises:
        PlanError: it does not fit; the operator is named.

    """
    read = entries(text)
    planned = [o.name for o in graph.planned]
    known = set(planned)
    named = {entry.name: entry for entry in read}
    if not any(name in known for name in named):
        if len(read) not in (len(planned), len(planned) - 1):
            raise PlanError(
                f"operator {read[0].name if read else ''}: the model has none of this name, and "
                f"{len(read)} operators cannot be told by their order from {len(planned)}"
            )
        named = dict(zip(planned, read, strict=False))
    elif len(named) < len(read):
        twice = next(e.name for i, e in enumerate(read) if e.name in {f.name for f in read[:i]})
        raise PlanError(f"operator {twice}: the file has it twice")
    unknown = [name for name in named if name not in known]
    if unknown:
        raise PlanError(f"operator {unknown[0]}: the model has none of this name")
    plan: Plan = {}
    for operator in graph.planned:
        entry = named.get(operator.name)
        if entry is None:
            if operator.name != graph.output or operator.inputs[0] not in plan:
                raise PlanError(f"operator {operator.name}: the file has no entry of it")
            before = plan[operator.inputs[0]]
            degrees = [1] * len(operator.shape)
            if operator.shape and all(d == 1 for d in before.degrees[1:]):
                degrees[0] = before.degrees[0]
            count = degrees[0] if degrees else 1
            plan[operator.name] = OperatorConfiguration(tuple(degrees), before.devices[:count])
        else:
            plan[operator.name] = OperatorConfiguration(entry.degrees, entry.devices)
    validate(graph, plan, device_count)
    return plan


def _number(words: Iterator[str], what: str, low: int, high: int) -> int:
    word = next(words, None)
    if word is None or not word.isdecimal() or not low <= int(word) <= high:
        raise PlanError(f"FlexFlow strategy: {what}: {word!r}, a number from {low} to {high}")
    return int(word)
