"""Proposals simulated by what they change, in compiled code.

A proposal is simulated from the step of its first changed operator on, from the state that the
current plan had there. Where, past everything that it touches, the timelines turn out to be the
current plan's once more, all later by one time, the rest is skipped: times are whole numbers, and
the schedule only adds and takes maxima, so a common delay passes through it unchanged. The result
is exactly the full simulation's.
"""

from __future__ import annotations

from perfsearch.parallel.soap.compiled import compiled
from perfsearch.parallel.soap.routes import NO_SPACE, find_route
from perfsearch.parallel.soap.steps import finish, run
from perfsearch.parallel.soap.tables import (
    ARRIVED,
    ARRIVED_BACK,
    BEFORE,
    C_DEVICES,
    C_PARTS,
    C_ROWS,
    C_WIDTH,
    CAPACITY,
    CHANGED,
    CHANGED_COUNT,
    CLOCK,
    CONFIG,
    DEVICE,
    DEVICES,
    EDGE,
    EDGES,
    END_FROM,
    END_SHIFT,
    HOST_IS_FREE,
    IN_FIRST,
    MEMORY,
    MOVED,
    OPERATORS,
    OPTIMIZER,
    OUT_EDGES,
    OUT_FIRST,
    P_OPTIMIZER,
    P_RESIDENT,
    P_WIDTH,
    PLAN,
    ROUTES,
    SKIP_FROM,
    SKIP_SHIFT,
    SKIP_TO,
    STATE,
    Integers,
    Reals,
)

INFEASIBLE = -2
"""Instead of a time, where a device's memory is exceeded."""


@compiled
def change(t: Integers, w: Integers, operator: int, config: int) -> None:
    """Make it part of the proposal that ``operator`` has ``config``."""
    w[w[PLAN] + t[OPERATORS] + operator] = config
    for k in range(w[CHANGED_COUNT]):
        if w[w[CHANGED] + k] == operator:
            return
    w[w[CHANGED] + w[CHANGED_COUNT]] = operator
    w[CHANGED_COUNT] += 1


@compiled
def _copy_changed(t: Integers, w: Integers, source: int, target: int) -> None:
    """Copy changed operators' configurations and routes between plan and proposal."""
    plans, routes = w[PLAN], w[ROUTES]
    for k in range(w[CHANGED_COUNT]):
        operator = w[w[CHANGED] + k]
        w[plans + target * t[OPERATORS] + operator] = w[plans + source * t[OPERATORS] + operator]
        for edge in range(t[t[IN_FIRST] + operator], t[t[IN_FIRST] + operator + 1]):
            w[routes + target * t[EDGES] + edge] = w[routes + source * t[EDGES] + edge]
        for out in range(t[t[OUT_FIRST] + operator], t[t[OUT_FIRST] + operator + 1]):
            edge = t[t[OUT_EDGES] + out]
            w[routes + target * t[EDGES] + edge] = w[routes + source * t[EDGES] + edge]


@compiled
def withdraw(t: Integers, w: Integers) -> None:
    """Make the proposal equal to the current plan again."""
    _copy_changed(t, w, 0, 1)
    w[CHANGED_COUNT] = 0


@compiled
def _account(t: Integers, w: Integers, config: int, sign: int) -> None:
    """Add what an operator's parts keep and what their optimizer takes."""
    record = t[CONFIG] + C_WIDTH * config
    at, row = t[record + C_DEVICES], t[record + C_ROWS]
    for k in range(t[record + C_PARTS]):
        device = t[DEVICES] + t[at + k]
        w[w[MEMORY] + device] += sign * t[row + P_RESIDENT]
        w[w[OPTIMIZER] + device] += sign * t[row + P_OPTIMIZER]
        row += P_WIDTH


@compiled
def _account_route(t: Integers, w: Integers, route: int, sign: int) -> None:
    """Add what arrives over an edge and is kept for backward."""
    if route == 0:
        return
    place = route + w[route + 4] + 3 * w[route + 2]
    for _ in range(w[route + 3]):
        place += 2 + w[place] + 3 * w[place + 1]
    for _ in range(w[route + 7]):
        w[w[MEMORY] + t[DEVICES] + w[place]] += sign * w[place + 1]
        place += 2


@compiled
def _reroute(t: Integers, c: Reals, w: Integers, edge: int) -> bool:
    record = t[EDGE] + 3 * edge
    plan = w[PLAN] + t[OPERATORS]
    route = find_route(t, c, w, edge, w[plan + t[record]], w[plan + t[record + 1]])
    if route == NO_SPACE:
        return False
    # An edge between two changed operators comes by twice; the second time changes nothing.
    place = w[ROUTES] + t[EDGES] + edge
    if w[place] != route:
        _account_route(t, w, w[place], -1)
        _account_route(t, w, route, 1)
        w[place] = route
    return True


@compiled
def prepare(t: Integers, c: Reals, w: Integers) -> int:
    """Routes, memory and optimizer of the proposal.

    Returns:
        0; ``INFEASIBLE``; or ``NO_SPACE``, after which the arena must grow.

    """
    operators, devices = t[OPERATORS], t[DEVICES]
    for device in range(devices):
        w[w[MEMORY] + devices + device] = w[w[MEMORY] + device]
        w[w[OPTIMIZER] + devices + device] = w[w[OPTIMIZER] + device]
    for k in range(w[CHANGED_COUNT]):
        operator = w[w[CHANGED] + k]
        _account(t, w, w[w[PLAN] + operator], -1)
        _account(t, w, w[w[PLAN] + operators + operator], 1)
        for edge in range(t[t[IN_FIRST] + operator], t[t[IN_FIRST] + operator + 1]):
            if not _reroute(t, c, w, edge):
                return NO_SPACE
        for out in range(t[t[OUT_FIRST] + operator], t[t[OUT_FIRST] + operator + 1]):
            if not _reroute(t, c, w, t[t[OUT_EDGES] + out]):
                return NO_SPACE
    for device in range(devices):
        if w[w[MEMORY] + devices + device] > t[t[CAPACITY] + device]:
            return INFEASIBLE
    return 0


@compiled
def evaluate(t: Integers, w: Integers) -> int:
    """Nanoseconds of the proposal's step, after ``prepare``; the current plan stays as it is."""
    operators = t[OPERATORS]
    last_step = 2 * operators
    w[CLOCK] += 1
    w[SKIP_FROM] = w[SKIP_TO] = 0
    w[END_FROM] = last_step + 1
    low, high = operators, -1
    for k in range(w[CHANGED_COUNT]):
        operator = w[w[CHANGED] + k]
        low, high = min(low, operator), max(high, _last_reader(t, operator))
        for edge in range(t[t[IN_FIRST] + operator], t[t[IN_FIRST] + operator + 1]):
            source = t[t[EDGE] + 3 * edge]
            # Which of a producer's consumers share a transfer may have changed.
            low, high = min(low, source), max(high, _last_reader(t, source))
    if high < 0:
        _later(t, w, last_step, 0)
        return finish(t, w, 1)
    _later(t, w, low, 0)
    reached = run(t, w, low, operators, high + 1, 1)
    resume = operators
    if reached < operators:
        shift = _shift(t, w, reached)
        resume = last_step - 1 - high
        w[SKIP_FROM], w[SKIP_TO], w[SKIP_SHIFT] = reached, resume, shift
        for operator in range(high + 1, operators):
            w[w[MOVED] + operator] = shift
        _later(t, w, resume, shift)
    reached = run(t, w, resume, last_step, last_step - low, 1)
    if reached < last_step:
        shift = _shift(t, w, reached)
        w[END_FROM], w[END_SHIFT] = reached, shift
        _later(t, w, last_step, shift)
    return finish(t, w, 1)


@compiled
def _last_reader(t: Integers, operator: int) -> int:
    """The last operator that reads of it, or itself."""
    last: int = operator
    for k in range(t[t[OUT_FIRST] + operator], t[t[OUT_FIRST] + operator + 1]):
        last = max(last, t[t[EDGE] + 3 * t[t[OUT_EDGES] + k] + 1])
    return last


@compiled
def _shift(t: Integers, w: Integers, step: int) -> int:
    row = DEVICE * t[DEVICES]
    shift: int = w[w[STATE] + row] - w[w[BEFORE] + step * 4 * t[DEVICES] + row]
    return shift


@compiled
def _later(t: Integers, w: Integers, step: int, shift: int) -> None:
    """Take up the current plan's state before ``step``, ``shift`` later."""
    devices = t[DEVICES]
    before = w[BEFORE] + step * 4 * devices
    for k in range(4 * devices):
        w[w[STATE] + k] = w[before + k] + shift
    if t[HOST_IS_FREE]:
        for k in range(devices):
            w[w[STATE] + k] = w[before + k]


@compiled
def _delay(w: Integers, place: int, count: int, shift: int) -> None:
    for k in range(place, place + count):
        w[k] += shift


@compiled
def _take_over(w: Integers, place: int, count: int, distance: int) -> None:
    for k in range(place, place + count):
        w[k] = w[k + distance]


@compiled
def accept(t: Integers, w: Integers) -> None:
    """Make the proposal, after ``evaluate``, the current plan."""
    operators, devices = t[OPERATORS], t[DEVICES]
    last_step, size = 2 * operators, 4 * devices
    first = operators
    for k in range(w[CHANGED_COUNT]):
        operator = w[w[CHANGED] + k]
        first = min(first, operator)
        for edge in range(t[t[IN_FIRST] + operator], t[t[IN_FIRST] + operator + 1]):
            first = min(first, t[t[EDGE] + 3 * edge])
    if first == operators:
        return
    _copy_changed(t, w, 1, 0)
    w[CHANGED_COUNT] = 0
    _take_over(w, w[MEMORY], devices, devices)
    _take_over(w, w[OPTIMIZER], devices, devices)
    hosts = devices if t[HOST_IS_FREE] else 0
    for step in range(first, last_step + 1):
        here = w[BEFORE] + step * size
        skipped = w[SKIP_FROM] <= step < w[SKIP_TO]
        shift = w[SKIP_SHIFT]
        if step >= w[END_FROM]:
            skipped, shift = True, w[END_SHIFT]
        if skipped:
            _delay(w, here + hosts, size - hosts, shift)
        else:
            _take_over(w, here, size, (last_step + 1) * size)
        if step < operators:
            for k in range(t[t[OUT_FIRST] + step], t[t[OUT_FIRST] + step + 1]):
                row = w[ARRIVED] + t[t[OUT_EDGES] + k] * devices
                _update(t, w, row, skipped, shift)
        elif step < last_step:
            operator = last_step - 1 - step
            for edge in range(t[t[IN_FIRST] + operator], t[t[IN_FIRST] + operator + 1]):
                _update(t, w, w[ARRIVED_BACK] + edge * devices, skipped, shift)


@compiled
def _update(t: Integers, w: Integers, row: int, skipped: bool, shift: int) -> None:
    if skipped:
        _delay(w, row, t[DEVICES], shift)
    else:
        _take_over(w, row, t[DEVICES], t[EDGES] * t[DEVICES])


@compiled
def start(t: Integers, c: Reals, w: Integers) -> int:
    """Simulate the proposal whole and make it the current plan.

    Returns:
        0, or ``NO_SPACE``.

    """
    operators, devices = t[OPERATORS], t[DEVICES]
    for k in range(2 * devices):
        w[w[MEMORY] + k] = 0
        w[w[OPTIMIZER] + k] = 0
    for k in range(2 * t[EDGES]):
        w[w[ROUTES] + k] = 0
    for operator in range(operators):
        _account(t, w, w[w[PLAN] + operators + operator], 1)
        for edge in range(t[t[IN_FIRST] + operator], t[t[IN_FIRST] + operator + 1]):
            if not _reroute(t, c, w, edge):
                return NO_SPACE
    _take_over(w, w[PLAN], operators, operators)
    _take_over(w, w[ROUTES], t[EDGES], t[EDGES])
    _take_over(w, w[MEMORY], devices, devices)
    _take_over(w, w[OPTIMIZER], devices, devices)
    w[CHANGED_COUNT] = 0
    for k in range(4 * devices):
        w[w[STATE] + k] = 0
    run(t, w, 0, 2 * operators, 2 * operators, 0)
    return 0
