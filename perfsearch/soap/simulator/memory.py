"""How the compiled simulator lays out a job and a search in memory.

Two arrays of whole numbers hold everything: ``t``, the job, which a search does not change, and
``w``, the search. Each begins with scalars, then the places where its tables begin; a table's name
in capitals is the place of that place. Compiled code takes the few arrays as arguments, since a
call with many costs more than simulating an operator.

Operators that only differ in name share a *class*. A class has *layouts* (degrees, and all that
follows from them but not from devices), and a layout has *configurations* (devices). Layouts of a
class, and configurations of a layout, have consecutive numbers. Times are whole nanoseconds, so
that sums do not depend on their order and equal timelines are equal bit by bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]

EXCHANGE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BROADCAST, ALL_REDUCE = range(6)
"""Kinds of transfers, rows of the curves; an exchange is a batch of messages between pairs."""

HOST, DEVICE, LINK, SYNC = range(4)
"""Timelines of a device: the thread that launches, the compute stream, its link, and the stream of
gradient synchronisation."""

FORWARD, BACKWARD, SEND_FORWARD, SEND_BACKWARD, SYNCHRONISE, OPTIMIZE, COPY, COPY_SUM = range(8)
"""Kinds of recorded tasks; copies are those of packing, and of putting together what arrived."""

# --- t: scalars
OPERATORS, DEVICES, CONFIGS, POINTS = range(4)
"""Numbers of operators, devices, configurations, and points of a curve."""
TRANSFER_HOST_NS, SYNC_HOST_NS, SYNC_ON_LINK, NEED_COUNT = range(4, 8)
OPTIMIZER_NS, HOST_IS_FREE, STEP_NS, EDGES = range(8, 12)
"""How the execution behaves, see ``machine.Machine``; numbers of distinct needs and of edges."""
COPY_NS, COPY_NS_PER_MIB, HOST_NS = range(12, 15)
"""Time of packing, or putting together, what is moved; of the host for a step, launches apart."""
T_SCALARS = 15

# --- t: tables
OPERATOR_CLASS = 15
"""(operators)."""
CLASS_FIRST = 16
"""(classes + 1): first layout of a class."""
LAYOUT_FIRST = 17
"""(layouts + 1): first configuration of a layout."""
CONFIG = 18
"""(configurations, 8): see ``C_LAYOUT``."""
PARTS = 19
"""(parts of layouts, 6): see ``P_FORWARD``."""
DEVICE_LISTS = 20
"""Devices of configurations, part by part."""
SYNC_GROUPS = 21
"""Of each layout its groups whose gradients are summed: number of members, nanoseconds of packing,
part numbers."""
SYNC_TIMES = 22
"""Of each configuration a time for each group."""
EDGE = 23
"""(edges, 3): producer, consumer, class of the edge; in order of consumers."""
IN_FIRST = 24
"""(operators + 1): first edge into an operator."""
OUT_FIRST = 25
"""(operators + 1): first place in ``OUT_EDGES``."""
OUT_EDGES = 26
"""Edges out of an operator, in order of consumers."""
EDGE_CLASS = 27
"""(classes of edges, 7): see ``E_BYTES``."""
NEEDS = 28
"""For each class of edges, and each layout of its consumer, a place in ``RECTANGLES``."""
NEED_OF = 29
"""For each class of edges, and each configuration of its consumer, a number that those share who
need the same on the same devices; they share its transfer, too."""
OWNED = 30
"""(layouts): place in ``RECTANGLES`` of what each part holds."""
RECTANGLES = 31
"""Blocks of (part, dimension, low and high)."""
COPIES = 32
"""Configurations that match those of another class, or -1."""
LINK_LEVEL = 33
"""(devices, devices): level of what connects two, a row of the curves."""
CAPACITY = 34
"""(devices): bytes, the hard limit."""
LIVE_FIRST = 35
"""(operators + 1): first place in ``LIVE``."""
LIVE = 36
"""Edges from an operator up to this one to one after it."""
T_TABLES = 37

C_LAYOUT, C_PARTS, C_DEVICES, C_ROWS, C_GROUP_COUNT, C_GROUPS, C_TIMES = range(7)
"""Columns of ``CONFIG``: layout, number of parts, then places in ``t`` of its devices, of its
layout's parts, the number and place of its groups, and of their times."""
C_WIDTH = 8

P_FORWARD, P_BACKWARD, P_FORWARD_HOST, P_BACKWARD_HOST, P_RESIDENT, P_OPTIMIZER = range(6)
"""Columns of ``PARTS``: nanoseconds on device and host; bytes of weights, gradients, optimizer
state and kept activations; nanoseconds of the optimizer."""
P_WIDTH = 6

E_BYTES, E_GRADIENT, E_DIMS, E_NEEDS, E_NEED_OF, E_COPY_BACK, E_COPY_ON = range(7)
"""Columns of ``EDGE_CLASS``: bytes of an element, 1 where a gradient comes back, dimensions, then
places in ``t``: of its needs and their numbers, of the producer's configurations that match the
consumer's, and of the consumer's that match the producer's."""
E_WIDTH = 7

# --- w: scalars
ARENA_USED, KEYS_USED, CLOCK, TRACED, CHANGED_COUNT, STEPS_RUN = range(6)
"""Used arena and keys, proposals so far, recorded tasks, changed operators, steps simulated."""
COST, BEST_COST, START_COST, ITERATION, ACCEPTED, INFEASIBLE_COUNT, SERIES_USED, IMPROVED = range(
    6, 14
)
"""Of the chain: nanoseconds of the current, best and first plan; proposals, accepted ones, ones
beyond memory, points of the series, and the proposal that found the best plan."""
SKIP_FROM, SKIP_TO, SKIP_SHIFT, END_FROM, END_SHIFT, FIRST_STEP = range(14, 20)
"""Steps that the last proposal skipped, and by how much later they are; the same to the end; and
the first step that it touches."""
KEY_SLOTS, ARENA_SIZE, TRACE_SIZE, KEPT, EVERY, RETURN_EVERY, SERIES_SIZE = range(20, 27)
"""Sizes; proposals between points of the series, and after which the chain goes back to the best
plan (0: never)."""
W_SCALARS = 28

# --- w: tables. Of a pair the first is the current plan, the second the proposal.
PLAN = 28
"""(2, operators): configurations."""
ROUTES = 29
"""(2, edges): place in ``w`` of what an edge moves; 0 where that is nothing."""
MEMORY = 30
"""(2, devices): bytes."""
OPTIMIZER = 31
"""(2, devices): nanoseconds."""
STATE = 32
"""(4, devices): ends of the timelines; scratch."""
BEFORE = 33
"""(2, 2 * operators + 1, 4, devices): the state before each step."""
ARRIVED = 34
"""(2, edges, devices): when what an edge moves is there."""
ARRIVED_BACK = 35
"""(2, edges, devices): the same of its gradients."""
FRESH = 36
"""(2, edges): the proposal that moved it last, forward and backward."""
LAUNCHED = 37
"""(2, 2, edges): the step at which it is moved, forward and backward."""
CHANGED = 38
"""(operators): those that a proposal changes."""
VOLUME = 39
"""(devices, devices): scratch."""
LISTS = 40
"""(6, devices): scratch."""
BEST_PLAN = 41
"""(operators)."""
TOP_COST = 42
"""(kept): nanoseconds of the best distinct plans, ascending."""
TOP_PLANS = 43
"""(kept, operators): their configurations."""
SERIES = 44
"""(points, 4): iteration, current, proposed and best time."""
TRACE = 45
"""(tasks, 5): kind, operator or edge, device, begin, end."""
KEYS = 46
"""Pairs of configurations whose route is known; -1 is free."""
PLACES = 47
"""Where those routes are."""
ARENA = 48
"""Routes, last, so that it can grow."""
W_TABLES = 49


def pack(
    scalars: Mapping[int, int], tables: Mapping[int, Integers], first: int, last: int
) -> Integers:
    """Lay tables end to end behind the scalars and the places where they begin.

    Args:
        scalars: by place.
        tables: by place, ``first`` to ``last - 1``.
        first: place of the first table's place.
        last: where the tables' data begins.

    """
    head = np.zeros(last, dtype=np.int64)
    for place, value in scalars.items():
        head[place] = value
    flat = [
        np.ascontiguousarray(tables[place], dtype=np.int64).ravel() for place in range(first, last)
    ]
    head[first:last] = last + np.concatenate([[0], np.cumsum([len(part) for part in flat])])[:-1]
    return np.concatenate([head, *flat])


# -----------------------------------------------------------------------------
# Compilation of the simulator's inner loops.

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    """Compile with numba at the first call, kept on disk for the next start."""
    dispatcher = numba.njit(cache=True, nogil=True)(function)
    file = getattr(dispatcher._cache, "_cache_file", None)
    if file is not None:
        # Numba looks at the time of the function's own file only, but what it keeps holds the code
        # of the functions that are called, and the constants of this file.
        file._source_stamp = (file._source_stamp, _digest())
    return cast("_Function", dispatcher)


@cache
def _digest() -> str:
    """Of this folder's files with compiled functions, and of this one."""
    texts = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    content = b"".join(text for text in texts if b"@compiled" in text)
    return hashlib.blake2b(content, digest_size=8).hexdigest()
