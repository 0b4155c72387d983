"""Whether a search ever gained more than the bound that was printed before it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from _metrics_store import Store

from perfsearch.core.journal import read
from perfsearch.core.knob import Part
from perfsearch.core.trial import Purpose, Trial
from perfsearch.knobs import by_name
from perfsearch.metrics.bounds import affected_parts, gain_of, upper_bounds


def check(store: Store, runs: Iterable[Path]) -> None:
    """Read each search's journal: the baseline's close look, and the last confirmed intervals.

    A gain is held against the bound by its interval's lower end, as the bound is an upper one.
    """
    for run in runs:
        _, events = read(run / "journal.jsonl")
        trials = [Trial.from_json(e.data["trial"]) for e in events if e.name == "finished"]
        baseline = next((t for t in trials if t.purpose is Purpose.BASELINE), None)
        confirmed = [e.data["intervals"] for e in events if e.name == "confirmed"]
        found = (
            []
            if baseline is None or baseline.measurement is None
            else upper_bounds(baseline.measurement)
        )
        if not confirmed or not found:
            print(f"{run}: no close look at a baseline, or nothing confirmed", flush=True)
            continue
        varied = {
            name
            for trial in trials
            for name, value in trial.configuration.items()
            if baseline is not None and baseline.configuration.get(name) != value
        }
        known = [by_name[name].knob for name in varied if name in by_name]
        parts = {part for knob in known for part in affected_parts(knob)}
        parts |= set(Part) if len(known) < len(varied) else set()
        bound = gain_of(min(1.0, sum(b.share for b in found if b.part in parts)))
        best = max(interval["low"] for interval in confirmed[-1].values()) - 1
        shown = bound if math.isfinite(bound) else None
        store.add("bound", run.name, bound=shown, gain=best, holds=best <= bound)
