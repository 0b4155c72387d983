"""MCMC over simulated plans: the engine that holds a chain, and the chain in compiled code."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perfsearch.soap.simulator.memory import (
    ACCEPTED,
    ARENA,
    ARENA_SIZE,
    ARENA_USED,
    ARRIVED,
    ARRIVED_BACK,
    BEFORE,
    BEST_COST,
    BEST_PLAN,
    C_DEVICES,
    C_PARTS,
    C_ROWS,
    C_WIDTH,
    CAPACITY,
    CHANGED,
    CHANGED_COUNT,
    CLASS_FIRST,
    CLOCK,
    CONFIG,
    COPIES,
    COST,
    DEVICE,
    DEVICES,
    E_COPY_BACK,
    E_COPY_ON,
    E_WIDTH,
    EDGE,
    EDGE_CLASS,
    EDGES,
    END_FROM,
    END_SHIFT,
    EVERY,
    FIRST_STEP,
    FRESH,
    HOST,
    HOST_IS_FREE,
    IMPROVED,
    IN_FIRST,
    INFEASIBLE_COUNT,
    ITERATION,
    KEPT,
    KEY_SLOTS,
    KEYS,
    KEYS_USED,
    LAUNCHED,
    LAYOUT_FIRST,
    LINK,
    LISTS,
    MEMORY,
    OPERATOR_CLASS,
    OPERATORS,
    OPTIMIZER,
    OUT_EDGES,
    OUT_FIRST,
    P_OPTIMIZER,
    P_RESIDENT,
    P_WIDTH,
    PLACES,
    PLAN,
    RETURN_EVERY,
    ROUTES,
    SERIES,
    SERIES_SIZE,
    SERIES_USED,
    SKIP_FROM,
    SKIP_SHIFT,
    SKIP_TO,
    START_COST,
    STATE,
    SYNC,
    TOP_COST,
    TOP_PLANS,
    TRACE,
    TRACE_SIZE,
    TRACED,
    VOLUME,
    W_SCALARS,
    W_TABLES,
    Integers,
    Reals,
    compiled,
    pack,
)
from perfsearch.soap.simulator.routes import NO_SPACE, find_route
from perfsearch.soap.simulator.step import run_steps, step_nanoseconds

_FIRST_ARENA = 1 << 16
_FIRST_KEYS = 1 << 12
NEVER = 1 << 60
"""Instead of a time, where there is none yet."""


@dataclass(frozen=True)
class ChainOptions:
    """How a chain proposes, accepts and records.

    Attributes:
        alpha: refusal of worse plans, per percent of the current time or per millisecond.
        by_milliseconds: which of the two; the paper's is a fixed scale, which is Metropolis' rule.
        carry: share of proposals that carry a configuration over to neighbours.
        kept: how many of the best distinct plans are kept.
        every: proposals between points of the series.
        points: room for so many of them.
        return_every: proposals after which it goes back to the best plan; 0 never.

    """

    alpha: float = 1.0
    by_milliseconds: bool = False
    carry: float = 0.25
    kept: int = 32
    every: int = 1000
    points: int = 0
    return_every: int = 0


class Engine:
    """Simulates plans, given as one configuration number an operator.

    Args:
        tables: the job, ``t`` of the compiled functions.
        curves: times of transfers.
        seed: of the chain.
        options: of the chain.

    """

    def __init__(
        self, tables: Integers, curves: Reals, seed: int = 0, options: ChainOptions | None = None
    ) -> None:
        self._t = tables
        self._c = curves
        self.options = options or ChainOptions()
        self._reals = np.array(
            [self.options.alpha, self.options.carry, float(self.options.by_milliseconds)]
        )
        words = np.random.SeedSequence(seed).generate_state(1, np.uint64)
        self._random = words | np.uint64(1)
        self._w = self._memory()

    def __getitem__(self, scalar: int) -> int:
        """A scalar of the search, such as ``memory.BEST_COST``."""
        return int(self._w[scalar])

    def start(self, configs: Integers) -> int:
        """Make a plan the current one, a new chain's first, and return its nanoseconds."""
        operators = self._t[OPERATORS]
        while True:
            self._view(PLAN, 2 * operators)[operators:] = configs
            if start(self._t, self._c, self._w) != NO_SPACE:
                break
            self._grow()
        time = step_nanoseconds(self._t, self._w, 0)
        w = self._w
        w[COST] = w[BEST_COST] = w[START_COST] = time
        w[ITERATION] = w[ACCEPTED] = w[INFEASIBLE_COUNT] = w[SERIES_USED] = 0
        w[IMPROVED] = 0
        self._view(BEST_PLAN, operators)[:] = configs
        self._view(TOP_COST, self.options.kept)[:] = NEVER
        if self.fits():
            self._view(TOP_COST, 1)[0] = time
            self._view(TOP_PLANS, operators)[:] = configs
        else:  # anything that fits is better
            w[COST] = w[BEST_COST] = NEVER
        return int(time)

    def fits(self) -> bool:
        """Whether the current plan keeps within every device's memory."""
        devices = self._t[DEVICES]
        capacity = self._t[self._t[CAPACITY] :][:devices]
        return bool(np.all(self._view(MEMORY, devices) <= capacity))

    def memory_bytes(self) -> Integers:
        """What the current plan needs on each device."""
        return self._view(MEMORY, self._t[DEVICES]).copy()

    def host_ns(self) -> int:
        """How long launching the current plan, just started, keeps the busiest host."""
        devices = int(self._t[DEVICES])
        return int(self._view(STATE, 4 * devices)[HOST * devices :][:devices].max())

    def trace(self, configs: Integers) -> Integers:
        """Every task of a plan: kind, operator or edge, device, begin, end in nanoseconds."""
        self.start(configs)
        last = 2 * self._t[OPERATORS]
        rows = 1
        while True:
            self._w = self._memory(trace=rows)
            self.start(configs)
            self._w[TRACED] = 0
            self._view(STATE, 4 * self._t[DEVICES])[:] = 0
            run_steps(self._t, self._w, 0, last, last, 0)
            step_nanoseconds(self._t, self._w, 0)
            if self._w[TRACED] <= rows:
                break
            rows = int(self._w[TRACED])
        recorded = self._view(TRACE, 5 * rows).reshape(rows, 5).copy()
        self._w = self._memory()
        return recorded[: self._w[TRACED] or rows]

    def propose(self, changes: dict[int, int]) -> int:
        """Time of the current plan with these changes; ``INFEASIBLE`` beyond memory.

        The current plan stays. Call ``accept`` or ``withdraw`` next.
        """
        while True:
            for operator, config in changes.items():
                change(self._t, self._w, operator, config)
            outcome = prepare(self._t, self._c, self._w)
            if outcome != NO_SPACE:
                break
            self.withdraw()
            self._grow()
        return int(outcome) if outcome < 0 else int(evaluate(self._t, self._w))

    def accept(self) -> None:
        """Make the proposal the current plan."""
        accept(self._t, self._w)

    def withdraw(self) -> None:
        """Drop the proposal."""
        withdraw(self._t, self._w)

    def run(self, count: int) -> None:
        """Go on until the chain has simulated ``count`` proposals."""
        arguments = (self._reals, self._random, count)
        while run_chain(self._t, self._c, self._w, *arguments) == NO_SPACE:
            self._grow()

    def current(self) -> Integers:
        """Configurations of the current plan."""
        return self._view(PLAN, int(self._t[OPERATORS])).copy()

    def best(self) -> list[tuple[int, Integers]]:
        """The best distinct plans and their nanoseconds, best first."""
        operators, kept = int(self._t[OPERATORS]), self.options.kept
        costs = self._view(TOP_COST, kept)
        plans = self._view(TOP_PLANS, kept * operators).reshape(kept, operators)
        return [(int(c), p.copy()) for c, p in zip(costs, plans, strict=True) if c < NEVER]

    def series(self) -> Integers:
        """Rows of iteration, current, proposed and best time, in nanoseconds."""
        used = self[SERIES_USED]
        return self._view(SERIES, 4 * used).reshape(used, 4).copy()

    def state(self) -> Integers:
        """Ends of the timelines before each step of the current plan: (steps + 1, 4, devices).

        A link that ends before its device counts as ending with it: nothing depends on which.
        """
        count, devices = 2 * int(self._t[OPERATORS]) + 1, int(self._t[DEVICES])
        rows = self._view(BEFORE, count * 4 * devices).reshape(count, 4, devices).copy()
        for line in (LINK, SYNC):
            rows[:, line] = np.maximum(rows[:, line], rows[:, DEVICE])
        return rows

    def _view(self, table: int, count: int) -> Integers:
        return self._w[self._w[table] :][:count]

    def _memory(self, trace: int = 0) -> Integers:
        operators, devices = int(self._t[OPERATORS]), int(self._t[DEVICES])
        edges, options = int(self._t[EDGES]), self.options
        sizes = {
            PLAN: 2 * operators,
            ROUTES: 2 * edges,
            MEMORY: 2 * devices,
            OPTIMIZER: 2 * devices,
            STATE: 4 * devices,
            BEFORE: 2 * (2 * operators + 1) * 4 * devices,
            ARRIVED: 2 * edges * devices,
            ARRIVED_BACK: 2 * edges * devices,
            FRESH: 2 * edges,
            LAUNCHED: 4 * edges,
            CHANGED: max(operators, LONGEST_CARRY),
            VOLUME: devices * devices,
            LISTS: 6 * devices,
            BEST_PLAN: operators,
            TOP_COST: options.kept,
            TOP_PLANS: options.kept * operators,
            SERIES: 4 * options.points,
            TRACE: 5 * trace,
            KEYS: _FIRST_KEYS,
            PLACES: _FIRST_KEYS,
            ARENA: _FIRST_ARENA,
        }
        scalars = {
            ARENA_USED: 1,  # place 0 says that nothing is moved
            KEY_SLOTS: _FIRST_KEYS,
            ARENA_SIZE: _FIRST_ARENA,
            TRACE_SIZE: trace,
            KEPT: options.kept,
            EVERY: max(options.every, 1),
            RETURN_EVERY: options.return_every,
            SERIES_SIZE: options.points,
        }
        tables = {place: np.zeros(size, dtype=np.int64) for place, size in sizes.items()}
        tables[KEYS] -= 1
        return pack(scalars, tables, W_SCALARS, W_TABLES)

    def _grow(self) -> None:
        """Double the arena, and the table over it where that is crowded.

        The arena comes last: all that moves is itself, when the table before it grows.
        """
        w = self._w
        slots, size, used = int(w[KEY_SLOTS]), int(w[ARENA_SIZE]), int(w[ARENA_USED])
        arena_at = int(w[ARENA])
        old_keys, old_places = self._view(KEYS, slots), self._view(PLACES, slots)
        more_slots = 4 * slots if 3 * w[KEYS_USED] > slots else slots
        keys, places = np.full(more_slots, -1, dtype=np.int64), np.zeros(more_slots, dtype=np.int64)
        moved = 2 * (more_slots - slots)
        mask = more_slots - 1
        for key, place in zip(old_keys.tolist(), old_places.tolist(), strict=True):
            if key == -1:
                continue
            slot = ((key * 2654435761) >> 7) & mask
            while keys[slot] != -1:
                slot = (slot + 1) & mask
            keys[slot], places[slot] = key, place + moved if place else 0
        head = w[: w[KEYS]].copy()
        arena = np.zeros(2 * size, dtype=np.int64)
        arena[:used] = w[arena_at : arena_at + used]
        head[KEY_SLOTS], head[ARENA_SIZE] = more_slots, 2 * size
        head[PLACES] = head[KEYS] + more_slots
        head[ARENA] = head[PLACES] + more_slots
        edges = 2 * int(self._t[EDGES])
        routes = head[head[ROUTES] :][:edges]
        routes[routes > 0] += moved
        self._w = np.concatenate([head, keys, places, arena])


# -----------------------------------------------------------------------------
# The Markov chain over simulated plans, compiled as one loop.
#
# Starts from any plan. A proposal gives one operator another configuration, drawn evenly from
# its layouts and then from that layout's devices; or it carries an operator's configuration over
# to neighbours along the graph, as far as they can have it. Worse plans are accepted with
# ``exp(-alpha * d)``, ``d`` in percent of the current time, or in milliseconds, as in Jia et al.
# 2019. The first is no Metropolis rule: what it accepts on the way from a plan to another and back
# does not balance, so that the chain has no known distribution to go to. Neither rule corrects for
# proposals that are not symmetric (layouts are drawn before devices; configurations are carried
# over). Both serve to find a good plan, not to sample.

LONGEST_CARRY = 8
"""Operators that one proposal changes at most."""

ALPHA, CARRY, BY_MILLISECONDS = range(3)
"""Places of the chain's real numbers: refusal, share of proposals that carry over, and whether the
refusal is per millisecond (1) or per percent (0)."""

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
    """Draw a proposal, as the comment above says."""
    operator = draw_below(random, t[OPERATORS])
    if draw_unit(random) >= reals[CARRY]:
        change(t, w, operator, _any_config(t, operator, random))
        return
    if draw_unit(random) < 0.5:
        change(t, w, operator, _any_config(t, operator, random))
    _carry(t, w, operator, random)


@compiled
def _any_config(t: Integers, operator: int, random: Random) -> int:
    kind = t[CLASS_FIRST] + t[t[OPERATOR_CLASS] + operator]
    layout = t[LAYOUT_FIRST] + t[kind] + draw_below(random, t[kind + 1] - t[kind])
    config: int = t[layout] + draw_below(random, t[layout + 1] - t[layout])
    return config


@compiled
def _carry(t: Integers, w: Integers, operator: int, random: Random) -> None:
    """Follow edges from an operator, giving each the configuration of the one before."""
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
            change(t, w, other, config)
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
def run_chain(t: Integers, c: Reals, w: Integers, reals: Reals, random: Random, count: int) -> int:
    """Go on until ``count`` proposals were simulated in all.

    Returns:
        0 when done, or ``NO_SPACE``, after which the arena must grow and this be called again.

    """
    while w[ITERATION] < count:
        before = random[0]
        propose(t, w, reals, random)
        outcome = prepare(t, c, w)
        if outcome == NO_SPACE:
            withdraw(t, w)
            random[0] = before
            return NO_SPACE
        time = -1
        accepted = False
        if outcome == INFEASIBLE:
            w[INFEASIBLE_COUNT] += 1
        else:
            time = evaluate(t, w)
            _note(t, w, time)
            worse = 100.0 * (time - w[COST]) / w[COST]
            if reals[BY_MILLISECONDS] > 0.0:
                worse = (time - w[COST]) / 1e6
            accepted = worse <= 0 or draw_unit(random) < math.exp(-reals[ALPHA] * worse)
        w[ITERATION] += 1
        if accepted:
            w[ACCEPTED] += 1
            w[COST] = time
            if time < w[BEST_COST]:
                w[BEST_COST], w[IMPROVED] = time, w[ITERATION]
                for k in range(t[OPERATORS]):
                    w[w[BEST_PLAN] + k] = w[w[PLAN] + t[OPERATORS] + k]
            accept(t, w)
        else:
            withdraw(t, w)
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
    start(t, c, w)
    w[COST] = w[BEST_COST]


# -----------------------------------------------------------------------------
# Proposals simulated by what they change, in compiled code.
#
# A proposal is simulated from the step of its first changed operator on, from the state that the
# current plan had there. Where, past everything that it touches, the timelines turn out to be
# the current plan's once more, all later by one time, the rest is skipped: times are whole
# numbers, and the schedule only adds and takes maxima, so a common delay passes through it
# unchanged. The result is exactly the full simulation's.


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
        return step_nanoseconds(t, w, 1)
    _later(t, w, low, 0)
    reached = run_steps(t, w, low, operators, high + 1, 1)
    resume = operators
    if reached < operators:
        shift = _shift(t, w, reached)
        resume = last_step - 1 - high
        w[SKIP_FROM], w[SKIP_TO], w[SKIP_SHIFT] = reached, resume, shift
        _later(t, w, resume, shift)
    reached = run_steps(t, w, resume, last_step, last_step - low, 1)
    if reached < last_step:
        shift = _shift(t, w, reached)
        w[END_FROM], w[END_SHIFT] = reached, shift
        _later(t, w, last_step, shift)
    return step_nanoseconds(t, w, 1)


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
    run_steps(t, w, 0, 2 * operators, 2 * operators, 0)
    return 0


# -----------------------------------------------------------------------------
# What a proposal changes beside times: configurations, routes, memory, in compiled code.

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
