"""How each operator is split, and which device computes which part."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from perfsearch.parallel.soap.axes import Range, Rectangle
from perfsearch.parallel.soap.graph import Graph, Operator, Role


@dataclass(frozen=True)
class OperatorConfiguration:
    """One operator's.

    Attributes:
        degrees: number of parts along each dimension of the output.
        devices: part ``k``, in row-major order of the degrees, runs on ``devices[k]``; no device
            has two.

    """

    degrees: tuple[int, ...]
    devices: tuple[int, ...]


Plan = dict[str, OperatorConfiguration]
"""By operator; those of ``Graph.inputs`` have none."""


class PlanError(ValueError):
    """A plan does not fit the model or the machine."""


def part_rectangles(operator: Operator, configuration: OperatorConfiguration) -> list[Rectangle]:
    """What each part computes; where shares are uneven the first ones are larger by one."""
    ranges = [
        [share(size, degree, i) for i in range(degree)]
        for size, degree in zip(operator.shape, configuration.degrees, strict=True)
    ]
    return [tuple(part) for part in itertools.product(*ranges)]


def share(size: int, degree: int, index: int) -> Range:
    """Range ``index`` of ``size`` indices shared out in ``degree`` parts."""
    each, rest = divmod(size, degree)
    start = index * each + min(index, rest)
    return (start, start + each + (index < rest))


def data_parallel(graph: Graph, devices: Sequence[int]) -> Plan:
    """Every operator over samples, on all devices; what has no samples runs on the first one."""
    return {o.name: over_samples(o, devices) for o in graph.planned}


def over_samples(operator: Operator, devices: Sequence[int]) -> OperatorConfiguration:
    """Split over samples as far as there are any; whole on the first device otherwise."""
    degrees = [1] * len(operator.shape)
    for dim, role in enumerate(operator.roles):
        if role is Role.SAMPLE:
            degrees[dim] = min(len(devices), operator.shape[dim])
            break
    return OperatorConfiguration(tuple(degrees), tuple(devices[: math.prod(degrees)]))


def choices(
    operator: Operator,
    device_count: int,
    roles: frozenset[Role] = frozenset(Role),
    even: bool = False,
) -> list[tuple[int, ...]]:
    """Legal degrees, the undivided first.

    Args:
        operator: which.
        device_count: most parts.
        roles: of dimensions that may be split.
        even: only into parts of equal size.

    """
    limits = [
        size if role in roles else 1
        for size, role in zip(operator.shape, operator.roles, strict=True)
    ]
    return sorted(_degrees(operator.shape, limits, device_count, even), key=math.prod)


def _degrees(
    shape: Sequence[int], limits: Sequence[int], most: int, even: bool
) -> Iterator[tuple[int, ...]]:
    if not shape:
        yield ()
        return
    for degree in range(1, min(max(limits[0], 1), most) + 1):
        if not even or degree == 1 or shape[0] % degree == 0:
            for rest in _degrees(shape[1:], limits[1:], most // degree, even):
                yield (degree, *rest)


def validate(graph: Graph, plan: Plan, device_count: int) -> None:
    """See that a plan fits.

    Raises:
        PlanError: naming the operator, what it has, and what it may have.

    """
    known = {operator.name for operator in graph.planned}
    unknown = sorted(set(plan) - known)
    if unknown:
        raise PlanError(f"operator {unknown[0]}: the model has none of this name")
    for operator in graph.planned:
        if operator.name not in plan:
            raise PlanError(f"operator {operator.name}: the plan has no configuration of it")
        _check(operator, plan[operator.name], device_count)


def _check(operator: Operator, configuration: OperatorConfiguration, device_count: int) -> None:
    def fail(reason: str) -> PlanError:
        return PlanError(f"operator {operator.name} ({operator.kind}): {reason}")

    degrees, devices = configuration.degrees, configuration.devices
    if len(degrees) != len(operator.shape):
        raise fail(f"degrees {list(degrees)} for an output of shape {list(operator.shape)}")
    for dim, (degree, size, role) in enumerate(
        zip(degrees, operator.shape, operator.roles, strict=True)
    ):
        if degree < 1 or degree > max(size, 1):
            raise fail(f"degree {degree} of dimension {dim}: must be from 1 to {max(size, 1)}")
        if degree > 1 and role is None:
            raise fail(f"degree {degree} of dimension {dim}: it cannot be split, so must be 1")
    if len(devices) != math.prod(degrees):
        raise fail(f"{math.prod(degrees)} parts, but devices {list(devices)}: one each is needed")
    if len(set(devices)) != len(devices):
        raise fail(f"devices {list(devices)}: each can have one part only")
    absent = [d for d in devices if not 0 <= d < device_count]
    if absent:
        raise fail(f"device {absent[0]}: there are {device_count}, from 0 to {device_count - 1}")
