"""What a proposal changes beside times: configurations, routes, memory, in compiled code."""

from __future__ import annotations

from perfsearch.parallel.soap.compiled import compiled
from perfsearch.parallel.soap.routes import NO_SPACE, find_route
from perfsearch.parallel.soap.tables import (
    C_DEVICES,
    C_PARTS,
    C_ROWS,
    C_WIDTH,
    CAPACITY,
    CHANGED,
    CHANGED_COUNT,
    CONFIG,
    DEVICES,
    EDGE,
    EDGES,
    IN_FIRST,
    MEMORY,
    OPERATORS,
    OPTIMIZER,
    OUT_EDGES,
    OUT_FIRST,
    P_OPTIMIZER,
    P_RESIDENT,
    P_WIDTH,
    PLAN,
    ROUTES,
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
def copy_changed(t: Integers, w: Integers, source: int, target: int) -> None:
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
    copy_changed(t, w, 0, 1)
    w[CHANGED_COUNT] = 0


@compiled
def account(t: Integers, w: Integers, config: int, sign: int) -> None:
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
    place = route + w[route + 4] + 4 * w[route + 2]
    for _ in range(w[route + 3]):
        place += 2 + w[place] + 4 * w[place + 1]
    for _ in range(w[route + 7]):
        w[w[MEMORY] + t[DEVICES] + w[place]] += sign * w[place + 1]
        place += 2


@compiled
def reroute(t: Integers, c: Reals, w: Integers, edge: int) -> bool:
    """Find the proposal's route of an edge; ``False`` where the arena must grow first."""
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
        account(t, w, w[w[PLAN] + operator], -1)
        account(t, w, w[w[PLAN] + operators + operator], 1)
        for edge in range(t[t[IN_FIRST] + operator], t[t[IN_FIRST] + operator + 1]):
            if not reroute(t, c, w, edge):
                return NO_SPACE
        for out in range(t[t[OUT_FIRST] + operator], t[t[OUT_FIRST] + operator + 1]):
            if not reroute(t, c, w, t[t[OUT_EDGES] + out]):
                return NO_SPACE
    for device in range(devices):
        if w[w[MEMORY] + devices + device] > t[t[CAPACITY] + device]:
            return INFEASIBLE
    return 0
