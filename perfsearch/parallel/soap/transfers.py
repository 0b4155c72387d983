"""Sending what operators compute, and waiting for it, in compiled code.

``side`` is 0 for activations and 1 for gradients; ``plan`` is 0 for the current plan and 1 for the
proposal.
"""

from __future__ import annotations

from perfsearch.parallel.soap.compiled import compiled
from perfsearch.parallel.soap.tables import (
    ALL_TO_ALL,
    ARRIVED,
    ARRIVED_BACK,
    CLOCK,
    COPY,
    DEVICE,
    DEVICES,
    EDGE,
    EDGES,
    EXCHANGE,
    FRESH,
    HOST,
    IN_FIRST,
    LAUNCHED,
    LINK,
    LISTS,
    OUT_EDGES,
    OUT_FIRST,
    ROUTES,
    SEND_BACKWARD,
    SEND_FORWARD,
    SKIP_SHIFT,
    STATE,
    TRACE,
    TRACE_SIZE,
    TRACED,
    TRANSFER_HOST_NS,
    Integers,
)


@compiled
def trace(w: Integers, kind: int, subject: int, device: int, begin: int, end: int) -> None:
    """Record a task; those beyond the trace's size are counted and left out."""
    row = w[TRACED]
    if row < w[TRACE_SIZE]:
        place = w[TRACE] + 5 * row
        w[place], w[place + 1], w[place + 2] = kind, subject, device
        w[place + 3], w[place + 4] = begin, end
    w[TRACED] += 1


@compiled
def leads(t: Integers, w: Integers, edge: int, routes: int) -> bool:
    """Whether no earlier consumer has had the same moved to the same devices."""
    source = t[t[EDGE] + 3 * edge]
    for k in range(t[t[OUT_FIRST] + source], t[t[OUT_FIRST] + source + 1]):
        other = t[t[OUT_EDGES] + k]
        if other == edge:
            return True
        if w[routes + other] == w[routes + edge]:
            return False
    return True


@compiled
def half(w: Integers, route: int, direction: int) -> int:
    """Where a half's senders begin."""
    place: int = route + 8
    if direction:
        place = route + w[route + 4]
    return place


@compiled
def is_exchange(w: Integers, route: int) -> bool:
    """Whether a route goes with others of its consumer; collectives go by themselves."""
    return bool(w[route + 5] == EXCHANGE or w[route + 5] == ALL_TO_ALL)


@compiled
def is_last_source(t: Integers, w: Integers, edge: int, routes: int) -> bool:
    """Whether no exchange of the same consumer has a later producer, or an earlier edge here."""
    source, target = t[t[EDGE] + 3 * edge], t[t[EDGE] + 3 * edge + 1]
    for other in range(t[t[IN_FIRST] + target], t[t[IN_FIRST] + target + 1]):
        route, before = w[routes + other], t[t[EDGE] + 3 * other]
        if other == edge or route == 0 or not is_exchange(w, route):
            continue
        if (before > source or (before == source and other < edge)) and leads(t, w, other, routes):
            return False
    return True


@compiled
def arrival(t: Integers, w: Integers, edge: int, side: int, plan: int) -> int:
    """Place of the times at which an edge's tensors, or their gradients, are there."""
    table = w[ARRIVED_BACK] if side else w[ARRIVED]
    place: int = table + (plan * t[EDGES] + edge) * t[DEVICES]
    return place


@compiled
def _note_launch(t: Integers, w: Integers, edge: int, side: int, plan: int, step: int) -> None:
    w[w[LAUNCHED] + (2 * plan + side) * t[EDGES] + edge] = step
    if plan:
        w[w[FRESH] + side * t[EDGES] + edge] = w[CLOCK]


@compiled
def wait(t: Integers, w: Integers, edge: int, route: int, side: int, plan: int) -> None:
    """Let receivers' devices wait for what arrives, and put it together."""
    later = 0
    if plan and w[w[FRESH] + side * t[EDGES] + edge] != w[CLOCK]:
        plan = 0
        if side:  # it was sent in a step that was skipped
            later = w[SKIP_SHIFT]
    arrived = arrival(t, w, edge, side, plan)
    free = w[STATE] + DEVICE * t[DEVICES]
    place = half(w, route, side) + 4 * w[route + 2 * side]
    for _ in range(w[route + 2 * side + 1]):
        first = place + 2 + w[place]
        last = first + 4 * w[place + 1]
        for k in range(first, last, 4):
            device = w[k]
            begin = max(w[free + device], w[arrived + device] + later)
            w[free + device] = begin + w[k + 2]
            if w[TRACE_SIZE] and w[k + 2]:
                trace(w, COPY, edge, device, begin, begin + w[k + 2])
        place = last


@compiled
def send_all(t: Integers, w: Integers, operator: int, side: int, plan: int, step: int) -> None:
    """Move all exchanges of a consumer as one; backward, collectives by themselves as well."""
    devices, routes = t[DEVICES], w[ROUTES] + plan * t[EDGES]
    low, high = t[t[IN_FIRST] + operator], t[t[IN_FIRST] + operator + 1]
    count, only = 0, 0
    for edge in range(low, high):
        route = w[routes + edge]
        if route == 0 or not leads(t, w, edge, routes):
            continue
        if is_exchange(w, route):
            count, only = count + 1, edge
        elif side:
            send(t, w, edge, route, side, plan, step)
    if count == 1:
        send(t, w, only, w[routes + only], side, plan, step)
    if count < 2:
        return
    into, out, available = w[LISTS], w[LISTS] + devices, w[LISTS] + 2 * devices
    for k in range(3 * devices):
        w[into + k] = 0
    for phase in range(3):
        if phase == 2:
            _exchange(t, w, operator, side)
        for edge in range(low, high):
            route = w[routes + edge]
            if route == 0 or not is_exchange(w, route) or not leads(t, w, edge, routes):
                continue
            if phase == 0:
                _pack(t, w, edge, route, side)
            elif phase == 1:
                _gather_times(t, w, route, side, into, out, available)
            else:
                _note_launch(t, w, edge, side, plan, step)
                _copy_arrivals(t, w, route, side, arrival(t, w, edge, side, plan))


@compiled
def send(t: Integers, w: Integers, edge: int, route: int, side: int, plan: int, step: int) -> None:
    """Move one edge's tensors, or their gradients, and note when they are there."""
    devices, launch = t[DEVICES], t[TRANSFER_HOST_NS]
    host = w[STATE] + HOST * devices
    free = w[STATE] + DEVICE * devices
    link = w[STATE] + LINK * devices
    arrived = arrival(t, w, edge, side, plan)
    kind = SEND_BACKWARD if side else SEND_FORWARD
    _note_launch(t, w, edge, side, plan, step)
    _pack(t, w, edge, route, side)
    first = half(w, route, side)
    last = first + 4 * w[route + 2 * side]
    place = last
    for _ in range(w[route + 2 * side + 1]):
        sources, receivers = w[place], w[place + 1]
        place += 2
        available = 0
        for k in range(place, place + sources):
            available = max(available, w[free + w[k]])
        place += sources
        for k in range(place, place + 4 * receivers, 4):
            device = w[k]
            w[host + device] += launch
            begin = max(max(available, w[free + device]), max(w[link + device], w[host + device]))
            end = begin + w[k + 1]
            w[link + device] = end
            w[arrived + device] = end
            if w[TRACE_SIZE]:
                trace(w, kind, edge, device, begin, end)
        place += 4 * receivers
    for k in range(first, last, 4):
        if w[k + 2] >= 0:
            device = w[k]
            w[host + device] += launch
            begin = max(w[free + device], max(w[link + device], w[host + device]))
            end = begin + w[k + 2]
            w[link + device] = end
            if w[TRACE_SIZE]:
                trace(w, kind, edge, device, begin, end)


@compiled
def _pack(t: Integers, w: Integers, edge: int, route: int, side: int) -> None:
    free = w[STATE] + DEVICE * t[DEVICES]
    first = half(w, route, side)
    for k in range(first, first + 4 * w[route + 2 * side], 4):
        device, begin = w[k], w[free + w[k]]
        w[free + device] = begin + w[k + 1]
        if w[TRACE_SIZE] and w[k + 1]:
            trace(w, COPY, edge, device, begin, begin + w[k + 1])


@compiled
def _gather_times(
    t: Integers, w: Integers, route: int, side: int, into: int, out: int, available: int
) -> None:
    """Add up what each device takes in and gives out, the latency once."""
    free = w[STATE] + DEVICE * t[DEVICES]
    first = half(w, route, side)
    place = first + 4 * w[route + 2 * side]
    for k in range(first, place, 4):
        if w[k + 2] >= 0:
            w[out + w[k]] += w[k + 2] if w[out + w[k]] == 0 else w[k + 2] - w[k + 3]
    for _ in range(w[route + 2 * side + 1]):
        sources, receivers = w[place], w[place + 1]
        place += 2
        ready = 0
        for k in range(place, place + sources):
            ready = max(ready, w[free + w[k]])
        place += sources
        for k in range(place, place + 4 * receivers, 4):
            device = w[k]
            w[into + device] += w[k + 1] if w[into + device] == 0 else w[k + 1] - w[k + 3]
            w[available + device] = max(w[available + device], ready)
        place += 4 * receivers


@compiled
def _exchange(t: Integers, w: Integers, operator: int, side: int) -> None:
    """Let every device that takes part do so once."""
    devices = t[DEVICES]
    host, free = w[STATE] + HOST * devices, w[STATE] + DEVICE * devices
    link, lists = w[STATE] + LINK * devices, w[LISTS]
    for device in range(devices):
        time = max(w[lists + device], w[lists + devices + device])
        if time:
            w[host + device] += t[TRANSFER_HOST_NS]
            begin = max(w[lists + 2 * devices + device], w[free + device])
            begin = max(begin, max(w[link + device], w[host + device]))
            w[link + device] = begin + time
            if w[TRACE_SIZE]:
                kind = SEND_BACKWARD if side else SEND_FORWARD
                trace(w, kind, t[t[IN_FIRST] + operator], device, begin, begin + time)


@compiled
def _copy_arrivals(t: Integers, w: Integers, route: int, side: int, arrived: int) -> None:
    link = w[STATE] + LINK * t[DEVICES]
    place = half(w, route, side) + 4 * w[route + 2 * side]
    for _ in range(w[route + 2 * side + 1]):
        first = place + 2 + w[place]
        place = first + 4 * w[place + 1]
        for k in range(first, place, 4):
            w[arrived + w[k]] = w[link + w[k]]
