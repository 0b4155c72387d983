"""What a search was told on its command line, and what it left in its run directory."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TOLD = ("verdict", "is_baseline", "trial", "speed_up", "knobs")


def key_words(keys: Mapping[str, Any]) -> list[str]:
    """The words of ``perfsearch-run`` that set keys."""
    return [word for key, value in keys.items() for word in ("-o", f"{key}={value}")]


def found_in(run_dir: Path) -> dict[str, Any]:
    """``summary`` and ``trials``, each where there is one."""
    found: dict[str, Any] = {}
    summary, journal = run_dir / "best" / "summary.json", run_dir / "journal.jsonl"
    if summary.exists():
        told = json.loads(summary.read_text())
        found["summary"] = {name: told.get(name) for name in _TOLD}
    if journal.exists():
        found["trials"] = trials_of(journal)
    return found


def trials_of(journal: Path) -> list[dict[str, Any]]:
    """Status, reason, seconds a step and rate of each trial, and in what it is not the baseline."""
    found: list[dict[str, Any]] = []
    today: dict[str, Any] = {}
    for line in journal.read_text().splitlines():
        event = json.loads(line)
        trial = event.get("trial") if isinstance(event.get("trial"), dict) else event
        if "status" not in trial:
            continue
        measured = trial.get("measurement") or {}
        seconds = measured.get("step_seconds") or []
        configuration = trial.get("configuration") or {}
        today = today if found else configuration
        found.append({
            "number": trial.get("number"),
            "purpose": trial.get("purpose"), "baseline": configuration == today,
            "status": trial["status"],
            "reason": trial.get("reason"),
            "mean_s": statistics.fmean(seconds) if seconds else None,
            "begin_step": measured.get("discarded_steps"), "steps": len(seconds),
            "fresh": trial.get("fresh_process"),
            "differs": {n: v for n, v in configuration.items() if today.get(n) != v},
            "objective": trial.get("objective"), "seconds": trial.get("seconds"),
        })  # fmt: skip
    return found
