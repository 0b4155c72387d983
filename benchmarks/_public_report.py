"""The results page: a table first, then a line for each case that is not simply right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from _public_cases import CASES, Case
from _public_judge import judge

SHOWN = ("plain", "run", "profile", "search", "autotune", "knobs", "handover")


def report(records: list[dict[str, Any]]) -> str:
    """The page, in Markdown, judged by the rules of today: the scripts and modes that were run."""
    judged = {(case.name, mode): text for case in CASES for mode, text in of_case(case, records)}
    shown = [mode for mode in SHOWN if any(part == mode for _, part in judged)]
    cases = [case for case in CASES if any(name == case.name for name, _ in judged)]
    lines = [f"| script | {' | '.join(shown)} |", f"| --- |{' --- |' * len(shown)}"]
    for case in cases:
        cells = [_cell(judged.get((case.name, mode))) for mode in shown]
        lines.append(f"| {case.name} | {' | '.join(cells)} |")
    lines.append(f"| **not wrong** | {' | '.join(_total(mode, judged) for mode in shown)} |")
    lines += ["", "What was not simply right:", ""]
    for (name, mode), text in judged.items():
        if text != "right" and mode in SHOWN:
            lines.append(f"- `{name}`, {mode}: {text}")
    return "\n".join([*lines, "", *_sources(cases)])


def of_case(case: Any, records: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Each mode that was run, and how it is judged."""
    found = {r["part"]: r for r in records if r["key"] == case.name}
    return [(mode, judge(case, mode, record, found)) for mode, record in found.items()]


def _cell(text: str | None) -> str:
    if text is None:
        return "-"
    word = text.partition(":")[0]
    return f"**{word}**" if word == "wrong" else word


def _total(mode: str, judged: dict[tuple[str, str], str]) -> str:
    told = [text for (_, part), text in judged.items() if part == mode]
    return f"{sum(not text.startswith('wrong') for text in told)} of {len(told)}"


def _sources(cases: Sequence[Case]) -> list[str]:
    """Where each script is, and what makes it small."""
    lines = ["| | script | arguments | out of the ordinary |", "| --- | --- | --- | --- |"]
    for case in cases:
        repository, commit = case.source
        path = f"{case.folder}/{case.script}".removeprefix("./")
        link = f"https://github.com/{repository}/blob/{commit}/{path}"
        arguments = " ".join(case.arguments)
        ranks = f"{case.processes} ranks: " if case.processes > 1 else ""
        lines.append(
            f"| {case.name} | [{repository}, {path}]({link}) at {commit[:9]} | "
            f"{ranks}{f'`{arguments}`' if arguments else 'none'} | {case.odd} |"
        )
    return lines
