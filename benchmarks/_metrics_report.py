"""The store of ``benchmarks/metrics.py`` as a page."""

from __future__ import annotations

from typing import Any

from _metrics_store import Store


def markdown(store: Store, note: str = "") -> str:
    """Every part that was recorded, with its command, commit and hardware.

    Args:
        store: the records.
        note: what else a reader should know, such as what ran beside.

    """
    sections = ["# Metrics and diagnosis against known truths\n", _INTRODUCTION]
    sections += [f"{note}\n"] if note else []
    for part, title, make in (
        ("loader", "A loader that sleeps", _loader),
        ("phases", "Phases sum to the step", _phases),
        ("link", "A link that is slowed", _link),
        ("events", "Event timings against torch's profiler", _events),
        ("smi", "System metrics against nvidia-smi", _smi),
        ("cost", "What the timings cost", _cost),
        ("bound", "Confirmed gains against the bounds printed before", _bound),
        ("tuning", "GPT-2 before and after tuning", _tuning),
    ):
        records = store.of(part)
        sections.append(f"## {title}\n")
        if records:
            sections += [_stamp(part, records), make(records)]
        else:
            sections.append("Not measured.\n")
    return "\n".join(sections)


_INTRODUCTION = """`benchmarks/metrics.py PART --store STORE` writes records, `report` this page.
"""


def _stamp(part: str, records: list[dict[str, Any]]) -> str:
    where = sorted({(r["hardware"], r["commit"], r["date"]) for r in records})
    listed = "; ".join(f"{hardware}, commit {commit}, {date}" for hardware, commit, date in where)
    return f"`python benchmarks/metrics.py {part} --store STORE`: {listed}.\n"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _loader(records: list[dict[str, Any]]) -> str:
    rows = [
        [f"{r['slept_ms']:g}", f"{r['found_ms']:.2f}", f"{r['error']:+.1%}", r["finding"]]
        for r in records
    ]
    text = "Two CPU ranks; the median of three close looks. Wanted: within 5%.\n\n"
    return text + _table(["slept, ms a step", "found, ms", "error", "diagnosis"], rows)


def _phases(records: list[dict[str, Any]]) -> str:
    rows = [[r["key"], f"{r['step_ms']:.2f}", f"{r['worst_error']:.2%}"] for r in records]
    text = "Largest difference over ranks and three close looks. Wanted: within 3%.\n\n"
    return text + _table(["workload", "step, ms", "phases against step"], rows)


def _link(records: list[dict[str, Any]]) -> str:
    free = next((r for r in records if r["key"] == "free"), None)
    rows = []
    for r in records:
        wire, truth = "", ""
        if r["wire_ms"] is not None:
            wire = f"{r['wire_ms']:.1f}"
        if free is not None and r is not free:
            added = r["step_ms"] - free["step_ms"] + free["exposed_ms"]
            truth = f"{added / r['step_ms']:.1%}"
        rows.append(
            [r["key"], f"{r['step_ms']:.1f}", wire, f"{r['exposed_ms']:.1f}", f"{r['share']:.1%}",
             truth, f"{r['bound']:.1%}", r["finding"]]
        )  # fmt: skip
    text = (
        "Two CPU ranks in network namespaces over gloo, 4 MiB of gradients and 100 ms of "
        "computing a step. `wire` is what these bytes take at the link's rate, `true share` what "
        "the step took longer than over the free link, with that one's own share added.\n\n"
    )
    head = [
        "link",
        "step, ms",
        "wire, ms",
        "exposed, ms",
        "share",
        "true share",
        "bound",
        "diagnosis",
    ]
    return text + _table(head, rows)


def _events(records: list[dict[str, Any]]) -> str:
    rows = [
        [r["key"], f"{r['events_ms']:.3f}", f"{r['profiler_ms']:.3f}", f"{r['error']:+.2%}"]
        for r in records
        if "events_ms" in r
    ]
    text = (
        "GPT-2 on one GPU. The profiler's time of a phase lies between the ends of two kernels "
        "that mark it on the device's timeline, for the same steps; each takes about 0.3 ms, "
        "which both readings include. Wanted: within 5%.\n\n"
    )
    return text + _table(["phase", "events, ms a step", "profiler, ms", "difference"], rows)


def _smi(records: list[dict[str, Any]]) -> str:
    rows = [
        [r["key"], f"{r['sampler']:.1f}", f"{r['nvidia_smi']:.1f}", f"{r['error']:+.2%}"]
        for r in records
    ]
    return _table(["reading", "sampler", "nvidia-smi", "difference"], rows)


def _cost(records: list[dict[str, Any]]) -> str:
    rows = [
        [r["key"], f"{r['step_ms']:.2f}", f"{r['overhead']:+.3%}",
         f"{r['low']:+.3%} to {r['high']:+.3%}", str(r["blocks"])]
        for r in records
    ]  # fmt: skip
    text = (
        "GPT-2 on one GPU, windows with and without in random order, paired by block; the median "
        "ratio, and an interval without assumptions on the distribution. Wanted: its upper end "
        "below 0.5% for light and 3% for full.\n\n"
    )
    return text + _table(["what", "step, ms", "adds", "95% interval", "blocks"], rows)


def _bound(records: list[dict[str, Any]]) -> str:
    rows = [
        [r["key"], _percent(r["bound"]), _percent(r["gain"]), "yes" if r["holds"] else "no"]
        for r in records
    ]
    return _table(["search", "bound", "confirmed gain (95% interval's lower end)", "holds"], rows)


def _percent(value: float | None) -> str:
    return "none" if value is None else f"{value:+.1%}"


def _tuning(records: list[dict[str, Any]]) -> str:
    arms = [r for r in records if "phases_ms" in r]
    rows = [
        [r["key"], f"{r['samples_per_s']:.1f}", f"{r['step_ms']:.2f}",
         "not known" if r["mfu"] is None else f"{r['mfu']:.1%}",
         f"{r['peak_tflops']:g} ({r['precision']})", str(r["world_size"])]
        for r in arms
    ]  # fmt: skip
    head = ["", "samples/s", "step, ms", "MFU", "peak, TFLOP/s a device", "GPUs"]
    text = _table(head, rows)
    for r in arms:
        phases = ", ".join(f"{name} {ms:.2f}" for name, ms in r["phases_ms"].items())
        evidence = ", ".join(f"{name}={value:.2f}" for name, value in r["evidence"].items())
        findings = "".join(f"- {finding}\n" for finding in r["findings"])
        text += f"\n{r['key']}: {phases} ms; {evidence}.\n\n{findings}"
    for r in records:
        if "reason" in r:
            gain, bound = _percent(r["gain"]), _percent(r["bound"])
            text += f"\n{r['key']}: {r['reason']}. Gain {gain}, bound printed before {bound}.\n"
    return text
