"""Proposals simulated by what they change, in compiled code.

A proposal is simulated from the step of its first changed operator on, from the state that the
current plan had there. Where, past everything that it touches, the timelines turn out to be the
current plan's once more, all later by one time, the rest is skipped: times are whole numbers, and
the schedule only adds and takes maxima, so a common delay passes through it unchanged. The result
is exactly the full simulation's.
"""

from __future__ import annotations

from perfsearch.parallel.soap.compiled import compiled
from perfsearch.parallel.soap.proposals import account, copy_changed, reroute
from perfsearch.parallel.soap.routes import NO_SPACE
from perfsearch.parallel.soap.steps import finish, run
from perfsearch.parallel.soap.tables import (
    ARRIVED,
    ARRIVED_BACK,
    BEFORE,
    CHANGED,
    CHANGED_COUNT,
    CLOCK,
    DEVICE,
    DEVICES,
    EDGE,
    EDGES,
    END_FROM,
    END_SHIFT,
    FIRST_STEP,
    FRESH,
    HOST_IS_FREE,
    IN_FIRST,
    LAUNCHED,
    MEMORY,
    OPERATORS,
    OPTIMIZER,
    OUT_EDGES,
    OUT_FIRST,
    PLAN,
    ROUTES,
    SKIP_FROM,
    SKIP_SHIFT,
    SKIP_TO,
    STATE,
    Integers,
    Reals,
)


@compiled
def evaluate(t: Integers, w: Integers) -> int:
    """Nanoseconds of the proposal's step, after ``prepare``; the current plan stays as it is."""
    operators = t[OPERATORS]
    last_step = 2 * operators
    w[CLOCK] += 1
    w[SKIP_FROM] = w[SKIP_TO] = 0
    w[END_FROM] = last_step + 1
    w[SKIP_SHIFT] = 0
    low, high = operators, -1
    for k in range(w[CHANGED_COUNT]):
        operator = w[w[CHANGED] + k]
        low, high = _reach(t, operator, min(low, operator), max(high, operator))
        for edge in range(t[t[IN_FIRST] + operator], t[t[IN_FIRST] + operator + 1]):
            low, high = _reach(t, t[t[EDGE] + 3 * edge], low, high)
    w[FIRST_STEP] = low
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
        _later(t, w, resume, shift)
    reached = run(t, w, resume, last_step, last_step - low, 1)
    if reached < last_step:
        shift = _shift(t, w, reached)
        w[END_FROM], w[END_SHIFT] = reached, shift
        _later(t, w, last_step, shift)
    return finish(t, w, 1)


@compiled
def _reach(t: Integers, operator: int, low: int, high: int) -> tuple[int, int]:
    """Widen a range by who reads of an operator, and by all that these read of.

    Which consumers share a transfer, and after which producer a consumer's exchange is sent, may
    depend on the operator's configuration.
    """
    for k in range(t[t[OUT_FIRST] + operator], t[t[OUT_FIRST] + operator + 1]):
        reader = t[t[EDGE] + 3 * t[t[OUT_EDGES] + k] + 1]
        high = max(high, reader)
        for edge in range(t[t[IN_FIRST] + reader], t[t[IN_FIRST] + reader + 1]):
            low = min(low, t[t[EDGE] + 3 * edge])
    return low, high


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
    if w[CHANGED_COUNT] == 0:
        return
    copy_changed(t, w, 1, 0)
    w[CHANGED_COUNT] = 0
    _take_over(w, w[MEMORY], devices, devices)
    _take_over(w, w[OPTIMIZER], devices, devices)
    hosts = devices if t[HOST_IS_FREE] else 0
    for step in range(w[FIRST_STEP], last_step + 1):
        here = w[BEFORE] + step * size
        skipped = w[SKIP_FROM] <= step < w[SKIP_TO]
        shift = w[SKIP_SHIFT]
        if step >= w[END_FROM]:
            skipped, shift = True, w[END_SHIFT]
        if skipped:
            _delay(w, here + hosts, size - hosts, shift)
        else:
            _take_over(w, here, size, (last_step + 1) * size)
    for side in range(2):
        for edge in range(t[EDGES]):
            _update(t, w, edge, side)


@compiled
def _update(t: Integers, w: Integers, edge: int, side: int) -> None:
    """Take over when an edge's tensors are there."""
    devices, edges = t[DEVICES], t[EDGES]
    row = (w[ARRIVED_BACK] if side else w[ARRIVED]) + edge * devices
    launched = w[LAUNCHED] + side * edges + edge
    if w[w[FRESH] + side * edges + edge] == w[CLOCK]:
        _take_over(w, row, devices, edges * devices)
        w[launched] = w[launched + 2 * edges]
    elif w[SKIP_FROM] <= w[launched] < w[SKIP_TO]:
        _delay(w, row, devices, w[SKIP_SHIFT])
    elif w[launched] >= w[END_FROM]:
        _delay(w, row, devices, w[END_SHIFT])


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
        account(t, w, w[w[PLAN] + operators + operator], 1)
        for edge in range(t[t[IN_FIRST] + operator], t[t[IN_FIRST] + operator + 1]):
            if not reroute(t, c, w, edge):
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
