"""The results page: a table first, then a line for each case that went wrong."""

from __future__ import annotations

from typing import Any

from _public_cases import CASES

SHOWN = ("plain", "run", "profile", "search", "autotune", "knobs", "handover")


def report(records: list[dict[str, Any]]) -> str:
    """The page, in Markdown."""
    found = {(r["key"], r["part"]): r for r in records}
    lines = [
        f"| script | {' | '.join(SHOWN)} |",
        f"| --- |{' --- |' * len(SHOWN)}",
    ]
    for case in CASES:
        cells = [_cell(found.get((case.name, mode))) for mode in SHOWN]
        lines.append(f"| {case.name} | {' | '.join(cells)} |")
    lines += ["", *_totals(found), "", "## What went wrong, or was refused", ""]
    for case in CASES:
        for mode in SHOWN:
            judged = found.get((case.name, mode), {}).get("judged", "right")
            if not judged.startswith("right"):
                lines.append(f"- `{case.name}`, {mode}: {judged}")
    lines += ["", "## The scripts", "", "| | script | arguments | out of the ordinary |"]
    lines.append("| --- | --- | --- | --- |")
    for case in CASES:
        repository, commit = case.source
        path = f"{case.folder}/{case.script}".removeprefix("./")
        arguments = " ".join(case.arguments) or "-"
        where = f"[{repository}](https://github.com/{repository}/blob/{commit}/{path})"
        where += f" `{path}` at {commit[:9]}"
        lines.append(f"| {case.name} | {where} | `{arguments}` | {case.odd} |")
    return "\n".join(lines)


def _cell(record: dict[str, Any] | None) -> str:
    if record is None or record["judged"].startswith("no search"):
        return "-"
    return "**wrong**" if record["judged"].startswith("wrong") else _word(record["judged"])


def _word(judged: str) -> str:
    return judged.partition(":")[0]


def _totals(found: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    """How many of each mode were not wrong."""
    lines = []
    for mode in SHOWN:
        told = [r["judged"] for (_, part), r in found.items() if part == mode]
        told = [judged for judged in told if not judged.startswith("no search")]
        good = sum(not judged.startswith("wrong") for judged in told)
        lines.append(f"- {mode}: {good} of {len(told)} right or truly refused")
    return lines
