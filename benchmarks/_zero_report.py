"""From the records of ``zero_gpu.py`` to Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
KNOBS = ("zero_stage", "micro_batch", "activation_checkpointing")
GIB = 2.0**30


def of(records: Sequence[Record], part: str) -> list[Record]:
    """The records of a part."""
    return [r for r in records if r["part"] == part]


def fastest(records: Sequence[Record]) -> Record | None:
    """The fastest that ran."""
    ran = [r for r in records if r["status"] == "ok"]
    return max(ran, key=lambda r: r["samples_per_s"], default=None)


def hand_tuned(records: Sequence[Record]) -> Record | None:
    """DDP at the largest micro-batch that fits, without checkpointing."""
    plain = [
        r
        for r in records
        if r["status"] == "ok"
        and r["configuration"]["zero_stage"] == 0
        and not r["configuration"]["activation_checkpointing"]
    ]
    return max(plain, key=lambda r: r["configuration"]["micro_batch"], default=None)


def arms(records: Sequence[Record], rule: str) -> dict[str, dict[str, Any]]:
    """What to measure side by side."""
    grid = of(records, f"grid-{rule}")
    found: dict[str, dict[str, Any]] = {}
    for name, record in (("hand-tuned DDP", hand_tuned(grid)), ("grid's best", fastest(grid))):
        if record is not None:
            found[name] = dict(record["configuration"])
    for record in of(records, f"search-{rule}"):
        if record["best_configuration"] is not None:
            found[f"strategy={record['key']}"] = dict(record["best_configuration"])
    return found


def named(configuration: Mapping[str, Any]) -> str:
    """A configuration in few words."""
    stage, micro, every = (configuration.get(k) for k in KNOBS)
    return f"stage {stage}, micro-batch {micro}" + (f", checkpointing {every}" if every else "")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a Markdown table."""
    yield "| " + " | ".join(head) + " |"
    yield "| " + " | ".join("---" for _ in head) + " |"
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""


def markdown(records: Sequence[Record]) -> str:
    """The whole page."""
    lines = ["# ZeRO stages and batches on GPUs", "", "Written by `benchmarks/zero_gpu.py`."]
    cards = sorted({r["gpu"] for r in records if r.get("gpu")})
    lines += ["", f"Devices: {', '.join(cards)}.", ""]
    for rule in ("fixed", "free"):
        lines += _searches(records, rule)
    lines += _memory(records)
    lines += _rescue(records)
    lines += _deepspeed(records)
    return "\n".join(lines) + "\n"


def _searches(records: Sequence[Record], rule: str) -> Iterator[str]:
    grid, found = of(records, f"grid-{rule}"), of(records, f"search-{rule}")
    if not grid and not found:
        return
    best, hand = fastest(grid), hand_tuned(grid)
    yield f"## `batch={rule}`" + (" (the global batch changes)" if rule == "free" else "")
    yield ""
    if best is not None and hand is not None:
        seconds = sum(r.get("seconds", 0.0) for r in grid)
        yield (
            f"Grid: {len(grid)} configurations in {seconds:.0f} s, best "
            f"{best['samples_per_s']:.1f} samples/s ({named(best['configuration'])}); hand-tuned "
            f"DDP {hand['samples_per_s']:.1f} ({named(hand['configuration'])})."
        )
        yield ""
    rows = []
    for record in found:
        share = ""
        if best is not None and record["best"]:
            share = f"{record['best'] / best['samples_per_s']:.1%}"
        rows.append([
            f"`{record['key']}`",
            f"{record['trials']} ({record['failed']} failed, {record['screened']} screened)",
            f"{record['seconds']:.0f} ({record['baseline_s']:.0f} until the baseline had run)",
            "none" if not record["best"] else
            f"{record['best']:.1f} ({named(record['best_configuration'])})",
            share,
            record["reason"],
        ])  # fmt: skip
    head = ("strategy", "trials", "seconds", "best samples/s", "of the grid's best", "ended")
    yield from table(head, rows)
    yield from _side(records, rule)


def _side(records: Sequence[Record], rule: str) -> Iterator[str]:
    turns: dict[str, list[Record]] = {}
    for record in of(records, f"side-{rule}"):
        turns.setdefault(record["key"].rpartition("/")[0], []).append(record)
    if not turns:
        return
    medians = {
        arm: statistics.median(r["samples_per_s"] for r in rs if r["status"] == "ok")
        for arm, rs in turns.items()
        if any(r["status"] == "ok" for r in rs)
    }
    base, top = medians.get("hand-tuned DDP"), medians.get("grid's best")
    yield "Side by side, warm, in turn, median of the rounds:"
    yield ""
    rows = [
        [arm, named(rs[0]["configuration"]),
         " ".join(f"{r['samples_per_s']:.1f}" for r in rs if r["status"] == "ok"),
         f"{medians[arm]:.1f}" if arm in medians else "failed",
         f"{medians[arm] / base - 1:+.1%}" if base and arm in medians else "",
         f"{medians[arm] / top:.1%}" if top and arm in medians else ""]
        for arm, rs in turns.items()
    ]  # fmt: skip
    head = ("", "configuration", "samples/s", "median", "over hand-tuned DDP", "of the grid's best")
    yield from table(head, rows)


def _memory(records: Sequence[Record]) -> Iterator[str]:
    parts = [p for p in ("grid-free", "memory-llama") if of(records, p)]
    if not parts:
        return
    yield "## Predicted memory"
    yield ""
    yield (
        "All that the model knew beforehand were the peaks of two small steps of stage 0 "
        "(micro-batches 2 and 4) of the same job; GiB of the fullest rank."
    )
    yield ""
    rest_errors, peak_errors, rows = [], [], []
    for part in parts:
        for r in of(records, part):
            if r["status"] not in ("ok", "oom") or "peak_allocated_gib" not in r:
                continue
            held, expected = r["evidence"], r["expected"]
            tensors = sum(v for k, v in held.items() if k.startswith("resident"))
            allocated = held.get("at_rest_allocated_gib")
            rest, peak = expected["at_rest_gib"], expected["peak_gib"]
            rest_errors.append(rest / tensors - 1)
            peak_errors.append(peak / r["peak_allocated_gib"] - 1)
            rows.append([
                "GPT-2" if part == "grid-free" else "Llama-like", named(r["configuration"]),
                f"{rest:.2f}", f"{tensors:.2f}", "" if allocated is None else f"{allocated:.2f}",
                f"{peak:.2f}", f"{r['peak_allocated_gib']:.2f}",
                f"{rest_errors[-1]:+.1%}", f"{peak_errors[-1]:+.1%}",
            ])  # fmt: skip
    head = ("model", "configuration", "at rest predicted", "of tensors", "allocated",
            "peak predicted", "measured", "at-rest error", "peak error")  # fmt: skip
    yield from table(head, rows)
    if rest_errors:
        worst_rest, worst_peak = (max(abs(e) for e in es) for es in (rest_errors, peak_errors))
        yield (
            f"{len(rest_errors)} configurations: at rest within {worst_rest:.1%}, peak within "
            f"{worst_peak:.1%} (median {statistics.median(abs(e) for e in peak_errors):.1%})."
        )
        yield ""


def _rescue(records: Sequence[Record]) -> Iterator[str]:
    for record in of(records, "rescue"):
        yield "## A baseline that does not fit"
        yield ""
        best = record["best_configuration"]
        ended = (
            f"{record['best']:.1f} samples/s ({named(best)})"
            if best
            else f"none: {record['advice']}"
        )
        yield (
            f"64 samples a rank: the baseline ended `{record['baseline_status']}`; after "
            f"{record['trials']} trials and {record['seconds']:.0f} s: {ended}."
        )
        yield ""


def _deepspeed(records: Sequence[Record]) -> Iterator[str]:
    """DeepSpeed's own tuner, beside the searches of the free batch."""
    found = {r["key"]: r for r in of(records, "deepspeed")}
    if "tuner" not in found:
        return
    tuner, chosen = found["tuner"], found.get("chosen")
    yield "## DeepSpeed's own autotuner"
    yield ""
    ended = "" if tuner["finished"] else ", then ended for lack of time"
    yield (
        f'Fast mode, `"stage": "all"`, fp16, client AdamW: {tuner["experiments"]} experiments in '
        f"{tuner['seconds']:.0f} s{ended}. Its own readings, samples/s: "
        + ", ".join(f"{name} {value}" for name, value in tuner["readings"].items() if value)
        + "."
    )
    yield ""
    if tuner["chosen"] is None:
        yield "It chose nothing."
    else:
        stage = tuner["chosen"].get("zero_optimization", {}).get("stage")
        micro = tuner["chosen"].get("train_micro_batch_size_per_gpu")
        yield f"It chose stage {stage}, micro-batch {micro}."
    if chosen is not None:
        yield (
            f"Measured with `runner=deepspeed`, whole steps from outside: {chosen['status']}, "
            f"{chosen['samples_per_s']} samples/s at a global batch of "
            f"{chosen['samples_per_step']}, peak {chosen['peak_allocated_gib'] or 0:.1f} GiB."
        )
    yield ""
    rows = [
        [f"`runner=zero strategy={r['key']}`", str(r["trials"]), f"{r['seconds']:.0f}",
         "none" if not r["best"] else f"{r['best']:.1f} ({named(r['best_configuration'])})"]
        for r in of(records, "search-free")
    ]  # fmt: skip
    rows.append([
        "DeepSpeed 0.19, fast", str(tuner["experiments"]), f"{tuner['seconds']:.0f}",
        "" if chosen is None else f"{chosen['samples_per_s']}",
    ])  # fmt: skip
    yield from table(("", "trials", "seconds", "samples/s of the choice, measured here"), rows)
