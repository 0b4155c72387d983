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

from perfsearch.parallel.soap.compiled import compiled
from perfsearch.parallel.soap.overlaps import (
    collective,
    copy_time,
    curve_time,
    overlaps,
)
from perfsearch.parallel.soap.tables import (
    ALL_GATHER,
    ALL_TO_ALL,
    ARENA,
    ARENA_SIZE,
    ARENA_USED,
    BROADCAST,
    C_DEVICES,
    C_PARTS,
    C_WIDTH,
    CLASS_FIRST,
    CONFIG,
    DEVICES,
    E_GRADIENT,
    E_NEED_OF,
    E_WIDTH,
    EDGE,
    EDGE_CLASS,
    EXCHANGE,
    KEY_SLOTS,
    KEYS,
    KEYS_USED,
    LAYOUT_FIRST,
    LISTS,
    NEED_COUNT,
    NODE_OF,
    OPERATOR_CLASS,
    PLACES,
    REDUCE_SCATTER,
    VOLUME,
    Integers,
    Reals,
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
                if t[t[NODE_OF] + t[at + i]] != t[t[NODE_OF] + t[to + j]]:
                    across = 1
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
