"""Where the time of a step goes, as a table: phase, milliseconds, share, what there is to gain."""

from __future__ import annotations

from collections.abc import Iterable

from perfsearch.core.knob import Knob, Part
from perfsearch.core.trial import Measurement
from perfsearch.metrics.bounds import (
    UpperBound,
    gain_text,
    in_short,
    knobs_by_part,
    profiled_step_ms,
    upper_bounds,
)

_NAMES = {
    "dataloader_next": "waiting for batches",
    "to_device": "copying batches",
    "comm_exposed": "waiting for communication",
    "rank_wait": "waiting for other ranks",
}
"""What a phase is called for people, where its own name does not say it."""

_PARTS = {
    "dataloader_next": Part.LOADING,
    "to_device": Part.LOADING,
    "forward": Part.COMPUTING,
    "backward": Part.COMPUTING,
    "rank_wait": Part.COMPUTING,
    "comm_exposed": Part.COMMUNICATION,
    "optimizer": Part.OPTIMIZER,
}

UNCOVERED = "in no phase"

HEADER = ("phase", "ms", "of the step", "gain at most", "searched for it")


def phase_table(measurement: Measurement, knobs: Iterable[Knob]) -> list[tuple[str, ...]]:
    """The table, its header first, the longest phase first below it; empty without a profile.

    A bound stands at the longest phase of its part of the step, and only where it is larger than
    its own error. Of computing there is one only where the devices' peak is known: no knob makes
    it take nothing. A column without any entry is left out.

    Args:
        measurement: with a profile of its steps.
        knobs: that are searched.

    """
    phases = {name: ms for name, ms in measurement.phases_ms.items() if ms > 0}
    bounds = {bound.part: bound for bound in upper_bounds(measurement)}
    if not phases:
        return []
    step_ms, names = profiled_step_ms(measurement), knobs_by_part(knobs)
    rest_ms = step_ms - sum(phases.values())
    if rest_ms > step_ms / 1000:
        phases[UNCOVERED] = rest_ms
    rows: list[tuple[str, ...]] = [HEADER]
    seen: set[Part] = set()
    for name, ms in sorted(phases.items(), key=lambda phase: -phase[1]):
        part = _PARTS.get(name, Part.REST)
        gain, searched = "", ""
        if part not in seen:
            gain, searched = _gain(measurement, bounds.get(part)), in_short(names[part])
        seen.add(part)
        share = f"{ms / step_ms:.1%}"
        rows.append((_NAMES.get(name, name), f"{ms:.2f}", share, gain, searched))
    empty = [at for at in range(len(HEADER)) if not any(row[at] for row in rows[1:])]
    return [tuple(cell for at, cell in enumerate(row) if at not in empty) for row in rows]


_MUCH_MORE = 1.5
"""So many times what its phases take, a bound needs a word on where it is from."""


def evidence_beyond_phases(measurement: Measurement) -> list[str]:
    """What the bounds rest on that are much larger than their phases, as steps without a part may
    save more than the time for which it is waited.
    """
    step_ms, phases = profiled_step_ms(measurement), measurement.phases_ms
    told = []
    for bound in upper_bounds(measurement):
        own = [ms for name, ms in phases.items() if _PARTS.get(name, Part.REST) is bound.part]
        seen = bound.share - bound.error
        if _gain(measurement, bound) and own and seen > _MUCH_MORE * sum(own) / step_ms:
            told.append(f"{bound.part}: {bound.evidence}")
    return told


def _gain(measurement: Measurement, bound: UpperBound | None) -> str:
    if bound is None or not bound.says_something:
        return ""
    if bound.part is Part.COMPUTING and not measurement.environment.get("peak_flops_per_s"):
        return ""
    return gain_text(bound.gain)
