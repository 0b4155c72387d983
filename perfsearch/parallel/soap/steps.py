"""The simulated step, operator by operator, in compiled code.

Ranks run the same schedule: operators in the order of the user's code, then backward in the
reverse order. A task begins when the host has launched it, when its device is free, and when what
it reads has arrived; nothing else decides, so no queue is needed and ties cannot arise. A transfer
begins when its device has done what comes before it, as a stream that waits for another one does.

Step ``s`` is the forward task of operator ``s``, or with ``n`` operators the backward task of
operator ``2 n - 1 - s``. An operator's step first moves what it reads: activations of its
producers, or gradients of its consumers.
"""

from __future__ import annotations

from perfsearch.parallel.soap.compiled import compiled
from perfsearch.parallel.soap.tables import (
    BACKWARD,
    BACKWARD_DONE,
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
    FORWARD_DONE,
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
    SENDER_WAITS,
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
        done_table = w[BACKWARD_DONE] if backward else w[FORWARD_DONE]
        fresh = w[FRESH] + operators if backward else w[FRESH]
        low, high = t[t[IN_FIRST] + operator], t[t[IN_FIRST] + operator + 1]
        if backward:
            low, high = t[t[OUT_FIRST] + operator], t[t[OUT_FIRST] + operator + 1]
        for k in range(low, high):
            edge = t[t[OUT_EDGES] + k] if backward else k
            route = w[routes + edge]
            if route == 0:
                continue
            other = t[t[EDGE] + 3 * edge + (1 if backward else 0)]
            ready = done_table + other * devices
            later = 0
            if plan == 1:
                if w[fresh + other] == clock:
                    ready += operators * devices
                elif backward:
                    later = w[w[MOVED] + other]
            _move(t, w, edge, route, backward, ready, later)
        record = t[CONFIG] + C_WIDTH * w[plans + operator]
        at, row = t[record + C_DEVICES], t[record + C_ROWS]
        done = done_table + (plan * operators + operator) * devices
        if backward:
            for k in range(at, at + t[record + C_PARTS]):
                device = t[k]
                launched = w[host + device] + t[row + P_BACKWARD_HOST]
                w[host + device] = launched
                begin = max(w[free + device], launched)
                end = begin + t[row + P_BACKWARD]
                w[free + device] = end
                w[done + device] = end
                row += P_WIDTH
                if w[TRACE_SIZE]:
                    trace(w, BACKWARD, operator, device, begin, end)
            if t[record + C_GROUP_COUNT]:
                _synchronise(t, w, operator, record)
        else:
            for k in range(at, at + t[record + C_PARTS]):
                device = t[k]
                launched = w[host + device] + t[row + P_FORWARD_HOST]
                w[host + device] = launched
                begin = max(w[free + device], launched)
                end = begin + t[row + P_FORWARD]
                w[free + device] = end
                w[done + device] = end
                row += P_WIDTH
                if w[TRACE_SIZE]:
                    trace(w, FORWARD, operator, device, begin, end)
        if plan == 1:
            w[fresh + operator] = clock
        step += 1
    w[STEPS_RUN] += step - first
    if step == 2 * operators:
        here = before + step * size
        for k in range(size):
            w[here + k] = w[state + k]
    return step


@compiled
def _move(
    t: Integers, w: Integers, edge: int, route: int, backward: bool, ready: int, later: int
) -> None:
    """Move an edge's tensors; receivers' devices wait for what arrives."""
    devices, launch, sender_waits = t[DEVICES], t[TRANSFER_HOST_NS], t[SENDER_WAITS]
    host = w[STATE] + HOST * devices
    free = w[STATE] + DEVICE * devices
    link = w[STATE] + LINK * devices
    groups, lone = w[route], w[route + 1]
    place = route + 8
    if backward:
        groups, lone = w[route + 2], w[route + 3]
        place = route + w[route + 4]
    kind = SEND_BACKWARD if backward else SEND_FORWARD
    for _ in range(groups):
        sources, receivers = w[place], w[place + 1]
        place += 2
        available = 0
        for k in range(place, place + sources):
            available = max(available, w[ready + w[k]] + later)
        place += sources
        for k in range(place, place + 2 * receivers, 2):
            device = w[k]
            w[host + device] += launch
            begin = max(max(available, w[free + device]), max(w[link + device], w[host + device]))
            end = begin + w[k + 1]
            w[link + device] = end
            w[free + device] = max(w[free + device], end)
            if w[TRACE_SIZE]:
                trace(w, kind, edge, device, begin, end)
        place += 2 * receivers
    for k in range(place, place + 2 * lone, 2):
        device = w[k]
        w[host + device] += launch
        begin = max(w[free + device], max(w[link + device], w[host + device]))
        end = begin + w[k + 1]
        w[link + device] = end
        if sender_waits:
            w[free + device] = max(w[free + device], end)
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
        for k in range(place + 1, place + 1 + members):
            device = t[at + t[k]]
            w[host + device] += t[SYNC_HOST_NS]
            own = max(w[free + device], max(w[host + device], w[line + device]))
            begin = max(begin, own)
        end = begin + t[times + group]
        for k in range(place + 1, place + 1 + members):
            device = t[at + t[k]]
            w[line + device] = end
            if w[TRACE_SIZE]:
                trace(w, SYNCHRONISE, operator, device, begin, end)
        place += 1 + members


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
    done = w[BACKWARD_DONE] if side else w[FORWARD_DONE]
    row = t[LIVE_FIRST] + side * (operators + 1) + boundary
    for place in range(t[LIVE] + t[row], t[LIVE] + t[row + 1]):
        other = t[place]
        if w[w[FRESH] + side * operators + other] != w[CLOCK]:
            if (w[w[MOVED] + other] if side else 0) != shift:
                return False
            continue
        record = t[CONFIG] + C_WIDTH * w[w[PLAN] + operators + other]
        old = done + other * devices
        for k in range(t[record + C_DEVICES], t[record + C_DEVICES] + t[record + C_PARTS]):
            if w[old + operators * devices + t[k]] != w[old + t[k]] + shift:
                return False
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
