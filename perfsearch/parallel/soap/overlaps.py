"""What two configurations have in common, which collective that is, and what it takes, in compiled
code.
"""

from __future__ import annotations

from perfsearch.parallel.soap.compiled import compiled
from perfsearch.parallel.soap.tables import (
    ALL_GATHER,
    ALL_TO_ALL,
    BROADCAST,
    C_DEVICES,
    C_LAYOUT,
    C_PARTS,
    C_WIDTH,
    CLASS_FIRST,
    CONFIG,
    COPY_NS,
    COPY_NS_PER_MIB,
    DEVICES,
    E_BYTES,
    E_DIMS,
    E_NEEDS,
    E_WIDTH,
    EDGE,
    EDGE_CLASS,
    EXCHANGE,
    OPERATOR_CLASS,
    OWNED,
    POINTS,
    RECTANGLES,
    VOLUME,
    Integers,
    Reals,
)

_KINDS = 6


@compiled
def curve_time(t: Integers, c: Reals, across: int, kind: int, members: int, size: float) -> int:
    """Nanoseconds of a transfer, between the points of its curve; at least that of the first.

    ``c`` has the sizes of the points, then their times by (within or across nodes, kind, members).
    """
    points = t[POINTS]
    times = points + ((across * _KINDS + kind) * (t[DEVICES] + 1) + members) * points
    if size <= c[0]:
        return int(c[times] + 0.5)
    k = 0
    while k < points - 2 and size > c[k + 1]:
        k += 1
    slope = (c[times + k + 1] - c[times + k]) / (c[k + 1] - c[k])
    return int(c[times + k] + slope * (size - c[k]) + 0.5)


@compiled
def needs_of(t: Integers, edge: int, layout: int) -> int:
    """Place of the rectangles that the parts of the consumer's layout read."""
    record = t[EDGE_CLASS] + E_WIDTH * t[t[EDGE] + 3 * edge + 2]
    consumer = t[t[OPERATOR_CLASS] + t[t[EDGE] + 3 * edge + 1]]
    place: int = t[RECTANGLES] + t[t[record + E_NEEDS] + layout - t[t[CLASS_FIRST] + consumer]]
    return place


@compiled
def overlaps(t: Integers, w: Integers, edge: int, source: int, target: int) -> int:
    """Fill the volume, in bytes by receiving and sending part; return the bytes that move."""
    record = t[EDGE_CLASS] + E_WIDTH * t[t[EDGE] + 3 * edge + 2]
    dims, size = t[record + E_DIMS], t[record + E_BYTES]
    sending, receiving = t[CONFIG] + C_WIDTH * source, t[CONFIG] + C_WIDTH * target
    need = needs_of(t, edge, t[receiving + C_LAYOUT])
    own = t[RECTANGLES] + t[t[OWNED] + t[sending + C_LAYOUT]]
    moved = 0
    for j in range(t[receiving + C_PARTS]):
        for i in range(t[sending + C_PARTS]):
            volume = size
            for d in range(dims):
                a, b = need + 2 * (j * dims + d), own + 2 * (i * dims + d)
                volume *= max(min(t[a + 1], t[b + 1]) - max(t[a], t[b]), 0)
            w[w[VOLUME] + j * t[DEVICES] + i] = volume
            if t[t[sending + C_DEVICES] + i] != t[t[receiving + C_DEVICES] + j]:
                moved += volume
    return moved


@compiled
def collective(t: Integers, w: Integers, edge: int, source: int, target: int) -> int:
    """Which collective the forward transfers are, as ``redistribute.pattern`` has it.

    ``EXCHANGE`` where they are none.
    """
    sending, receiving = t[CONFIG] + C_WIDTH * source, t[CONFIG] + C_WIDTH * target
    senders, receivers = t[sending + C_PARTS], t[receiving + C_PARTS]
    dims = t[t[EDGE_CLASS] + E_WIDTH * t[t[EDGE] + 3 * edge + 2] + E_DIMS]
    need = needs_of(t, edge, t[receiving + C_LAYOUT])
    first, needing, same = -1, 0, True
    for j in range(receivers):
        here = need + 2 * j * dims
        if _is_empty(t, here, dims):
            continue
        needing += 1
        if first < 0:
            first = here
        for k in range(2 * dims):
            same = same and t[here + k] == t[first + k]
    if senders == 1 and same:
        return BROADCAST if needing > 1 else EXCHANGE
    if senders != needing:
        return EXCHANGE
    for i in range(senders):
        found = False
        for j in range(receivers):
            if _is_empty(t, need + 2 * j * dims, dims):
                continue
            if w[w[VOLUME] + j * t[DEVICES] + i] == 0:
                return EXCHANGE
            found = found or t[t[receiving + C_DEVICES] + j] == t[t[sending + C_DEVICES] + i]
        if not found:
            return EXCHANGE
    own = t[RECTANGLES] + t[t[OWNED] + t[sending + C_LAYOUT]]
    return ALL_GATHER if same and _stacks(t, own, sending, first, dims) else ALL_TO_ALL


@compiled
def _is_empty(t: Integers, rectangle: int, dims: int) -> bool:
    empty = False
    for k in range(rectangle, rectangle + 2 * dims, 2):
        empty = empty or t[k] >= t[k + 1]
    return empty


@compiled
def _stacks(t: Integers, own: int, sending: int, need: int, dims: int) -> bool:
    """Whether equal parts, in the order of devices, make up what is needed along one dimension."""
    senders, at = t[sending + C_PARTS], t[sending + C_DEVICES]
    varying = -1
    for d in range(dims):
        for i in range(senders):
            part = own + 2 * (i * dims + d)
            if t[part] != t[need + 2 * d] or t[part + 1] != t[need + 2 * d + 1]:
                if varying not in (-1, d):
                    return False
                varying = d
    if varying < 0:
        return False
    low, size = t[need + 2 * varying], t[need + 2 * varying + 1] - t[need + 2 * varying]
    if size % senders:
        return False
    each = size // senders
    for i in range(senders):
        before = 0
        for k in range(senders):
            before += t[at + k] < t[at + i]
        part = own + 2 * (i * dims + varying)
        if t[part] != low + before * each or t[part + 1] != low + (before + 1) * each:
            return False
    return True


@compiled
def copy_time(t: Integers, size: int) -> int:
    """Nanoseconds of packing, or putting together, so many bytes."""
    return int(t[COPY_NS] + t[COPY_NS_PER_MIB] * size / 1048576.0 + 0.5)
