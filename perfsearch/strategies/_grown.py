"""The largest configurations that are predicted to fit, stage by stage."""

from __future__ import annotations

from perfsearch.core.hints import Hints
from perfsearch.core.knob import Configuration, Knob, Value
from perfsearch.core.space import Space


def growing_knob(space: Space, hints: Hints) -> Knob | None:
    """The first ordered knob of which more (or less) is faster until memory ends."""
    knobs = [space.by_name[name] for name in hints.monotonic if name in space.by_name]
    usable = [k for k in knobs if k.is_ordered and k.count is not None and k.count > 1]
    return usable[0] if usable else None


def stages(space: Space, hints: Hints) -> list[Value]:
    """Values of the stage knob, cheapest first; a single ``None`` where there is no such knob."""
    knob = space.by_name.get(hints.stage_knob or "")
    return [None] if knob is None else list(knob.choices() or (None,))


def ladder(space: Space, hints: Hints, knob: Knob, base: Configuration) -> list[dict[str, Value]]:
    """Feasible configurations that differ from ``base`` in ``knob`` only, the slowest first."""
    values = list(knob.choices() or ())
    if hints.monotonic[knob.name] < 0:
        values.reverse()
    points = [space.canonical({**base, knob.name: v}) for v in values]
    return [point for point in points if space.feasible(point)]


def predicted_top(hints: Hints, rungs: list[dict[str, Value]]) -> int | None:
    """Place of the largest that is predicted to fit, 0 where none is; ``None`` where any cannot
    be predicted.
    """
    limit = hints.memory_limit_gib
    peaks = [hints.predict(point).peak_gib for point in rungs]
    if limit is None or any(peak is None for peak in peaks):
        return None
    fits = [i for i, peak in enumerate(peaks) if peak is not None and peak <= limit]
    return fits[-1] if fits else 0


def largest_that_fits(
    space: Space, hints: Hints, base: Configuration, stage: Value
) -> dict[str, Value] | None:
    """``base`` at a stage, with as much of the growing knob as is predicted to fit.

    ``None`` without such a knob, without predictions, or where not even the least fits.
    """
    knob = growing_knob(space, hints)
    if knob is None:
        return None
    if stage is not None and hints.stage_knob is not None:
        base = {**base, hints.stage_knob: stage}
    rungs = ladder(space, hints, knob, base)
    top = predicted_top(hints, rungs) if rungs else None
    if top is None:
        return None
    peak, limit = hints.predict(rungs[top]).peak_gib, hints.memory_limit_gib
    return rungs[top] if peak is not None and limit is not None and peak <= limit else None
