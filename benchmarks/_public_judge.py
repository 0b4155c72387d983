"""Whether what a mode did was right, refused in a true line, or wrong, and why."""

from __future__ import annotations

import re
from typing import Any

from _public_cases import Case

RIGHT = "right"
NEAR = 1.5  # a told rate over the clock's, on a machine that is not quiet


def judge(case: Case, mode: str, seen: dict[str, Any], before: dict[str, Any]) -> str:
    """Return ``right``, ``refused: the line``, or ``wrong: why``.

    Args:
        case: the script.
        mode: how it was started.
        seen: what was seen of it.
        before: the records of earlier modes of the same script, by mode.

    """
    if seen["rc"] is None:
        return "wrong: no end within the limit"
    if seen["left"]:
        return f"wrong: {seen['left']} processes left"
    if mode in ("plain", "clock"):
        return _judge_plain(case, seen)
    if mode in ("search", "profile"):
        return _judge_measured(case, mode, seen, before)
    return _judge_as_plain(case, seen, before.get("plain"))


def _judge_plain(case: Case, seen: dict[str, Any]) -> str:
    if seen["rc"] == 0:
        return RIGHT if not case.plain_fails else "wrong: does not fail as expected"
    line = _line(case.plain_fails, seen) if case.plain_fails else None
    return f"fails as it is: {line}" if line else f"wrong: exit code {seen['rc']}"


def _judge_as_plain(case: Case, seen: dict[str, Any], plain: dict[str, Any] | None) -> str:
    """A start that trains to the end must end as the plain one, with the same files."""
    expected = plain["rc"] if plain else 0
    if bool(seen["rc"]) != bool(expected):
        return f"wrong: exit code {seen['rc']}, {expected} without perfsearch"
    if plain and plain["written"] != seen["written"]:
        missing = sorted(set(plain["written"]) - set(seen["written"]))
        more = sorted(set(seen["written"]) - set(plain["written"]))
        return f"wrong: other files than without perfsearch (missing {missing}, more {more})"
    return RIGHT


def _judge_measured(case: Case, mode: str, seen: dict[str, Any], before: dict[str, Any]) -> str:
    """A search or profile leaves files alone, and tells the clock's rate, or why there is none."""
    touched = [*seen["changed"], *seen["written"]]
    last = seen["lines"][-1] if seen["lines"] else "not a word"
    if any(line.startswith("Traceback") for line in seen["lines"]):
        return f"wrong: a traceback: {last}"
    if touched:
        return f"wrong: files of the user's changed or written: {', '.join(touched[:4])}"
    if case.refusal:
        line = _line(case.refusal, seen)
        return f"refused: {line}" if line else f"wrong: no true line: {last}"
    if seen["rc"] != 0:
        return f"wrong: exit code {seen['rc']}: {last}"
    trials = seen.get("trials", [])
    measured = [t for t in trials if t["mean_s"]]
    if not measured:
        return "wrong: nothing was measured"
    clock = before.get("clock", {}).get("mean_s")
    if clock:
        ratio = measured[0]["mean_s"] / clock
        if not 1 / NEAR < ratio < NEAR:
            return f"wrong: a mean step of {ratio:.2f} times the clock's"
    if mode == "search":
        return _judge_search(seen, trials)
    return RIGHT


def _judge_search(seen: dict[str, Any], trials: list[dict[str, Any]]) -> str:
    tried = [t for t in trials if t["purpose"] == "search"]
    ok = [t for t in tried if t["status"] in ("ok", "pruned")]
    if tried and not ok:
        reasons = sorted({f"{t['status']}: {t['reason']}" for t in tried})
        return f"wrong: no trial of {len(tried)} came through: {reasons[0]}"
    verdict = (seen.get("summary") or {}).get("verdict")
    return f"right: {verdict}" if verdict else "wrong: no verdict"


def _line(pattern: str, seen: dict[str, Any]) -> str | None:
    """The last line that the pattern is found in."""
    return next((line for line in reversed(seen["lines"]) if re.search(pattern, line)), None)
