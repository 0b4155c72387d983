"""From what each rank measured to one measurement. Plain values only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perfsearch.metrics.slow_steps import SLOW_STEPS, merge_ranks

_MEANS = {"phases_step_ms", "detailed_step_ms"}
"""Evidence that is averaged over ranks, as phases are; of everything else the largest counts."""


def combine(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One measurement of all ranks: mean phases, the largest peak, rank 0's settings.

    Phases do not overlap, so that they sum to the step at most: communication that nothing overlaps
    is taken out of the backward pass, and of it what ranks wait for one another (``rank_wait``).

    Args:
        results: ``RankResult`` of each rank as plain values, rank 0 first.

    Returns:
        ``status``, ``reason`` and ``measurement``, whose fields are those of ``Measurement``.

    """
    first = results[0]
    by_rank = [_apart(r["phases_ms"], r["evidence"]) for r in results]
    evidence = _largest([r["evidence"] for r in results])
    peaks = _largest([r["peaks"] for r in results])
    evidence.update(_stragglers(by_rank, [r["environment"].get("host") for r in results]))
    if "allocator_retries" in peaks:
        evidence["allocator_retries"] = peaks.pop("allocator_retries")
    busy = [v for r in results if (v := r["evidence"].get("device_busy_ms")) is not None]
    if busy:
        evidence["device_busy_least_ms"] = min(busy)
    for name in _MEANS & evidence.keys():
        evidence[name] = sum(r["evidence"].get(name) or 0.0 for r in results) / len(results)
    if evidence.pop("counted_flops", None) is not None:
        counted = [r["evidence"].get("counted_flops") for r in results]
        if all(counted):  # where one rank could not count, nobody knows
            evidence["counted_flops"] = sum(counted)
    known = [phases["comm_exposed"] for phases in by_rank if "comm_exposed" in phases]
    if len(known) < len(by_rank):  # a profiler that failed on one rank: all as if nobody knew
        by_rank = [dict(r["phases_ms"]) for r in results]
    phases = _mean(by_rank)
    if len(known) == len(by_rank) > 1:
        # Whoever comes last to a collective waits for nobody: what the others take longer is not
        # communication.
        least = min(known)
        least = min(least, evidence.get("comm_least_ms", least))
        phases["rank_wait"] = phases["comm_exposed"] - least
        phases["comm_exposed"] = least
    in_force = dict(first["in_force"])
    for name in in_force:
        # Only the first rank of a communicator says which algorithm it uses.
        values = [r["in_force"].get(name) for r in results]
        told = [v for v in values if v is not None] if name.endswith("_used") else values
        seen = {repr(v) for v in told}
        if len(seen) > 1:
            in_force[name] = "differs between ranks: " + ", ".join(sorted(seen))
    measurement = {
        **first["agreed"],
        **peaks,
        "world_size": len(results),
        "phases_ms": phases,
        "in_force": in_force,
        "bottleneck_evidence": evidence,
        "environment": _environment(results, by_rank),
    }
    return {"status": first["status"], "reason": first["reason"], "measurement": measurement}


def _apart(phases_ms: dict[str, float], evidence: dict[str, float | None]) -> dict[str, float]:
    """A rank's phases with communication beside the passes that it lies in.

    Where the steps were marked so it is there already; else a profiler knows how long it is.
    """
    phases = dict(phases_ms)
    exposed = evidence.get("device_exposed_ms")
    if exposed is None or "comm_exposed" in phases:
        return phases
    taken = 0.0
    for name in ("backward", "forward"):
        part = min(exposed - taken, phases.get(name, 0.0))
        if part > 0:
            phases[name] -= part
            taken += part
    phases["comm_exposed"] = taken if "backward" in phases else exposed
    return phases


def _stragglers(
    by_rank: Sequence[dict[str, float]], hosts: Sequence[str | None]
) -> dict[str, float]:
    """For each phase its slowest rank, and by how much that exceeds the mean of the others; also
    whether each rank of its node is slower than all of the other nodes.
    """
    found: dict[str, float] = {}
    if len(by_rank) < 2:
        return found
    for phase in by_rank[0]:
        values = [phases.get(phase, 0.0) for phases in by_rank]
        slowest = max(values)
        others = (sum(values) - slowest) / (len(values) - 1)
        found[f"straggler_{phase}_excess_ms"] = slowest - others
        found[f"straggler_{phase}_rank"] = float(values.index(slowest))
        slow_host = hosts[values.index(slowest)]
        on_it = [v for v, host in zip(values, hosts, strict=True) if host == slow_host]
        elsewhere = [v for v, host in zip(values, hosts, strict=True) if host != slow_host]
        if elsewhere and len(on_it) > 1 and min(on_it) > max(elsewhere):
            found[f"straggler_{phase}_node"] = 1.0
    return found


def _environment(
    results: Sequence[dict[str, Any]], by_rank: Sequence[dict[str, float]]
) -> dict[str, Any]:
    """Where each rank ran, with its own phases after a profile; what else rank 0 has to say."""
    common = {k: v for k, v in results[0]["environment"].items() if k not in ("host", "device")}
    ranks = []
    for result, phases in zip(results, by_rank, strict=True):
        entry = {k: v for k, v in result["environment"].items() if k in ("host", "device")}
        entry["step_ms"] = result["evidence"].get("phases_step_ms")
        if "detailed_steps" in common:
            entry["phases_ms"] = phases
        ranks.append(entry)
    if SLOW_STEPS in common:
        common[SLOW_STEPS] = merge_ranks([r["environment"][SLOW_STEPS] for r in results])
    return {**common, "ranks": ranks}


def _largest(tables: Sequence[dict[str, float | None]]) -> dict[str, Any]:
    names = {name for table in tables for name in table}
    largest: dict[str, Any] = {}
    for name in sorted(names):
        values = [v for t in tables if (v := t.get(name)) is not None]
        largest[name] = max(values) if values else None
    return largest


def _mean(tables: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: sum(t.get(name, 0.0) for t in tables) / len(tables) for name in names}
