"""The tables of ``soap_gpu.py``."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Records = Sequence[dict[str, Any]]


def surroundings() -> dict[str, Any]:
    """Commit, hardware and versions."""
    import torch

    here = Path(__file__).parent
    made = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True
    )
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"commit": made.stdout.strip(), "torch": torch.__version__, "gpus": gpus}


def report(records: Records) -> str:
    """All of it, in Markdown."""
    where = [r for r in records if r["part"] == "where"]
    lines = ["# SOAP: searched, simulated, run", ""]
    if where:
        last = where[-1]
        commits = ", ".join(sorted({r["commit"] for r in where if r["commit"]}))
        lines += [
            f"Commit {commits}; torch {last['torch']}; {len(last['gpus'])} GPUs: "
            f"{', '.join(sorted(set(last['gpus']))) or 'none'}.",
            "",
        ]
    parts = [_side(records), _searches(records), _drawn(records), _kinds(records)]
    return "\n".join([*lines, *(line for part in parts for line in part)])


def _side(records: Records) -> list[str]:
    lines = [
        "## Side by side",
        "",
        "Median of the rounds (lowest to highest), milliseconds a step.",
    ]
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        if record["part"] == "side":
            rows.setdefault((record["model"], record["row"]), []).append(record)
    for model in dict.fromkeys(m for m, _ in rows):
        lines += [
            "",
            f"### {model}",
            "",
            "| row | ms | rounds | gain over the first |",
            "|---|---|---|---|",
        ]
        reference = None
        names = [r for m, r in rows if m == model]
        names.sort(key=lambda name: ("ddp" not in name, "tuned" not in name, name))
        for name in names:
            times = [r["step_ms"] for r in rows[model, name] if r["status"] == "ok"]
            failed = [r for r in rows[model, name] if r["status"] != "ok"]
            if not times:
                lines.append(f"| {name} | {failed[0]['status']}: {failed[0]['reason']} | | |")
                continue
            middle = statistics.median(times)
            reference = reference or middle
            lines.append(
                f"| {name} | {middle:.3f} ({min(times):.3f} to {max(times):.3f}) | {len(times)} "
                f"| {reference / middle - 1:+.0%} |"
            )
    return lines


def _searches(records: Records) -> list[str]:
    lines = ["", "## What the searches said", ""]
    for record in records:
        if record["part"] == "search":
            lines += [f"- {record['key']}: {record['verdict']}"]
    return lines


def _drawn(records: Records) -> list[str]:
    lines = [
        "", "## Simulated against measured", "",
        "| model | changes | simulated ms | measured ms | error |", "|---|---|---|---|---|",
    ]  # fmt: skip
    good = [r for r in records if r["part"] == "drawn" and r["status"] == "ok"]
    errors = []
    for r in good:
        error = r["simulated_ms"] / r["step_ms"] - 1
        errors.append(abs(error))
        lines.append(
            f"| {r['model']} | {r['changes']} | {r['simulated_ms']:.3f} | {r['step_ms']:.3f} "
            f"| {100 * error:+.1f}% |"
        )
    bad = [r for r in records if r["part"] == "drawn" and r["status"] != "ok"]
    lines += [
        f"| {r['model']} | {r['changes']} | {r['simulated_ms']:.3f} | {r['status']} | |"
        for r in bad
    ]
    if errors:
        lines += [
            "",
            f"{len(errors)} plans: median error {100 * statistics.median(errors):.1f}%, worst "
            f"{100 * max(errors):.1f}%.",
        ]
    for model in dict.fromkeys(r["model"] for r in good):
        own = [r for r in good if r["model"] == model]
        if len(own) > 2:
            correlation = rank_correlation(
                [r["simulated_ms"] for r in own], [r["step_ms"] for r in own]
            )
            lines.append(f"Rank correlation within {model}: {correlation:.3f} ({len(own)} plans).")
    return lines


def _kinds(records: Records) -> list[str]:
    """How far off single operators of the drawn plans were."""
    by_kind: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        for kind, simulated_ms, measured_ms in record.get("operators", ()):
            if measured_ms > 0:
                by_kind.setdefault(kind, []).append((simulated_ms, measured_ms))
    if not by_kind:
        return []
    lines = [
        "", "### By kind of operator", "",
        "Forward, backward and communication together, of the drawn plans.", "",
        "| kind | operators | median ms | median absolute error |", "|---|---|---|---|",
    ]  # fmt: skip
    for kind, pairs in sorted(by_kind.items()):
        usual_ms = statistics.median(measured for _, measured in pairs)
        error = statistics.median(abs(a / b - 1) for a, b in pairs)
        lines.append(f"| {kind} | {len(pairs)} | {usual_ms:.3f} | {100 * error:.1f}% |")
    return lines


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's."""
    return statistics.correlation(_ranks(a), _ranks(b))


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda i: values[i])
    ranks = [0.0] * len(values)
    for rank, index in enumerate(order):
        ranks[index] = float(rank)
    return ranks
