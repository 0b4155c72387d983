"""Whether what a mode did was right, refused in a true line, or wrong, and why."""

from __future__ import annotations

import math
import re
import statistics
from typing import Any

from _public_cases import Case
from _public_modes import CLOCKS

RIGHT = "right"
NEAR = 1.5  # a told step over the clock's, on a machine that is not quiet


def judge(case: Case, mode: str, seen: dict[str, Any], before: dict[str, Any]) -> str:
    """Return ``right``, ``right: verdict``, ``refused: the line``, or ``wrong: all that is``.

    Args:
        case: the script.
        mode: how it was started.
        seen: what was seen of it.
        before: the records of other modes of the same script, by mode.

    """
    if mode == "plain" or mode in CLOCKS:
        answer, wrong = _plain(case, seen)
    elif mode in ("search", "profile"):
        answer, wrong = _measured(case, mode, seen, before)
    else:
        answer, wrong = _as_plain(seen, before.get("plain"))
    if seen["left"]:
        wrong.append(f"{seen['left']} processes left")
    if seen["rc"] is None:
        wrong = ["no end within the limit"]
    return f"wrong: {'; '.join(wrong)}" if wrong else answer


def _plain(case: Case, seen: dict[str, Any]) -> tuple[str, list[str]]:
    if not case.plain_fails:
        return RIGHT, [] if seen["rc"] == 0 else [f"exit code {seen['rc']}"]
    line = _line(case.plain_fails, seen)
    return f"fails as it is: {line}", [] if line and seen["rc"] else ["it does not fail so"]


def _as_plain(seen: dict[str, Any], plain: dict[str, Any] | None) -> tuple[str, list[str]]:
    """A start that trains to the end must end as the plain one, with the same files."""
    if plain is None:
        return RIGHT, ["there is no plain start to compare it with"]
    wrong = []
    if seen["rc"] != plain["rc"]:
        wrong.append(f"exit code {seen['rc']}, {plain['rc']} without perfsearch")
    wrong += [f"no {name}" for name in sorted(set(plain["written"]) - set(seen["written"]))]
    wrong += [f"{name} besides" for name in sorted(set(seen["written"]) - set(plain["written"]))]
    answer = RIGHT if plain["rc"] == 0 else f"fails as it does without: {_last(seen)}"
    return answer, wrong


def _measured(
    case: Case, mode: str, seen: dict[str, Any], before: dict[str, Any]
) -> tuple[str, list[str]]:
    """A search or profile leaves files alone, and tells the clock's rate, or why there is none."""
    touched = [*seen["changed"], *seen["written"]]
    wrong = [f"files of the user's changed or written: {', '.join(touched[:4])}"] if touched else []
    if any(line.startswith("Traceback") for line in seen["lines"]):
        wrong.append("a traceback")
    if case.refusal:
        line = _line(case.refusal, seen)
        return f"refused: {line}", wrong if line else [*wrong, f"no true line: {_last(seen)}"]
    if seen["rc"] != 0:
        return "", [*wrong, f"exit code {seen['rc']}: {_last(seen)}"]
    trials = seen.get("trials", [])
    measured = [t for t in trials if t["mean_s"] and t["baseline"]]
    if not measured:
        return "", [*wrong, "nothing was measured"]
    ratios = [r for n in CLOCKS if (r := _over_clock(measured, before.get(n, {}))) is not None]
    if ratios and (max(ratios) < 1 / NEAR or min(ratios) > NEAR):
        nearest = min(ratios, key=lambda ratio: abs(math.log(ratio)))
        wrong.append(f"a mean step of {nearest:.2f} times the clock's")
    if mode == "profile":
        return RIGHT, wrong
    verdict = (seen.get("summary") or {}).get("verdict")
    return f"right: {verdict}", [*wrong, *_search(trials), *([] if verdict else ["no verdict"])]


def _over_clock(measured: list[dict[str, Any]], clock: dict[str, Any]) -> float | None:
    """The told mean step over the clock's of the same steps; a learner's take ever longer."""
    step_ms = clock.get("step_ms", [])
    ratios = []
    for trial in measured:
        begin = max(0, trial["begin_step"] - 1) if trial["fresh"] else 0
        same = step_ms[begin : begin + trial["steps"]] or step_ms
        if same:
            ratios.append(1e3 * trial["mean_s"] / statistics.fmean(same))
    return statistics.median(ratios) if ratios else None


def _search(trials: list[dict[str, Any]]) -> list[str]:
    """What is wrong where each configuration but the baseline failed."""
    tried = [t for t in trials if t["purpose"] == "search" and t["status"] != "interrupted"]
    if not tried or any(t["status"] in ("ok", "pruned") for t in tried):
        return []
    return [f"none of {len(tried)} trials came through: {tried[0]['status']}: {tried[0]['reason']}"]


def _line(pattern: str, seen: dict[str, Any]) -> str | None:
    """The last line that the pattern is found in."""
    return next((line for line in reversed(seen["lines"]) if re.search(pattern, line)), None)


def _last(seen: dict[str, Any]) -> str:
    return seen["lines"][-1] if seen["lines"] else "not a word"
