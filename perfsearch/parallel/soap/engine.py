"""Memory of the compiled simulator, and its growth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perfsearch.parallel.soap import chain as chains
from perfsearch.parallel.soap import delta, proposals, steps
from perfsearch.parallel.soap import tables as at
from perfsearch.parallel.soap.routes import NO_SPACE
from perfsearch.parallel.soap.tables import Integers, Reals

_FIRST_ARENA = 1 << 16
_FIRST_KEYS = 1 << 12
NEVER = 1 << 60
"""Instead of a time, where there is none yet."""


@dataclass(frozen=True)
class ChainOptions:
    """How a chain walks.

    Attributes:
        alpha: refusal of worse plans, per percent of the current time.
        carry: share of proposals that carry a configuration over to neighbours.
        kept: how many of the best distinct plans are kept.
        every: proposals between points of the series.
        points: room for so many of them.
        return_every: proposals after which it goes back to the best plan; 0 never.

    """

    alpha: float = 1.0
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
        self._reals = np.array([self.options.alpha, self.options.carry])
        words = np.random.SeedSequence(seed).generate_state(1, np.uint64)
        self._random = words | np.uint64(1)
        self._w = self._memory()

    def __getitem__(self, scalar: int) -> int:
        """A scalar of the search, such as ``tables.BEST_COST``."""
        return int(self._w[scalar])

    def start(self, configs: Integers) -> int:
        """Make a plan the current one, a new chain's first, and return its nanoseconds."""
        operators = self._t[at.OPERATORS]
        while True:
            self._view(at.PLAN, 2 * operators)[operators:] = configs
            if delta.start(self._t, self._c, self._w) != NO_SPACE:
                break
            self._grow()
        time = steps.finish(self._t, self._w, 0)
        w = self._w
        w[at.COST] = w[at.BEST_COST] = w[at.START_COST] = time
        w[at.ITERATION] = w[at.ACCEPTED] = w[at.INFEASIBLE_COUNT] = w[at.SERIES_USED] = 0
        w[at.IMPROVED] = 0
        self._view(at.BEST_PLAN, operators)[:] = configs
        self._view(at.TOP_COST, self.options.kept)[:] = NEVER
        if self.fits():
            self._view(at.TOP_COST, 1)[0] = time
            self._view(at.TOP_PLANS, operators)[:] = configs
        else:  # anything that fits is better
            w[at.COST] = w[at.BEST_COST] = NEVER
        return int(time)

    def fits(self) -> bool:
        """Whether the current plan keeps within every device's memory."""
        devices = self._t[at.DEVICES]
        capacity = self._t[self._t[at.CAPACITY] :][:devices]
        return bool(np.all(self._view(at.MEMORY, devices) <= capacity))

    def memory_bytes(self) -> Integers:
        """What the current plan needs on each device."""
        return self._view(at.MEMORY, self._t[at.DEVICES]).copy()

    def host_ns(self) -> int:
        """How long launching the current plan, just started, keeps the busiest host."""
        devices = int(self._t[at.DEVICES])
        return int(self._view(at.STATE, 4 * devices)[at.HOST * devices :][:devices].max())

    def trace(self, configs: Integers) -> Integers:
        """Every task of a plan: kind, operator or edge, device, begin, end in nanoseconds."""
        self.start(configs)
        last = 2 * self._t[at.OPERATORS]
        rows = 1
        while True:
            self._w = self._memory(trace=rows)
            self.start(configs)
            self._w[at.TRACED] = 0
            self._view(at.STATE, 4 * self._t[at.DEVICES])[:] = 0
            steps.run(self._t, self._w, 0, last, last, 0)
            steps.finish(self._t, self._w, 0)
            if self._w[at.TRACED] <= rows:
                break
            rows = int(self._w[at.TRACED])
        recorded = self._view(at.TRACE, 5 * rows).reshape(rows, 5).copy()
        self._w = self._memory()
        return recorded[: self._w[at.TRACED] or rows]

    def propose(self, changes: dict[int, int]) -> int:
        """Time of the current plan with these changes; ``proposals.INFEASIBLE`` beyond memory.

        The current plan stays. Call ``accept`` or ``withdraw`` next.
        """
        while True:
            for operator, config in changes.items():
                proposals.change(self._t, self._w, operator, config)
            outcome = proposals.prepare(self._t, self._c, self._w)
            if outcome != NO_SPACE:
                break
            self.withdraw()
            self._grow()
        return int(outcome) if outcome < 0 else int(delta.evaluate(self._t, self._w))

    def accept(self) -> None:
        """Make the proposal the current plan."""
        delta.accept(self._t, self._w)

    def withdraw(self) -> None:
        """Drop the proposal."""
        proposals.withdraw(self._t, self._w)

    def walk(self, count: int) -> None:
        """Go on until the chain has simulated ``count`` proposals."""
        arguments = (self._reals, self._random, count)
        while chains.walk(self._t, self._c, self._w, *arguments) == NO_SPACE:
            self._grow()

    def current(self) -> Integers:
        """Configurations of the current plan."""
        return self._view(at.PLAN, int(self._t[at.OPERATORS])).copy()

    def best(self) -> list[tuple[int, Integers]]:
        """The best distinct plans and their nanoseconds, best first."""
        operators, kept = int(self._t[at.OPERATORS]), self.options.kept
        costs = self._view(at.TOP_COST, kept)
        plans = self._view(at.TOP_PLANS, kept * operators).reshape(kept, operators)
        return [(int(c), p.copy()) for c, p in zip(costs, plans, strict=True) if c < NEVER]

    def series(self) -> Integers:
        """Rows of iteration, current, proposed and best time, in nanoseconds."""
        used = self[at.SERIES_USED]
        return self._view(at.SERIES, 4 * used).reshape(used, 4).copy()

    def state(self) -> Integers:
        """Ends of the timelines before each step of the current plan: (steps + 1, 4, devices).

        A link that ends before its device counts as ending with it: nothing depends on which.
        """
        count, devices = 2 * int(self._t[at.OPERATORS]) + 1, int(self._t[at.DEVICES])
        rows = self._view(at.BEFORE, count * 4 * devices).reshape(count, 4, devices).copy()
        for line in (at.LINK, at.SYNC):
            rows[:, line] = np.maximum(rows[:, line], rows[:, at.DEVICE])
        return rows

    def _view(self, table: int, count: int) -> Integers:
        return self._w[self._w[table] :][:count]

    def _memory(self, trace: int = 0) -> Integers:
        operators, devices = int(self._t[at.OPERATORS]), int(self._t[at.DEVICES])
        edges, options = int(self._t[at.EDGES]), self.options
        sizes = {
            at.PLAN: 2 * operators,
            at.ROUTES: 2 * edges,
            at.MEMORY: 2 * devices,
            at.OPTIMIZER: 2 * devices,
            at.STATE: 4 * devices,
            at.BEFORE: 2 * (2 * operators + 1) * 4 * devices,
            at.ARRIVED: 2 * edges * devices,
            at.ARRIVED_BACK: 2 * edges * devices,
            at.FRESH: 2 * edges,
            at.LAUNCHED: 4 * edges,
            at.CHANGED: max(operators, chains.LONGEST_CARRY),
            at.VOLUME: devices * devices,
            at.LISTS: 6 * devices,
            at.BEST_PLAN: operators,
            at.TOP_COST: options.kept,
            at.TOP_PLANS: options.kept * operators,
            at.SERIES: 4 * options.points,
            at.TRACE: 5 * trace,
            at.KEYS: _FIRST_KEYS,
            at.PLACES: _FIRST_KEYS,
            at.ARENA: _FIRST_ARENA,
        }
        scalars = {
            at.ARENA_USED: 1,  # place 0 says that nothing is moved
            at.KEY_SLOTS: _FIRST_KEYS,
            at.ARENA_SIZE: _FIRST_ARENA,
            at.TRACE_SIZE: trace,
            at.KEPT: options.kept,
            at.EVERY: max(options.every, 1),
            at.RETURN_EVERY: options.return_every,
            at.SERIES_SIZE: options.points,
        }
        tables = {place: np.zeros(size, dtype=np.int64) for place, size in sizes.items()}
        tables[at.KEYS] -= 1
        return at.pack(scalars, tables, at.W_SCALARS, at.W_TABLES)

    def _grow(self) -> None:
        """Double the arena, and the table over it where that is crowded.

        The arena comes last: all that moves is itself, when the table before it grows.
        """
        w = self._w
        slots, size, used = int(w[at.KEY_SLOTS]), int(w[at.ARENA_SIZE]), int(w[at.ARENA_USED])
        arena_at = int(w[at.ARENA])
        old_keys, old_places = self._view(at.KEYS, slots), self._view(at.PLACES, slots)
        more_slots = 4 * slots if 3 * w[at.KEYS_USED] > slots else slots
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
        head = w[: w[at.KEYS]].copy()
        arena = np.zeros(2 * size, dtype=np.int64)
        arena[:used] = w[arena_at : arena_at + used]
        head[at.KEY_SLOTS], head[at.ARENA_SIZE] = more_slots, 2 * size
        head[at.PLACES] = head[at.KEYS] + more_slots
        head[at.ARENA] = head[at.PLACES] + more_slots
        edges = 2 * int(self._t[at.EDGES])
        routes = head[head[at.ROUTES] :][:edges]
        routes[routes > 0] += moved
        self._w = np.concatenate([head, keys, places, arena])
