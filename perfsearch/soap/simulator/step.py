"""The simulated step in compiled code: transfers and waits first, then the schedule of operators.

``side`` is 0 for activations and 1 for gradients; ``plan`` is 0 for the current plan and 1 for the
proposal.
"""

from __future__ import annotations

from perfsearch.soap.simulator.memory import (
    ALL_TO_ALL,
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
    COPY,
    COPY_SUM,
    DEVICE,
    DEVICES,
    EDGE,
    EDGES,
    EXCHANGE,
    FORWARD,
    FRESH,
    HOST,
    HOST_IS_FREE,
    HOST_NS,
    IN_FIRST,
    LAUNCHED,
    LINK,
    LISTS,
    LIVE,
    LIVE_FIRST,
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
    SKIP_SHIFT,
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
    compiled,
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


# -----------------------------------------------------------------------------
# The simulated step, operator by operator, in compiled code.
#
# Ranks run the same schedule: operators in the order of the user's code, then backward in the
# reverse order. A task begins when the host has launched it, when its device is free, and when
# what it reads has arrived; nothing else decides, so no queue is needed and ties cannot arise.
#
# Step ``s`` is the forward task of operator ``s``, or with ``n`` operators the backward task of
# operator ``2 n - 1 - s``. What an operator computes is sent as soon as it is there, and waited
# for where it is read first; a transfer begins at a device when that has done what comes before
# it, as a stream that waits for another one does. Consumers that need the same share one
# transfer, and the exchanges between pairs that one consumer waits for are one, sent after the
# last of its producers.


@compiled
def run_steps(t: Integers, w: Integers, first: int, stop: int, settled: int, plan: int) -> int:
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
                    wait(t, w, edge, w[routes + edge], 1, plan)
        else:
            for edge in range(t[t[IN_FIRST] + operator], t[t[IN_FIRST] + operator + 1]):
                if w[routes + edge] and leads(t, w, edge, routes):
                    wait(t, w, edge, w[routes + edge], 0, plan)
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
            send_all(t, w, operator, 1, plan, step)
            if t[record + C_GROUP_COUNT]:
                _synchronise(t, w, operator, record)
        else:
            for k in range(t[t[OUT_FIRST] + operator], t[t[OUT_FIRST] + operator + 1]):
                edge = t[t[OUT_EDGES] + k]
                if w[routes + edge] and leads(t, w, edge, routes):
                    if not is_exchange(w, w[routes + edge]):
                        send(t, w, edge, w[routes + edge], 0, plan, step)
                    elif is_last_source(t, w, edge, routes):
                        send_all(t, w, t[t[EDGE] + 3 * edge + 1], 0, plan, step)
        step += 1
    w[STEPS_RUN] += step - first
    if step == 2 * operators:
        here = before + step * size
        for k in range(size):
            w[here + k] = w[state + k]
    return step


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
            if w[TRACE_SIZE] and t[place + 1]:
                packed = w[free + device] + t[place + 1]
                trace(w, COPY_SUM, operator, device, w[free + device], packed)
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
    routes = w[ROUTES] + t[EDGES]
    row = t[LIVE_FIRST] + boundary
    for place in range(t[LIVE] + t[row], t[LIVE] + t[row + 1]):
        edge = t[place]
        route = w[routes + edge]
        if route == 0 or not leads(t, w, edge, routes):
            continue
        if w[w[FRESH] + side * t[EDGES] + edge] != w[CLOCK]:
            if not side and is_exchange(w, route) and w[w[LAUNCHED] + edge] >= step:
                continue  # it is yet to be sent
            if (w[SKIP_SHIFT] if side else 0) != shift:
                return False
            continue
        old, new = arrival(t, w, edge, side, 0), arrival(t, w, edge, side, 1)
        k = half(w, route, side) + 4 * w[route + 2 * side]
        for _ in range(w[route + 2 * side + 1]):
            first = k + 2 + w[k]
            last = first + 4 * w[k + 1]
            for place_of in range(first, last, 4):
                if w[new + w[place_of]] != w[old + w[place_of]] + shift:
                    return False
            k = last
    return True


@compiled
def step_nanoseconds(t: Integers, w: Integers, plan: int) -> int:
    """Nanoseconds of the whole step: the slowest device, its optimizer included, or its host.

    Where hosts decide, a thousandth of what devices are done earlier is taken off, so that of plans
    that they make equal the one that devices are done with first is the best.
    """
    devices, state = t[DEVICES], w[STATE]
    longest = on_host = 0
    for device in range(devices):
        on_host = max(on_host, w[state + HOST * devices + device])
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
    on_host += t[HOST_NS]
    if on_host > whole:
        whole = on_host - (on_host - whole) // 1000
    return whole
