"""From what each rank measured to one measurement. Plain values only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def combine(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One measurement of all ranks: the slowest phase, the largest peak, rank 0's settings.

    Args:
        results: ``RankResult`` of each rank as plain values, rank 0 first.

    Returns:
        ``status``, ``reason`` and ``measurement``, whose fields are those of ``Measurement``.

    """
    first = results[0]
    phases = _largest([r["phases_ms"] for r in results])
    evidence = _largest([r["evidence"] for r in results])
    peaks = _largest([r["peaks"] for r in results])
    means = _mean([r["phases_ms"] for r in results])
    for phase, slowest in phases.items():
        if means[phase] > 0 and len(results) > 1:
            evidence[f"straggler_{phase}_ratio"] = slowest / means[phase]
            rank = next(i for i, r in enumerate(results) if r["phases_ms"].get(phase) == slowest)
            evidence[f"straggler_{phase}_rank"] = float(rank)
    if "allocator_retries" in peaks:
        evidence["allocator_retries"] = peaks.pop("allocator_retries")
    if "counted_flops" in evidence:
        evidence["counted_flops"] = sum(r["evidence"]["counted_flops"] for r in results)
    exposed = evidence.get("comm_exposed_ms", evidence.get("device_exposed_ms"))
    if exposed is not None and "comm_exposed" not in phases:
        phases["comm_exposed"] = exposed
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
        "environment": _environment(results),
    }
    return {"status": first["status"], "reason": first["reason"], "measurement": measurement}


def _environment(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Where each rank ran, with its own phases after a close look; what else rank 0 has to say."""
    common = {k: v for k, v in results[0]["environment"].items() if k not in ("host", "device")}
    ranks = []
    for result in results:
        entry = {k: v for k, v in result["environment"].items() if k in ("host", "device")}
        if "detailed_steps" in common:
            entry["phases_ms"] = result["phases_ms"]
            entry["step_ms"] = result["evidence"].get("detailed_step_ms")
        ranks.append(entry)
    return {**common, "ranks": ranks}


def _largest(tables: Sequence[dict[str, float | None]]) -> dict[str, Any]:
    names = {name for table in tables for name in table}
    largest: dict[str, Any] = {}
    for name in sorted(names):
        values = [v for t in tables if (v := t.get(name)) is not None]
        largest[name] = max(values) if values else None
    return largest


def _mean(tables: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: sum(t.get(name, 0.0) for t in tables) / len(tables) for name in tables[0]}
