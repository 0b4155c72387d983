"""How a chain walks in the simulator, where the user leaves that to the runner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perfsearch.core.hints import PROPAGATION, WalkRequest
from perfsearch.parallel.soap.configuration import Plan

if TYPE_CHECKING:
    from perfsearch.parallel.soap.simulator import Found, Simulator

PROPOSALS = 200_000
ALPHA = 1.0
RETURNS = 100
"""Times that a chain goes back to its best plan, unless it is told when to."""


def walk(simulator: Simulator, start: Plan, request: WalkRequest) -> Found:
    """Walk from ``start``; what ``request`` leaves open is as was found best."""
    from perfsearch.parallel.soap.engine import ChainOptions

    proposals = PROPOSALS if request.proposals is None else request.proposals
    every = proposals // RETURNS if request.return_every is None else request.return_every
    options = ChainOptions(
        alpha=ALPHA if request.alpha is None else request.alpha,
        carry=PROPAGATION if request.propagation is None else request.propagation,
        return_every=every,
    )
    return simulator.search(start, proposals, options, request.seed)
