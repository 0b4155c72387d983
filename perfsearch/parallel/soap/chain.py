"""The Markov chain over simulated plans, compiled as one loop.

Starts from any plan. A proposal gives one operator another configuration, drawn evenly from its
layouts and then from that layout's devices; or it carries an operator's configuration over to
neighbours along the graph, as far as they can have it. Worse plans are accepted with
``exp(-alpha * d)``, ``d`` in percent of the current time (Jia et al. 2019, whose ``d`` is in
milliseconds).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from perfsearch.parallel.soap import delta, proposals
from perfsearch.parallel.soap.compiled import compiled
from perfsearch.parallel.soap.routes import NO_SPACE
from perfsearch.parallel.soap.tables import (
    ACCEPTED,
    BEST_COST,
    BEST_PLAN,
    CLASS_FIRST,
    COPIES,
    COST,
    E_COPY_BACK,
    E_COPY_ON,
    E_WIDTH,
    EDGE,
    EDGE_CLASS,
    EVERY,
    IMPROVED,
    IN_FIRST,
    INFEASIBLE_COUNT,
    ITERATION,
    KEPT,
    LAYOUT_FIRST,
    OPERATOR_CLASS,
    OPERATORS,
    OUT_EDGES,
    OUT_FIRST,
    PLAN,
    RETURN_EVERY,
    SERIES,
    SERIES_SIZE,
    SERIES_USED,
    TOP_COST,
    TOP_PLANS,
    Integers,
    Reals,
)

LONGEST_CARRY = 8
"""Operators that one proposal changes at most."""

ALPHA, CARRY = range(2)
"""Places of the chain's real numbers: refusal per percent, share of proposals that carry over."""

DISTINCT = 5e-4
"""Plans whose times differ by less than this share count as one among the best."""

Random = npt.NDArray[np.uint64]


@compiled
def draw(random: Random) -> np.uint64:
    """64 random bits (xorshift64*, Vigna 2016)."""
    x: np.uint64 = random[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    random[0] = x
    return x * np.uint64(2685821657736338717)


@compiled
def draw_below(random: Random, limit: int) -> int:
    """A whole number from 0 to ``limit - 1``."""
    return int(np.int64((draw(random) >> np.uint64(33)) % np.uint64(limit)))


@compiled
def draw_unit(random: Random) -> float:
    """A number in [0, 1)."""
    return float(np.float64(draw(random) >> np.uint64(11)) / 9007199254740992.0)


@compiled
def propose(t: Integers, w: Integers, reals: Reals, random: Random) -> None:
    """Draw a proposal; see the module."""
    operator = draw_below(random, t[OPERATORS])
    if draw_unit(random) >= reals[CARRY]:
        proposals.change(t, w, operator, _any_config(t, operator, random))
        return
    if draw_unit(random) < 0.5:
        proposals.change(t, w, operator, _any_config(t, operator, random))
    _carry(t, w, operator, random)


@compiled
def _any_config(t: Integers, operator: int, random: Random) -> int:
    kind = t[CLASS_FIRST] + t[t[OPERATOR_CLASS] + operator]
    layout = t[LAYOUT_FIRST] + t[kind] + draw_below(random, t[kind + 1] - t[kind])
    config: int = t[layout] + draw_below(random, t[layout + 1] - t[layout])
    return config


@compiled
def _carry(t: Integers, w: Integers, operator: int, random: Random) -> None:
    """Walk along edges from an operator, giving each the configuration of the one before."""
    plan = w[PLAN] + t[OPERATORS]
    forward = draw_unit(random) < 0.5
    for _ in range(LONGEST_CARRY - 1):
        first, last = t[t[IN_FIRST] + operator], t[t[IN_FIRST] + operator + 1]
        if forward:
            first, last = t[t[OUT_FIRST] + operator], t[t[OUT_FIRST] + operator + 1]
        if first == last:
            return
        edge = first + draw_below(random, last - first)
        if forward:
            edge = t[t[OUT_EDGES] + edge]
        other = t[t[EDGE] + 3 * edge + (1 if forward else 0)]
        record = t[EDGE_CLASS] + E_WIDTH * t[t[EDGE] + 3 * edge + 2]
        copies = t[record + E_COPY_ON] if forward else t[record + E_COPY_BACK]
        layout = t[t[CLASS_FIRST] + t[t[OPERATOR_CLASS] + operator]]
        config = t[t[COPIES] + copies + w[plan + operator] - t[t[LAYOUT_FIRST] + layout]]
        if config < 0:
            return
        if config != w[plan + other]:
            proposals.change(t, w, other, config)
        operator = other
        if draw_unit(random) < 0.25:
            return


@compiled
def _note(t: Integers, w: Integers, time: int) -> None:
    """Keep the proposal among the best distinct ones, if it is one."""
    kept, costs, plans = w[KEPT], w[TOP_COST], w[TOP_PLANS]
    operators = t[OPERATORS]
    if time >= w[costs + kept - 1]:
        return
    margin = int(time * DISTINCT)
    place = 0
    while w[costs + place] <= time:
        place += 1
    if place > 0 and time - w[costs + place - 1] <= margin:
        return
    last = place if w[costs + place] - time <= margin else kept - 1
    for k in range(last, place, -1):
        w[costs + k] = w[costs + k - 1]
        for j in range(operators):
            w[plans + k * operators + j] = w[plans + (k - 1) * operators + j]
    w[costs + place] = time
    for j in range(operators):
        w[plans + place * operators + j] = w[w[PLAN] + operators + j]


@compiled
def walk(t: Integers, c: Reals, w: Integers, reals: Reals, random: Random, count: int) -> int:
    """Go on until ``count`` proposals were simulated in all.

    Returns:
        0 when done, or ``NO_SPACE``, after which the arena must grow and this be called again.

    """
    while w[ITERATION] < count:
        before = random[0]
        propose(t, w, reals, random)
        outcome = proposals.prepare(t, c, w)
        if outcome == NO_SPACE:
            proposals.withdraw(t, w)
            random[0] = before
            return NO_SPACE
        time = -1
        accepted = False
        if outcome == proposals.INFEASIBLE:
            w[INFEASIBLE_COUNT] += 1
        else:
            time = delta.evaluate(t, w)
            _note(t, w, time)
            worse = 100.0 * (time - w[COST]) / w[COST]
            accepted = worse <= 0 or draw_unit(random) < math.exp(-reals[ALPHA] * worse)
        w[ITERATION] += 1
        if accepted:
            w[ACCEPTED] += 1
            w[COST] = time
            if time < w[BEST_COST]:
                w[BEST_COST], w[IMPROVED] = time, w[ITERATION]
                for k in range(t[OPERATORS]):
                    w[w[BEST_PLAN] + k] = w[w[PLAN] + t[OPERATORS] + k]
            delta.accept(t, w)
        else:
            proposals.withdraw(t, w)
        if w[ITERATION] % w[EVERY] == 0 and w[SERIES_USED] < w[SERIES_SIZE]:
            row = w[SERIES] + 4 * w[SERIES_USED]
            w[row], w[row + 1], w[row + 2], w[row + 3] = w[ITERATION], w[COST], time, w[BEST_COST]
            w[SERIES_USED] += 1
        if w[RETURN_EVERY] and w[ITERATION] % w[RETURN_EVERY] == 0 and w[COST] != w[BEST_COST]:
            _go_back(t, c, w)
    return 0


@compiled
def _go_back(t: Integers, c: Reals, w: Integers) -> None:
    """Continue from the best plan, all of whose routes are in the arena."""
    for k in range(t[OPERATORS]):
        w[w[PLAN] + t[OPERATORS] + k] = w[w[BEST_PLAN] + k]
    delta.start(t, c, w)
    w[COST] = w[BEST_COST]
