"""Rules on what ranks do to one another: a slow one, waiting by turns, and communication."""

from __future__ import annotations

from collections.abc import Sequence

from perfsearch.core.trial import Measurement
from perfsearch.metrics.findings import Facts, Finding, Severity, saved_ms

_CLEAR_ERRORS = 4.0
"""By how many standard errors a rank must be slower before it is called slow."""

_NAMED_FROM = 0.05
"""Part of what a slow rank takes longer from which a phase is named."""

RANK_PHASES = ("dataloader_next", "to_device", "forward", "optimizer")
"""Phases in which a rank works for itself. A slow rank's backward pass looks long on the others,
where communication is not told apart from it.
"""


def straggler(facts: Facts) -> Finding | None:
    """One rank that is slower than the others, in one phase or in several together.

    Where the error of a phase is not known, noise looks like a slow rank: nothing is said.
    """
    slower: dict[float | None, dict[str, float]] = {}
    for name in _own_phases(facts):
        excess = facts.evidence.get(f"straggler_{name}_excess_ms", 0.0)
        error = facts.evidence.get(f"{name}_error_ms")
        if error is not None and excess > _CLEAR_ERRORS * error:
            rank = facts.evidence.get(f"straggler_{name}_rank")
            slower.setdefault(rank, {})[name] = excess
    if not slower:
        return None
    rank, excesses = max(slower.items(), key=lambda item: sum(item[1].values()))
    worst = sum(excesses.values())
    waits = _others_wait_ms(facts)
    costs = worst if waits is None else min(worst, waits)
    share = costs / facts.step_ms
    if share <= facts.limits.straggler_excess:
        return None
    who = "one rank" if rank is None else _name_of(facts.measurement, int(rank))
    others = "the other" if facts.measurement.world_size == 2 else "the mean of the others"
    phases = [name for name, ms in excesses.items() if ms >= _NAMED_FROM * worst]
    where = " and ".join(phases)
    longer = f"{who} takes {worst:.2f} ms a step longer than {others} in {where}"
    evidence = (
        f"{longer} ({share:.0%} of the step), and the others wait for it in their collectives"
        if costs == worst
        else f"{longer}, and the others wait {costs:.2f} ms for it in their collectives "
        f"({share:.0%} of the step)"
    )
    return Finding(
        "straggler",
        Severity.HIGH if share >= facts.limits.comm_high else Severity.MODERATE,
        evidence,
        _look_at(facts, phases),
        share,
    )


def _look_at(facts: Facts, phases: Sequence[str]) -> str:
    """Where a slow rank's cause is to be looked for."""
    if phases != ["dataloader_next"]:
        return "Look at that device's clocks, temperature and neighbours, and at that rank's data."
    data = "Look at that rank's data, and at what else reads and computes on its node"
    if not facts.measurement.in_force.get("dataloader_workers"):
        return f"{data}."
    # They load ahead while their rank waits in a collective, so that only the last one shows.
    return (
        f"{data}. Or the loader processes of all ranks are as slow, and its own began last: then "
        "more of them help."
    )


def _others_wait_ms(facts: Facts) -> float | None:
    """What each of the others waits where one rank comes last; ``None``: waiting was not seen.

    It bounds what that rank costs: where it makes up for a long phase by a short one, nobody waits.
    """
    waits_ms, ranks = facts.measurement.phases_ms.get("rank_wait"), facts.measurement.world_size
    if waits_ms is None or ranks < 2:
        return None
    return waits_ms * ranks / (ranks - 1)


def imbalance(facts: Facts) -> Finding | None:
    """Ranks that wait for one another, now this one, now that one."""
    share, loading = facts.share("rank_wait"), facts.share("dataloader_next")
    explained = loading >= max(share, facts.limits.input_moderate)
    if share <= facts.limits.comm_moderate or explained or straggler(facts):
        return None
    seen = "comm_least_ms" in facts.evidence and any(
        f"{name}_error_ms" in facts.evidence for name in _own_phases(facts)
    )
    turns = (
        ", and none of them is the slow one throughout"
        if seen
        else "; whether one of them is slow throughout cannot be told from these timings"
    )
    return Finding(
        "rank_imbalance",
        Severity.MODERATE,
        f"ranks wait for one another for {facts.said('rank_wait')}{turns}",
        "Balance what the ranks get in a step (lengths of samples), and look for other jobs beside "
        "this one.",
        share,
    )


def _own_phases(facts: Facts) -> tuple[str, ...]:
    """Phases in which a rank waits for no other, as they were marked here."""
    return (*RANK_PHASES, *(("backward",) if "comm_least_ms" in facts.evidence else ()))


def communication(facts: Facts) -> Finding | None:
    """Communication itself, without the waiting for whoever comes last."""
    exposed_ms = facts.phase_ms("comm_exposed")
    saved = saved_ms(facts.evidence, "communication")
    if saved is not None:  # what leaving it out does not save is not communication
        exposed_ms = min(exposed_ms, max(0.0, sum(saved)))
    share = exposed_ms / facts.step_ms
    if share <= facts.limits.comm_moderate:
        return None
    return Finding(
        "communication_bound",
        Severity.HIGH if share >= facts.limits.comm_high else Severity.MODERATE,
        f"communication that nothing overlaps takes {facts.said_ms(exposed_ms)}",
        "Search bucket sizes and NCCL's settings, accumulate gradients, or shard less.",
        share,
    )


def _name_of(measurement: Measurement, rank: int) -> str:
    """A rank with its device, and its host where there are several."""
    ranks = measurement.environment.get("ranks", [])
    devices = measurement.environment.get("devices", [])
    words = []
    if len(devices) == measurement.world_size and "index" in devices[rank]:
        words = [f"gpu_{devices[rank]['index']}", str(devices[rank]["uuid"])]
    elif rank < len(ranks) and ranks[rank].get("device") not in (None, "cpu"):
        words = [f"GPU {ranks[rank]['device']}"]
    hosts = {r.get("host") for r in ranks}
    if rank < len(ranks) and len(hosts) > 1:
        words.append(f"on {ranks[rank]['host']}")
    return f"rank {rank} ({', '.join(words)})" if words else f"rank {rank}"
