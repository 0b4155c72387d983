"""What is moved between two configurations, worked out once a pair, in compiled code.

A *route* in the arena is: header, forward half, backward half, bytes that arrive. A half is its
senders and its groups, receivers that wait for the same senders:

    header    forward senders, forward groups, backward senders, backward groups,
              start of the backward half, kind forward, kind backward, receivers of bytes
    senders   (device, time of packing, duration where it receives nothing else -1, latency)...
    group     number of sources, of receivers, sources...,
              then (device, duration, time of putting together, latency)...
    bytes     (device, bytes)...
"""

from __future__ import annotations

from perfsearch.soap.simulator.memory import (
    ALL_GATHER,
    ALL_TO_ALL,
    ARENA,
    ARENA_SIZE,
    ARENA_USED,
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
    E_GRADIENT,
    E_NEED_OF,
    E_NEEDS,
    E_WIDTH,
    EDGE,
    EDGE_CLASS,
    EXCHANGE,
    KEY_SLOTS,
    KEYS,
    KEYS_USED,
    LAYOUT_FIRST,
    LINK_LEVEL,
    LISTS,
    NEED_COUNT,
    OPERATOR_CLASS,
    OWNED,
    PLACES,
    POINTS,
    RECTANGLES,
    REDUCE_SCATTER,
    VOLUME,
    Integers,
    Reals,
    compiled,
)

HEADER = 8
NO_SPACE = -1
"""Instead of a place, where the arena or its table must grow first."""


@compiled
def find_route(t: Integers, c: Reals, w: Integers, edge: int, source: int, target: int) -> int:
    """Place of the route of an edge between two configurations; 0 where nothing is moved."""
    record = t[EDGE_CLASS] + E_WIDTH * t[t[EDGE] + 3 * edge + 2]
    consumer = t[t[OPERATOR_CLASS] + t[t[EDGE] + 3 * edge + 1]]
    first = t[t[LAYOUT_FIRST] + t[t[CLASS_FIRST] + consumer]]
    key = source * t[NEED_COUNT] + t[t[record + E_NEED_OF] + target - first]
    mask = w[KEY_SLOTS] - 1
    slot = ((key * 2654435761) >> 7) & mask
    while w[w[KEYS] + slot] != -1:
        if w[w[KEYS] + slot] == key:
            known: int = w[w[PLACES] + slot]
            return known
        slot = (slot + 1) & mask
    parts = t[t[CONFIG] + C_WIDTH * source + C_PARTS] + t[t[CONFIG] + C_WIDTH * target + C_PARTS]
    # An upper bound: each receiver may be a group of its own.
    longest = HEADER + 14 * parts + 2 * parts * parts
    if w[ARENA_USED] + longest > w[ARENA_SIZE] or 2 * w[KEYS_USED] > mask:
        return NO_SPACE
    place: int = _build(t, c, w, edge, source, target)
    w[w[KEYS] + slot] = key
    w[w[PLACES] + slot] = place
    w[KEYS_USED] += 1
    return place


@compiled
def _build(t: Integers, c: Reals, w: Integers, edge: int, source: int, target: int) -> int:
    """Write a route to the arena."""
    if overlaps(t, w, edge, source, target) == 0:
        return 0
    sending, receiving = t[CONFIG] + C_WIDTH * source, t[CONFIG] + C_WIDTH * target
    senders, receivers = t[sending + C_PARTS], t[receiving + C_PARTS]
    at, to = t[sending + C_DEVICES], t[receiving + C_DEVICES]
    kind = collective(t, w, edge, source, target)
    start: int = w[ARENA] + w[ARENA_USED]
    end = _half(t, c, w, start, start + HEADER, 0, kind, senders, at, receivers, to)
    w[start + 4], w[start + 5], w[start + 6] = end - start, kind, EXCHANGE
    w[start + 2] = w[start + 3] = 0
    if t[t[EDGE_CLASS] + E_WIDTH * t[t[EDGE] + 3 * edge + 2] + E_GRADIENT]:
        back = EXCHANGE
        if kind == ALL_GATHER:
            back = REDUCE_SCATTER
        if kind == ALL_TO_ALL:
            back = ALL_TO_ALL
        w[start + 6] = back
        end = _half(t, c, w, start, end, 2, back, receivers, to, senders, at)
    arrivals = 0
    for j in range(receivers):
        arrived = 0
        for i in range(senders):
            if t[at + i] != t[to + j]:
                arrived += w[w[VOLUME] + j * t[DEVICES] + i]
        if arrived:
            w[end], w[end + 1] = t[to + j], arrived
            end += 2
            arrivals += 1
    w[start + 7] = arrivals
    w[ARENA_USED] = end - w[ARENA]
    return start


@compiled
def _half(
    t: Integers,
    c: Reals,
    w: Integers,
    start: int,
    end: int,
    header: int,
    kind: int,
    senders: int,
    at: int,
    receivers: int,
    to: int,
) -> int:
    """Write senders and groups of one direction, gradients for ``header`` 2.

    Returns:
        Where they end.

    """
    devices = t[DEVICES]
    by_receiver, by_sender = (devices, 1) if header == 0 else (1, devices)
    volume = w[VOLUME]
    received = w[LISTS]
    sources, sent, targets = received + devices, received + 2 * devices, received + 3 * devices
    part_at, receives = received + 4 * devices, received + 5 * devices
    for k in range(6 * devices):
        w[received + k] = 0
    for i in range(senders):
        w[part_at + t[at + i]] = i + 1
    across, total, largest = 0, 0, 0
    for j in range(receivers):
        needed = 0
        for i in range(senders):
            amount = w[volume + j * by_receiver + i * by_sender]
            needed += amount
            if amount and t[at + i] != t[to + j]:
                w[received + j] += amount
                w[sources + j] += 1
                w[sent + i] += amount
                w[targets + i] += 1
                level = t[t[LINK_LEVEL] + devices * t[at + i] + t[to + j]]
                across = max(across, level)
        total += needed
        largest = max(largest, needed)
        if w[received + j]:
            w[receives + t[to + j]] = 1
    members = max(senders, receivers)
    common = 0
    if kind in (ALL_GATHER, BROADCAST):
        common = curve_time(t, c, across, kind, members, float(largest))
    elif kind != EXCHANGE:
        common = curve_time(t, c, across, kind, members, total / members)
    least = curve_time(t, c, across, kind, members, 0.0) if kind != EXCHANGE else 0
    sending = 0
    for i in range(senders):
        if w[targets + i]:
            time, latency = -1, 0
            if not w[receives + t[at + i]]:
                time, latency = common, least
                if kind == EXCHANGE:
                    time = curve_time(t, c, across, kind, w[targets + i], float(w[sent + i]))
                    latency = curve_time(t, c, across, kind, w[targets + i], 0.0)
            w[end], w[end + 1], w[end + 2] = t[at + i], copy_time(t, w[sent + i]), time
            w[end + 3] = latency
            end += 4
            sending += 1
    groups = 0
    for j in range(receivers):
        if w[received + j] == 0:
            continue
        first = True
        for k in range(j):
            if w[received + k] and _same_sources(w, volume, by_receiver, by_sender, j, k, senders):
                first = False
                break
        if not first:
            continue
        groups += 1
        place = end
        end += 2
        for i in range(senders):
            if w[volume + j * by_receiver + i * by_sender]:
                w[end] = t[at + i]
                end += 1
        w[place] = end - place - 2
        count = 0
        for k in range(j, receivers):
            if w[received + k] == 0:
                continue
            if not _same_sources(w, volume, by_receiver, by_sender, j, k, senders):
                continue
            time, latency = common, least
            if kind == EXCHANGE:
                own = w[part_at + t[to + k]] - 1
                peers, amount = w[sources + k], w[received + k]
                if own >= 0:
                    peers, amount = max(peers, w[targets + own]), max(amount, w[sent + own])
                time = curve_time(t, c, across, kind, peers, float(amount))
                latency = curve_time(t, c, across, kind, peers, 0.0)
            needed = 0
            for i in range(senders):
                needed += w[volume + k * by_receiver + i * by_sender]
            w[end], w[end + 1], w[end + 2] = t[to + k], time, copy_time(t, needed)
            w[end + 3] = latency
            end += 4
            count += 1
        w[place + 1] = count
    w[start + header] = sending
    w[start + header + 1] = groups
    return end


@compiled
def _same_sources(
    w: Integers, volume: int, by_receiver: int, by_sender: int, j: int, k: int, senders: int
) -> bool:
    for i in range(senders):
        a = w[volume + j * by_receiver + i * by_sender] > 0
        b = w[volume + k * by_receiver + i * by_sender] > 0
        if a != b:
            return False
    return True


# -----------------------------------------------------------------------------
# What two configurations have in common, which collective that is, and what it takes, in
# compiled code.

_KINDS = 6


@compiled
def curve_time(t: Integers, c: Reals, across: int, kind: int, members: int, size: float) -> int:
    """Nanoseconds of a transfer, between the points of its curve; at least that of the first.

    ``c`` has the sizes of the points, then their times by (level of the links, kind, members).
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
    """Which collective the forward transfers are, as ``plan.pattern`` has it.

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
