"""Markov chains in the simulator, from several plans; what is left open is as found best."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from perfsearch.core.hints import PROPAGATION, ChainRequest
from perfsearch.soap.plan import Plan

if TYPE_CHECKING:
    from perfsearch.soap.simulator.chain import ChainOptions
    from perfsearch.soap.simulator.simulator import Found, Simulator

PROPOSALS = 200_000
ALPHA = 1.0
RETURNS = 100
"""Times that a chain goes back to its best plan, unless it is told when to."""
CHAINS = 4
"""One unlucky chain was 43% slower than its like, and a chain costs a second."""
_EXPLORED = 0.5
"""Share of the proposals that several chains have; the best plan that they found has the rest."""
_PROBE = 500
"""Proposals by which it is told how many a number of seconds is good for."""
DRAWS = 20
"""Changes an operator, all accepted, that make a plan a random one."""


@dataclass(frozen=True)
class Searched:
    """What several chains came to.

    Attributes:
        found: as if they were one chain.
        starts: what each began with.

    """

    found: Found
    starts: tuple[str, ...]


def run_chains(
    simulator: Simulator, start: Plan, named: Mapping[str, Plan], request: ChainRequest
) -> Searched:
    """Run chains, the first from ``start``, others in turn from random and from named plans.

    Half of the proposals are theirs; with the other half a last chain goes on from the best.

    Args:
        simulator: to run in.
        start: where the user wants to begin.
        named: other plans by name; those with the shortest simulated steps are taken.
        request: how.

    """
    from perfsearch.soap.simulator.chain import ChainOptions

    proposals = PROPOSALS if request.proposals is None else request.proposals
    wanted = CHAINS if request.chains is None else request.chains
    chains = min(wanted, max(proposals, 1))
    part = 1.0 if chains == 1 else _EXPLORED / chains
    seconds = None if request.seconds is None else part * request.seconds
    options = ChainOptions(
        alpha=ALPHA if request.alpha is None else request.alpha,
        by_milliseconds=request.acceptance == "milliseconds",
        carry=PROPAGATION if request.propagation is None else request.propagation,
    )
    if request.seconds is not None and request.proposals is None:
        rate = _rate(simulator, start, options, request.seed)
        proposals = max(_PROBE * chains, round(request.seconds * rate))

    def search(plan: Plan, number: int, share: int, limit_s: float | None) -> Found:
        every = share // RETURNS if request.return_every is None else request.return_every
        seed = (request.seed + number) % 2**63
        return simulator.search(plan, share, replace(options, return_every=every), seed, limit_s)

    found, starts = [], []
    for number, (name, plan) in enumerate(_starts(simulator, start, named, chains, request.seed)):
        found.append(search(plan, number, math.ceil(part * proposals), seconds))
        starts.append(name)
    rest = proposals - sum(each.proposals for each in found)
    plans = [each.plans[0] for each in found if each.plans]
    if chains > 1 and rest > 0 and plans:
        spent_s = sum(each.seconds for each in found)
        left_s = None if request.seconds is None else max(request.seconds - spent_s, 0.0)
        _, best = min(plans, key=lambda entry: entry[0])
        found.append(search(best, chains, rest, left_s))
        starts.append("the best of these")
    return Searched(_joined(found, options.kept), tuple(starts))


def _rate(simulator: Simulator, start: Plan, options: ChainOptions, seed: int) -> float:
    return simulator.search(start, _PROBE, options, seed).proposals_per_s


def _starts(
    simulator: Simulator, start: Plan, named: Mapping[str, Plan], count: int, seed: int
) -> list[tuple[str, Plan]]:
    """The user's, then in turn a random plan and the best named one that is left."""
    first = next((name for name, plan in named.items() if plan == start), "the plan given")
    found = [(first, start)]
    others = [(name, plan) for name, plan in named.items() if plan != start]
    fitting = [(n, p, e.seconds) for n, p in others if (e := simulator.estimate(p)).fits]
    best = sorted(fitting, key=lambda entry: entry[2])
    while len(found) < count:
        if len(found) % 2 == 0 and best:
            name, plan, _ = best.pop(0)
            found.append((name, plan))
            continue
        changes = DRAWS * len(start)
        drawn = simulator.drift(start, changes, (seed + len(found)) % 2**63)
        found.append(("a random plan", drawn))
    return found


def _joined(parts: list[Found], kept: int) -> Found:
    """Chains one after another as one: its series goes on, with the best of all so far."""
    series: list[tuple[int, float, float, float]] = []
    before, best = 0, float("inf")
    for part in parts:
        series += [
            (before + n, current, proposed, min(best, own))
            for n, current, proposed, own in part.series
        ]
        before += part.proposals
        best = min([best, *(row[3] for row in part.series[-1:])])
    plans: list[tuple[float, Plan]] = []
    for seconds, plan in heapq.merge(*(part.plans for part in parts), key=lambda entry: entry[0]):
        if all(plan != other for _, other in plans):
            plans.append((seconds, plan))
    return replace(
        parts[0],
        plans=plans[:kept],
        series=series,
        proposals=before,
        accepted=sum(part.accepted for part in parts),
        infeasible=sum(part.infeasible for part in parts),
        seconds=sum(part.seconds for part in parts),
    )
