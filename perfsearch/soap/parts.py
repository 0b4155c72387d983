"""What follows of an operator's degrees alone, and where its parts may be put."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from perfsearch.soap.graph import Graph, Operator, Rectangle, Role, Summand, volume
from perfsearch.soap.plan import OperatorConfiguration, choices, part_rectangles, sums_of
from perfsearch.soap.rules.base import parameter_rectangles, stage_rectangles

MOST_SUBSETS = 70
"""Device sets of one size that are all offered; beyond, regular ones are."""

_ALL_DEGREES_UP_TO = 8
"""Devices up to which every degree is offered; beyond, divisors of their number are."""

ITEM_BYTES = {
    "float64": 8,
    "int64": 8,
    "complex64": 8,
    "float32": 4,
    "int32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


TABLES = ("embedding", "embedding_bag")
"""Kinds whose weights may be updated by the rows that were read."""


def item_bytes(dtype: str) -> int:
    """Bytes of an element.

    Raises:
        ValueError: the type is not one that tensors of a training step have.

    """
    if dtype not in ITEM_BYTES:
        raise ValueError(f"dtype {dtype}: its size is unknown; known: {', '.join(ITEM_BYTES)}")
    return ITEM_BYTES[dtype]


def is_real(dtype: str) -> bool:
    """Whether a gradient can come back."""
    return dtype.startswith(("float", "bfloat"))


@dataclass(frozen=True)
class Layout:
    """An operator at some degrees.

    Attributes:
        degrees: along each dimension of the output.
        sums: parts that share the sums which their elements are; 1: none do.
        parts: what each part computes.
        resident_bytes: of each part: weights, gradients, optimizer state, kept activations.
        weight_bytes: of each part, trained weights.
        syncs: groups of parts that hold the same weights, with the bytes to be summed.
        by_rows: whether each part's weights are a table that no other part has, so that plain
            gradient descent updates it by rows.

    """

    degrees: tuple[int, ...]
    sums: int
    parts: tuple[Rectangle, ...]
    resident_bytes: tuple[int, ...]
    weight_bytes: tuple[int, ...]
    syncs: tuple[tuple[tuple[int, ...], int], ...]
    by_rows: bool = False


def class_key(graph: Graph, operator: Operator, owned: frozenset[str]) -> Hashable:
    """Equal for operators that differ in nothing but names."""
    return (
        operator.shape,
        operator.input_shapes,
        operator.dtype,
        operator.roles,
        gradients(graph, operator),
        tuple((s.kind, s.shape, s.reads, s.dtype, repr(s.attributes)) for s in operator.stages),
        tuple(
            (p.name, p.shape, p.dtype, p.axes, p.trained, p.key in owned)
            for p in operator.parameters
        ),
    )


def gradients(graph: Graph, operator: Operator) -> tuple[bool, ...]:
    """For each input whether backward computes its gradient: whether a weight lies behind it."""
    reached = _reached(graph)
    return tuple(name in reached for name in operator.inputs)


@lru_cache(maxsize=8)
def _reached(graph: Graph) -> frozenset[str]:
    """Operators through which a gradient flows to trained weights."""
    found: set[str] = set()
    for operator in graph.operators:
        trained = any(p.trained for p in operator.parameters)
        if is_real(operator.dtype) and (trained or not found.isdisjoint(operator.inputs)):
            found.add(operator.name)
    return frozenset(found)


def owned_keys(graph: Graph) -> dict[str, frozenset[str]]:
    """By operator the keys of the weights that are accounted for with it.

    A tied weight goes with the first operator that uses it, whose backward task is the last one.
    """
    seen: set[str] = set()
    found = {}
    for operator in graph.planned:
        keys = {p.key for p in operator.parameters} - seen
        seen |= keys
        found[operator.name] = frozenset(keys)
    return found


def degrees_of(operator: Operator, devices: int, roles: frozenset[Role]) -> list[tuple[int, ...]]:
    """The degrees that a search may choose from."""
    offered = choices(operator, devices, roles)
    if devices <= _ALL_DEGREES_UP_TO:
        return offered
    return [d for d in offered if devices % math.prod(d) == 0]


def splits_of(
    operator: Operator, devices: int, roles: frozenset[Role]
) -> list[tuple[tuple[int, ...], int]]:
    """The degrees that a search may choose from, each with the numbers of parts that share sums.

    Weights are then split by what is summed over, so that parameters must be allowed to be split.
    """
    found = []
    for degrees in degrees_of(operator, devices, roles):
        shared = sums_of(operator, degrees) if Role.PARAMETER in roles else []
        found += [(degrees, sums) for sums in (1, *shared)]
    return found


def layout_of(
    operator: Operator,
    degrees: tuple[int, ...],
    owned: frozenset[str],
    state_per_weight: float,
    updates_rows: bool = False,
    sums: int = 1,
) -> Layout:
    """Work out what follows of the degrees.

    Args:
        operator: which.
        degrees: along each dimension of its output.
        owned: keys of the weights that are accounted for with it.
        state_per_weight: bytes of optimizer state for a byte of weights.
        updates_rows: whether tables of one device alone are updated by rows.
        sums: parts that share sums.

    """
    count = math.prod(degrees)
    parts = part_rectangles(operator, OperatorConfiguration(degrees, tuple(range(count)), sums))
    single = len(operator.parameters) == 1 and operator.parameters[0].trained
    table = updates_rows and operator.kind in TABLES and len(operator.stages) == 1 and single
    tiles_of = [parameter_rectangles(operator, part) for part in parts]
    by_rows = table and len({tuple(t.values()) for t in tiles_of}) == count
    copies = 1 if by_rows else 2 + state_per_weight
    resident = [0] * count
    weights = [0] * count
    replicas: dict[tuple[str, Rectangle], list[int]] = {}
    for place, part in enumerate(parts):
        for stage, rectangle in zip(operator.stages, stage_rectangles(operator, part), strict=True):
            resident[place] += volume(rectangle) * item_bytes(stage.dtype)
        tiles = tiles_of[place]
        for parameter in operator.parameters:
            if parameter.key not in owned:
                continue
            size = volume(tiles[parameter.name]) * item_bytes(parameter.dtype)
            if not parameter.trained:
                resident[place] += size
                continue
            weights[place] += 0 if by_rows else size
            resident[place] += round(size * copies)
            replicas.setdefault((parameter.name, tiles[parameter.name]), []).append(place)
    syncs = _syncs(operator, replicas)
    return Layout(degrees, sums, tuple(parts), tuple(resident), tuple(weights), syncs, by_rows)


def _syncs(
    operator: Operator, replicas: dict[tuple[str, Rectangle], list[int]]
) -> tuple[tuple[tuple[int, ...], int], ...]:
    dtypes = {p.name: p.dtype for p in operator.parameters}
    total: dict[tuple[int, ...], int] = {}
    for (name, tile), members in replicas.items():
        if len(members) > 1:
            size = volume(tile) * item_bytes(dtypes[name])
            total[tuple(members)] = total.get(tuple(members), 0) + size
    return tuple(sorted(total.items()))


def device_lists(degrees: tuple[int, ...], devices: int) -> list[tuple[int, ...]]:
    """Devices of the parts, in order: sets of devices, and the two orders of two dimensions."""
    count = math.prod(degrees)
    found: dict[tuple[int, ...], None] = {}
    split = [i for i, degree in enumerate(degrees) if degree > 1]
    for chosen in _device_sets(count, devices):
        found[chosen] = None
        if len(split) == 2:
            rows, columns = degrees[split[0]], degrees[split[1]]
            turned = tuple(chosen[c * rows + r] for r in range(rows) for c in range(columns))
            found[turned] = None
    return list(found)


def _device_sets(count: int, devices: int) -> Iterator[tuple[int, ...]]:
    if math.comb(devices, count) <= MOST_SUBSETS:
        yield from itertools.combinations(range(devices), count)
        return
    for start in range(0, devices - count + 1, count):
        yield tuple(range(start, start + count))
    stride = devices // count
    if stride > 1 and count > 1:
        for start in range(stride):
            yield tuple(range(start, start + count * stride, stride))


# -----------------------------------------------------------------------------
# Partial reductions: which parts of an operator all-reduce while they compute, and how much.

_DOUBLE_BYTES = 8
_LEAST_BYTES = 4  # half precision is computed in single


def reduction_partners(operator: Operator, parts: Sequence[Rectangle]) -> list[tuple[int, ...]]:
    """By part, the parts that it reduces with, itself included; empty where nothing is reduced.

    A batch norm reduces over parts with the same channels, a loss over all of its parts, and parts
    that share sums over each other.
    """
    if parts and isinstance(parts[0], Summand):
        shared = [part for part in parts if isinstance(part, Summand)]
        return [
            tuple(place for place, other in enumerate(shared) if other.span == mine.span)
            for mine in shared
        ]
    if operator.kind == "class_loss":
        return [tuple(range(len(parts)))] * len(parts)
    if operator.kind == "batch_norm":
        channels = [stage_rectangles(operator, part)[0][1] for part in parts]
        return [
            tuple(place for place, other in enumerate(channels) if other == mine)
            for mine in channels
        ]
    return []


def shares_statistics(operator: Operator, part: Rectangle) -> bool:
    """Whether the part is a batch norm's and has not all elements of its channels."""
    if operator.kind != "batch_norm":
        return False
    own, shape = stage_rectangles(operator, part)[0], operator.stages[0].shape
    return any(dim != 1 and span != (0, shape[dim]) for dim, span in enumerate(own))


def reduction_bytes(operator: Operator, part: Rectangle, gradient: bool) -> tuple[int, int]:
    """Bytes that a part reduces with its partners, forward and backward; 0: nothing.

    Where sums are shared it is what all partners have of them.

    Args:
        operator: has partners.
        part: of it.
        gradient: whether backward computes the gradient of its first input.

    """
    if isinstance(part, Summand):
        partial = part.of_all(stage_rectangles(operator, part)[0])
        both = volume(partial) * item_bytes(operator.stages[0].dtype)
        return both, both
    size = max(item_bytes(operator.stages[0].dtype), _LEAST_BYTES)
    if operator.kind == "class_loss":
        return (size if operator.attributes["mean"] else 0), 0
    low, high = stage_rectangles(operator, part)[0][1]
    return 2 * (high - low) * _DOUBLE_BYTES, 2 * (high - low) * size if gradient else 0
