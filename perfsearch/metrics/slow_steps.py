"""What the slow steps of a window are, and how that is told."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any

from perfsearch.core.steps import SlowSteps, read_window

SLOW_STEPS = "slow_steps"
"""Where a measurement's environment holds them."""

THROTTLED = "cpu_throttled_percentage"
"""Metric of the system: part of the time in which the container's CPU quota was used up."""

_EXPLAINED = 0.5
"""Part of what a slow step takes longer from which on a cause explains it."""

_NAMED = 0.01
"""Share of a window from which on slow steps are named."""

_MOST_NAMED = 4


class Cause(StrEnum):
    """What slow steps can be due to, the most telling first."""

    VALIDATION = "validation"
    LOADING = "loading"
    SAVING = "saving"
    COMPILING = "compiling"
    COLLECTING = "garbage_collection"
    QUOTA = "cpu_quota"
    OWN = "own_work"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    UNKNOWN = "unknown"

    @property
    def words(self) -> str:
        """It, for people."""
        return _WORDS[self]


_WORDS = {
    Cause.VALIDATION: "a round of validation",
    Cause.LOADING: "waiting for the DataLoader",
    Cause.SAVING: "saving a checkpoint",
    Cause.COMPILING: "compiling",
    Cause.COLLECTING: "Python's garbage collection",
    Cause.QUOTA: "the CPU quota of the container (cpu.stat: throttled)",
    Cause.OWN: "work outside of the backward pass and the optimizer",
    Cause.BACKWARD: "the backward pass",
    Cause.OPTIMIZER: "the optimizer",
    Cause.UNKNOWN: "nothing that was seen",
}

_BY_PHASE = {
    "dataloader_next": Cause.LOADING,
    "to_device": Cause.LOADING,
    "forward": Cause.OWN,
    "backward": Cause.BACKWARD,
    "optimizer": Cause.OPTIMIZER,
}
"""The part of a built-in step that each of its phases is."""


def parts_of(phases: Mapping[str, float]) -> dict[str, float]:
    """Parts of a step whose phases were timed."""
    parts: dict[str, float] = {}
    for phase, seconds in phases.items():
        cause = _BY_PHASE.get(phase, Cause.OWN)
        parts[cause] = parts.get(cause, 0.0) + seconds
    return parts


def slow_steps(
    seconds: Sequence[float],
    parts: Sequence[Mapping[str, float]] = (),
    aside: Collection[int] = (),
) -> list[dict[str, Any]]:
    """Kinds of slow steps as plain values, the slowest first; empty where steps are even.

    Args:
        seconds: of each step of the window.
        parts: of each step in turn, seconds by ``Cause``; empty: not known.
        aside: places of the steps beside which a round of validation ran.

    """
    kinds = read_window(seconds).slow
    slow = {place for kind in kinds for place in kind.places}
    usual = [place for place in range(len(seconds)) if place not in slow]
    return [
        {
            "cause": str(_cause(kind, usual, parts, aside)),
            "times": kind.times,
            "steps": len(kind.places),
            "of": len(seconds),
            "period_steps": kind.period_steps,
            "extra_ms": 1e3 * kind.extra_s,
            "share": kind.share,
            "scored": kind.scored,
        }
        for kind in [k for k in kinds if k.share >= _NAMED][:_MOST_NAMED]
    ]


def _cause(
    kind: SlowSteps,
    usual: Sequence[int],
    parts: Sequence[Mapping[str, float]],
    aside: Collection[int],
) -> Cause:
    if sum(place in aside for place in kind.places) > _EXPLAINED * len(kind.places):
        return Cause.VALIDATION
    if not parts:
        return Cause.UNKNOWN
    for cause in Cause:
        spent_s = statistics.fmean(parts[place].get(cause, 0.0) for place in kind.places)
        usual_s = statistics.median([parts[p].get(cause, 0.0) for p in usual] or [0.0])
        if spent_s - usual_s > _EXPLAINED * kind.extra_s:
            return cause
    return Cause.UNKNOWN


def merge_ranks(of_ranks: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Slow steps as all ranks know them: a rank that waits for another sees no cause."""
    order = list(Cause)
    merged = []
    for kinds in zip(*of_ranks, strict=True):
        causes = [Cause(kind["cause"]) for kind in kinds]
        merged.append({**kinds[0], "cause": str(min(causes, key=order.index))})
    return merged


def blame_quota(kinds: Sequence[dict[str, Any]], throttled_share: float) -> None:
    """Name the CPU quota as the cause where processes were held back for about as long.

    Args:
        kinds: of a measurement; changed in place.
        throttled_share: part of the window in which they were.

    """
    for kind in kinds:
        unexplained = Cause(kind["cause"]) in (Cause.OWN, Cause.BACKWARD, Cause.OPTIMIZER)
        unexplained |= kind["cause"] == Cause.UNKNOWN
        if unexplained and throttled_share > _EXPLAINED * kind["share"]:
            kind["cause"] = str(Cause.QUOTA)


def told(kind: Mapping[str, Any]) -> str:
    """A kind of slow steps in words."""
    extra_ms = float(f"{kind['extra_ms']:.3g}")
    often = f"{kind['steps']} of {kind['of']} steps take {extra_ms:,g} ms longer"
    if kind["period_steps"] is not None:
        often += f", one in {kind['period_steps']:.3g}"
    score = "" if kind["scored"] else "; met once, so not in the score"
    return f"{often} ({kind['share']:.0%} of the time: {Cause(kind['cause']).words}{score})"


def told_shortly(kinds: Sequence[Mapping[str, Any]]) -> str:
    """The slow steps that take most of the time, for the end of a line; empty without any."""
    if not kinds:
        return ""
    most = max(kinds, key=lambda kind: float(kind["share"]))
    score = "" if most["scored"] else ", not in the score"
    words = Cause(most["cause"]).words
    return f"{most['share']:.0%} of the baseline's time is slow steps: {words}{score}"
