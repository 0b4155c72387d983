"""What a strategy is told of the space beside the trials: plain values and pure functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from perfsearch.core.knob import Configuration, Value

PROPAGATION = 0.25
"""Share of a Markov chain's proposals that carry a value over to a neighbour, where nobody asks for
another; ``benchmarks/propagation.py`` found none better.
"""


Acceptance = Literal["percent", "milliseconds"]
"""What a Markov chain's refusal of worse states is per."""


@dataclass(frozen=True)
class Hints:
    """What the runner knows about the space, as plain values and pure functions.

    Attributes:
        baseline: the configuration that the user has today; trial 0.
        effect_order: knob names, the one with the largest expected effect first.
        starts: configurations that somebody who knows the field would try first, in that order;
            some may be infeasible.
        monotonic: knob name to +1 where a larger value is expected to be faster until memory ends,
            -1 for the reverse.
        stage_knob: the ordered knob whose values are visited cheapest first (a ZeRO stage).
        memory_limit_gib: what fits on a device.
        predict: prediction for a configuration, given the trials told so far.
        start: configuration that the user wants a search to begin with; ``None``: the baseline.
        run_chain: runs Markov chains on the runner's own simulator, which is far faster than
            asking for predictions one by one; ``None``: there is none.
        neighbours: knob name to the knobs beside it where the job is a graph: what one of them is
            set to is likely to suit the others.
        prior_search: what a prior search of a similar job found.

    """

    baseline: dict[str, Value]
    effect_order: tuple[str, ...] = ()
    starts: tuple[dict[str, Value], ...] = ()
    monotonic: dict[str, int] = field(default_factory=dict)
    stage_knob: str | None = None
    memory_limit_gib: float | None = None
    predict: Callable[[Configuration], Prediction] = lambda configuration: Prediction()
    start: dict[str, Value] | None = None
    run_chain: Callable[[ChainRequest], ChainResult] | None = None
    neighbours: dict[str, tuple[str, ...]] = field(default_factory=dict)
    prior_search: PriorSearch | None = None


@dataclass(frozen=True)
class Prediction:
    """What a runner expects of a configuration; ``None`` where it cannot say."""

    peak_gib: float | None = None
    cost: float | None = None


@dataclass(frozen=True)
class PriorSearch:
    """What a prior search of a similar job found: a belief to start from, never measurements.

    Attributes:
        source: where it was found, for people.
        costs: configurations of this search's knobs, each with the logarithm of its cost over that
            of the prior search's baseline; best first.

    """

    source: str
    costs: tuple[tuple[dict[str, Value], float], ...]


@dataclass(frozen=True)
class ChainRequest:
    """Markov chains that a runner is to run on its own simulator.

    Attributes:
        start: configuration to begin with.
        proposals: to simulate, all chains together; ``None``: as many as the runner holds to be
            enough.
        seed: of the draws.
        alpha: how strictly worse states are refused, in the unit of ``acceptance``; ``None``: as
            the runner finds best.
        return_every: proposals after which it goes back to the best; 0 never, ``None`` as above.
        propagation: share of proposals that carry a configuration over to neighbours; ``None`` as
            above.
        chains: the first begins with ``start``, others elsewhere; ``None`` as above.
        seconds: that they may take together; ``None``: no limit.
        acceptance: whether ``alpha`` is per ``percent`` of the current state's cost, or per
            ``milliseconds``.

    """

    start: dict[str, Value]
    proposals: int | None
    seed: int
    alpha: float | None = None
    return_every: int | None = None
    propagation: float | None = None
    chains: int | None = None
    seconds: float | None = None
    acceptance: Acceptance = "percent"


@dataclass(frozen=True)
class ChainResult:
    """What Markov chains over simulated configurations found, one after another.

    Attributes:
        points: the best distinct configurations seen, best first.
        series: iteration, then the current, proposed and best predicted seconds of a step.
        note: one line on how it went.

    """

    points: list[dict[str, Value]]
    series: list[tuple[int, float, float, float]] = field(default_factory=list)
    note: str = ""
