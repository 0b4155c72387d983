"""Stage 1: open the journal of a search, a new one or one that this machine may go on with."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfsearch.core.journal import JOURNAL, Journal
from perfsearch.core.narrow import is_auto
from perfsearch.core.suggest import nearest
from perfsearch.runners.base import Runner
from perfsearch.stages.run_directory import RefusedError, failed_trials

if TYPE_CHECKING:
    from perfsearch.config import Settings


def open_journal(run_dir: Path, settings: Settings, runner: Runner, resuming: bool) -> Journal:
    """Create the journal, or reopen one that this machine and job may go on with.

    Raises:
        JournalError: it cannot be read or written.
        RefusedError: model, world size, device or library versions differ from the journal's.

    """
    identity = runner.identity()
    for name in settings.resume_force:
        if name not in identity:
            allowed = nearest(name, identity) if identity else "This runner has none."
            raise RefusedError(f"resume_force=[{name}]: not part of what is compared. {allowed}")
    if not resuming:
        header = {"search_id": uuid.uuid4().hex, "started_unix_s": time.time()}
        return Journal(run_dir / JOURNAL, {**header, "identity": identity})
    journal = Journal.reopen(run_dir / JOURNAL)
    if settings.resume == "failed":
        reason = _why_not_again(journal)
        if reason:
            journal.close()
            raise RefusedError(f"resume=failed: {run_dir}: {reason}")
    before: dict[str, str] = journal.header.get("identity", {})
    for name in sorted(before.keys() | identity.keys()):
        if before.get(name) != identity.get(name) and name not in settings.resume_force:
            journal.close()
            raise RefusedError(
                f"{run_dir}: its trials were measured with {name}={before.get(name)}, and this is "
                f"{identity.get(name)}. Use resume=never for a new search, or "
                f"resume_force=[{name}] to mix them."
            )
    return journal


def _why_not_again(journal: Journal) -> str:
    """Why failed trials cannot be run again now; empty where they can."""
    if not journal.ended:
        return "the search is not finished. The same command without resume=failed goes on."
    if not failed_trials(journal.path, journal.events):
        return "no trial of it failed, so there is nothing to run again."
    return ""


def definition(
    settings: Settings, runner: Runner, taken_over: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What decides the sequence of proposals, as plain values for the journal.

    Args:
        settings: of the search.
        runner: open, so that its space is known.
        taken_over: what an earlier search of a similar job contributed.

    """
    listed = runner.space.knobs
    auto = {"knobs_by_bound": True} if is_auto(settings.runner.options) else {}
    return {
        **auto,
        **(taken_over or {}),
        "strategy": asdict(settings.strategy),
        "seed": settings.seed,
        "knobs": [[k.name, str(k.kind), list(k.values), k.low, k.high, k.log] for k in listed],
        "pinned": dict(runner.pinned),
        "baseline": dict(runner.baseline),
        "objective": str(settings.objective.metric),
    }
