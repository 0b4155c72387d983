"""The simulated step, operator by operator, in compiled code.

Ranks run the same schedule: operators in the order of the user's code, then backward in the
reverse order. A task begins when the host has launched it, when its device is free, and when what
it reads has arrived; nothing else decides, so no queue is needed and ties cannot arise.

Step ``s`` is the forward task of operator ``s``, or with ``n`` operators the backward task of
operator ``2 n - 1 - s``. What an operator computes is sent as soon as it is there, and waited for
where it is read first; a transfer begins at a device when that has done what comes before it, as a
stream that waits for another one does. Consumers that need the same share one transfer.
"""

from __future__ import annotations

from perfsearch.parallel.soap.compiled import compiled
from perfsearch.parallel.soap.tables import (
    ARRIVED,
    ARRIVED_BACK,
    BACKWARD,
    BEFORE,
    C_DEVICES,
    C_GROUP_COUNT,
    C_GROUPS,
    C_PARTS,
    C_ROWS,
    C_TIMES,
    C_WIDTH,
    CLOCK,
    CONFIG,
    DEVICE,
    DEVICES,
    EDGE,
    EDGES,
    FORWARD,
    FRESH,
    HOST,
    HOST_IS_FREE,
    IN_FIRST,
    LINK,
    LIVE,
    LIVE_FIRST,
    MOVED,
    OPERATORS,
    OPTIMIZE,
    OPTIMIZER,
    OPTIMIZER_NS,
    OUT_EDGES,
    OUT_FIRST,
    P_BACKWARD,
    P_BACKWARD_HOST,
    P_FORWARD,
    P_FORWARD_HOST,
    P_WIDTH,
    PLAN,
    ROUTES,
    SEND_BACKWARD,
    SEND_FORWARD,
    STATE,
    STEP_NS,
    STEPS_RUN,
    SYNC,
    SYNC_HOST_NS,
    SYNC_ON_LINK,
    SYNCHRONISE,
    TRACE,
    TRACE_SIZE,
    TRACED,
    TRANSFER_HOST_NS,
    Integers,
)


@compiled
def run(t: Integers, w: Integers, first: int, stop: int, settled: int, plan: int) -> int:
    """Simulate the steps ``first`` to ``stop`` from the state in ``w`` on.

    Args:
        t: the job.
        w: the search.
        first: step to begin with.
        stop: step to end before.
        settled: step from which on the timelines may be the current plan's again.
        plan: 0 for the current plan, 1 for the proposal, whose changed operators lie at or after
            ``first``'s.

    Returns:
        ``stop``, or the first step before which everything that still matters is as in the current
        plan, later by one and the same time.

    """
    operators, devices = t[OPERATORS], t[DEVICES]
    clock = w[CLOCK]
    size = 4 * devices
    state = w[STATE]
    free = state + DEVICE * devices
    host = state + HOST * devices
    before = w[BEFORE] + plan * (2 * operators + 1) * size
    plans = w[PLAN] + plan * operators
    routes = w[ROUTES] + plan * t[EDGES]
    step = first
    while step < stop:
        if plan == 1 and step >= settled and is_shifted(t, w, step):
            break
        here = before + step * size
        for k in range(size):
            w[here + k] = w[state + k]
        backward = step >= operators
        operator = 2 * operators - 1 - step if backward else step
        if backward:
            for k in range(t[t[OUT_FIRST] + operator], t[t[OUT_FIRST] + operator + 1]):
                edge = t[t[OUT_EDGES] + k]
                if w[routes + edge] and leads(t, w, edge, routes):
                    later = 0
                    arrived = w[ARRIVED_BACK] + edge * devices
                    if plan == 1:
                        other = t[t[EDGE] + 3 * edge + 1]
                        if w[w[FRESH] + operators + other] == clock:
                            arrived += t[EDGES] * devices
                        else:
                            later = w[w[MOVED] + other]
                    _wait(t, w, w[routes + edge], 2, arrived, later)
        else:
            for edge in range(t[t[IN_FIRST] + operator], t[t[IN_FIRST] + operator + 1]):
                if w[routes + edge] and leads(t, w, edge, routes):
                    arrived = w[ARRIVED] + edge * devices
                    if plan == 1 and w[w[FRESH] + t[t[EDGE] + 3 * edge]] == clock:
                        arrived += t[EDGES] * devices
                    _wait(t, w, w[routes + edge], 0, arrived, 0)
        record = t[CONFIG] + C_WIDTH * w[plans + operator]
        at, row = t[record + C_DEVICES], t[record + C_ROWS]
        on_host = P_BACKWARD_HOST if backward else P_FORWARD_HOST
        on_device = P_BACKWARD if backward else P_FORWARD
        for k in range(at, at + t[record + C_PARTS]):
            device = t[k]
            launched = w[host + device] + t[row + on_host]
            w[host + device] = launched
            begin = max(w[free + device], launched)
            end = begin + t[row + on_device]
            w[free + device] = end
            row += P_WIDTH
            if w[TRACE_SIZE]:
                trace(w, BACKWARD if backward else FORWARD, operator, device, begin, end)
        if backward:
            arrived = w[ARRIVED_BACK] + plan * t[EDGES] * devices
            for edge in range(t[t[IN_FIRST] + operator], t[t[IN_FIRST] + operator + 1]):
                if w[routes + edge] and leads(t, w, edge, routes):
                    _send(t, w, edge, w[routes + edge], 2, arrived + edge * devices)
            if t[record + C_GROUP_COUNT]:
                _synchronise(t, w, operator, record)
        else:
            arrived = w[ARRIVED] + plan * t[EDGES] * devices
            for k in range(t[t[OUT_FIRST] + operator], t[t[OUT_FIRST] + operator + 1]):
                edge = t[t[OUT_EDGES] + k]
                if w[routes + edge] and leads(t, w, edge, routes):
                    _send(t, w, edge, w[routes + edge], 0, arrived + edge * devices)
        if plan == 1:
            w[w[FRESH] + (operators if backward else 0) + operator] = clock
        step += 1
    w[STEPS_RUN] += step - first
    if step == 2 * operators:
        here = before + step * size
        for k in range(size):
            w[here + k] = w[state + k]
    return step


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
def _half(w: Integers, route: int, direction: int) -> int:
    """Where a half's senders begin."""
    place: int = route + 8
    if direction:
        place = route + w[route + 4]
    return place


@compiled
def _wait(t: Integers, w: Integers, route: int, direction: int, arrived: int, later: int) -> None:
    """Let receivers' devices wait for what arrives, and put it together."""
    free = w[STATE] + DEVICE * t[DEVICES]
    place = _half(w, route, direction) + 3 * w[route + direction]
    for _ in range(w[route + direction + 1]):
        first = place + 2 + w[place]
        last = first + 3 * w[place + 1]
        for k in range(first, last, 3):
            device = w[k]
            w[free + device] = max(w[free + device], w[arrived + device] + later) + w[k + 2]
        place = last


@compiled
def _send(t: Integers, w: Integers, edge: int, route: int, direction: int, arrived: int) -> None:
    """Move an edge's tensors, gradients for direction 2, and note when they are there."""
    devices, launch = t[DEVICES], t[TRANSFER_HOST_NS]
    host = w[STATE] + HOST * devices
    free = w[STATE] + DEVICE * devices
    link = w[STATE] + LINK * devices
    kind = SEND_BACKWARD if direction else SEND_FORWARD
    first = _half(w, route, direction)
    last = first + 3 * w[route + direction]
    for k in range(first, last, 3):
        w[free + w[k]] += w[k + 1]
    place = last
    for _ in range(w[route + direction + 1]):
        sources, receivers = w[place], w[place + 1]
        place += 2
        available = 0
        for k in range(place, place + sources):
            available = max(available, w[free + w[k]])
        place += sources
        for k in range(place, place + 3 * receivers, 3):
            device = w[k]
            w[host + device] += launch
            begin = max(max(available, w[free + device]), max(w[link + device], w[host + device]))
            end = begin + w[k + 1]
            w[link + device] = end
            w[arrived + device] = end
            if w[TRACE_SIZE]:
                trace(w, kind, edge, device, begin, end)
        place += 3 * receivers
    for k in range(first, last, 3):
        if w[k + 2] >= 0:
            device = w[k]
            w[host + device] += launch
            begin = max(w[free + device], max(w[link + device], w[host + device]))
            end = begin + w[k + 2]
            w[link + device] = end
            if w[TRACE_SIZE]:
                trace(w, kind, edge, device, begin, end)


@compiled
def _synchronise(t: Integers, w: Integers, operator: int, record: int) -> None:
    """Sum the gradients of replicated shards while backward goes on."""
    devices = t[DEVICES]
    at, place, times = t[record + C_DEVICES], t[record + C_GROUPS], t[record + C_TIMES]
    host = w[STATE] + HOST * devices
    free = w[STATE] + DEVICE * devices
    line = w[STATE] + (LINK if t[SYNC_ON_LINK] else SYNC) * devices
    for group in range(t[record + C_GROUP_COUNT]):
        members = t[place]
        begin = 0
        for k in range(place + 2, place + 2 + members):
            device = t[at + t[k]]
            w[host + device] += t[SYNC_HOST_NS]
            w[free + device] += t[place + 1]
            own = max(w[free + device], max(w[host + device], w[line + device]))
            begin = max(begin, own)
        end = begin + t[times + group]
        for k in range(place + 2, place + 2 + members):
            device = t[at + t[k]]
            w[line + device] = end
            if w[TRACE_SIZE]:
                trace(w, SYNCHRONISE, operator, device, begin, end)
        place += 2 + members


@compiled
def is_shifted(t: Integers, w: Integers, step: int) -> bool:
    """Whether all that later steps depend on is the current plan's, later by one time."""
    operators, devices = t[OPERATORS], t[DEVICES]
    state = w[STATE]
    before = w[BEFORE] + step * 4 * devices
    free = DEVICE * devices
    shift = w[state + free] - w[before + free]
    for k in range(free, free + devices):
        if w[state + k] != w[before + k] + shift:
            return False
    if not t[HOST_IS_FREE]:
        for k in range(HOST * devices, (HOST + 1) * devices):
            if w[state + k] != w[before + k] + shift:
                return False
    for line in (LINK, SYNC):
        # Up to the device's own time these make no difference.
        for device in range(devices):
            k = line * devices + device
            now = max(w[state + k], w[state + free + device])
            if now != max(w[before + k], w[before + free + device]) + shift:
                return False
    side = 1 if step >= operators else 0
    boundary = 2 * operators - 1 - step if side else step - 1
    arrived = w[ARRIVED_BACK] if side else w[ARRIVED]
    routes = w[ROUTES] + t[EDGES]
    row = t[LIVE_FIRST] + boundary
    for place in range(t[LIVE] + t[row], t[LIVE] + t[row + 1]):
        edge = t[place]
        route = w[routes + edge]
        if route == 0 or not leads(t, w, edge, routes):
            continue
        other = t[t[EDGE] + 3 * edge + side]
        if w[w[FRESH] + side * operators + other] != w[CLOCK]:
            if (w[w[MOVED] + other] if side else 0) != shift:
                return False
            continue
        old = arrived + edge * devices
        new = old + t[EDGES] * devices
        k = _half(w, route, 2 * side) + 3 * w[route + 2 * side]
        for _ in range(w[route + 2 * side + 1]):
            first = k + 2 + w[k]
            last = first + 3 * w[k + 1]
            for place_of in range(first, last, 3):
                if w[new + w[place_of]] != w[old + w[place_of]] + shift:
                    return False
            k = last
    return True


@compiled
def finish(t: Integers, w: Integers, plan: int) -> int:
    """Nanoseconds of the whole step: the slowest device, its optimizer included."""
    devices, state = t[DEVICES], w[STATE]
    longest = 0
    for device in range(devices):
        begin = 0
        for line in range(4):
            begin = max(begin, w[state + line * devices + device])
        end = begin
        optimizer = w[w[OPTIMIZER] + plan * devices + device]
        if optimizer:
            end += optimizer + t[OPTIMIZER_NS]
            if w[TRACE_SIZE]:
                trace(w, OPTIMIZE, -1, device, begin, end)
        longest = max(longest, end)
    whole: int = longest + t[STEP_NS]
    return whole


@compiled
def trace(w: Integers, kind: int, subject: int, device: int, begin: int, end: int) -> None:
    """Record a task; those beyond the trace's size are counted and left out."""
    row = w[TRACED]
    if row < w[TRACE_SIZE]:
        place = w[TRACE] + 5 * row
        w[place], w[place + 1], w[place + 2] = kind, subject, device
        w[place + 3], w[place + 4] = begin, end
    w[TRACED] += 1
