"""The pictures of a search's report, drawn for a width: a telephone has others than a screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Protocol

from perfsearch.core.figures import show_value
from perfsearch.core.objective import Objective
from perfsearch.core.trial import Measurement, Purpose, Status, Trial
from perfsearch.metrics.throughput import percentile
from perfsearch.tracking.canvas import LEFT, NARROW, RIGHT, Axis, Canvas, Point, number
from perfsearch.tracking.importance import MOST_LEVELS, KnobImportance

_COLOURS = 8
"""Of the style sheet, ``c0`` and so on."""

_INSIDE = ("forward", "backward", "optimizer")

_ORDER = (
    *("dataloader_next", "to_device", "train_batch", "forward", "backward", "comm_exposed"),
    "rank_wait",
    *("optimizer", "step_lr_schedulers", "from_device", "reduce_metrics", "callbacks", "rest"),
)
"""Phases as they come in a step; others stand behind them."""

_POINTS = 240

_BINS = 40

_FEWEST_STEPS = 10
"""Fewer step times show no distribution."""

_SHORTEST_S = 1.0
"""A search in less has no time worth a picture: its trials were replayed."""

_LONGEST_PAUSE = 0.05
"""Of all that trials took: a longer pause between two of them, such as that before a resume, is cut
to it."""


class Ratio(Protocol):
    """A speed-up over the baseline with its 95% interval."""

    @property
    def ratio(self) -> float:
        """The estimate."""

    @property
    def low(self) -> float:
        """Lower end."""

    @property
    def high(self) -> float:
        """Upper end."""

    @property
    def is_told(self) -> bool:
        """Whether the interval is narrow enough to be drawn."""

    @property
    def gain(self) -> str:
        """Both in words, as a relative change."""


# -----------------------------------------------------------------------------
# The search.


def progress(
    trials: Sequence[Trial], objective: Objective, winner: int | None, width: float
) -> Canvas:
    """Every trial by its number, and the best so far against the baseline."""
    shown = [t for t in trials if t.purpose.is_of_search]
    good = [(t, t.objective) for t in shown if t.status is Status.OK and t.objective is not None]
    canvas = Canvas(width, 320, "objective of every trial, and the best so far")
    x = _trial_axis(shown, width)
    y = Axis.around([v for _, v in good], 320 - 58, 22)
    canvas.frame(x, y, "trial", unit(trials, objective))
    base = next((v for t, v in good if t.purpose is Purpose.BASELINE), None)
    if base is not None:
        canvas.line((LEFT, y(base)), (width - RIGHT, y(base)), "baseline-line")
        canvas.text((width - RIGHT, y(base) - 5), f"baseline {number(base)}", "note", "end")
    best: float | None = None
    steps: list[Point] = []
    for trial, value in good:
        if trial.purpose is Purpose.SENTINEL:
            continue
        better = best is None or (value > best if objective.maximise else value < best)
        if better:
            if best is not None:
                steps.append((x(trial.number), y(best)))
            best = value
            steps.append((x(trial.number), y(value)))
    if best is not None and shown:
        steps.append((x(max(t.number for t in shown)), y(best)))
    canvas.path(steps, "best-line")
    for trial, value in good:
        style = _style(trial, winner)
        radius = 6 if style in ("winner", "baseline") else 4
        canvas.dot((x(trial.number), y(value)), style, describe(trial), radius)
    for trial in shown:
        if trial.status.has_failed:
            canvas.cross((x(trial.number), 320 - 46), "failed", describe(trial))
    return canvas


def speed_ups(intervals: Mapping[int, Ratio], winner: int | None, width: float) -> Canvas:
    """Each finalist's speed-up over the baseline with its interval, the fastest first."""
    ordered = sorted(intervals.items(), key=lambda item: -item[1].ratio)
    height = 56 + 44 * len(ordered)
    canvas = Canvas(width, height, "speed-up of the finalists over the baseline, with intervals")
    values = [1.0, *(i.ratio for i in intervals.values())]
    values += [v for i in intervals.values() if i.is_told for v in (i.low, i.high)]
    scale = Axis.around([_percent(v) for v in values], 16, width - RIGHT)
    canvas.frame(scale, None, "gain over the baseline in percent (95% interval)")
    canvas.line((scale(0.0), 14), (scale(0.0), height - 34), "baseline-line")

    def x(ratio: float) -> float:
        return scale(_percent(ratio))

    for row, (trial, interval) in enumerate(ordered):
        y = 18 + 44 * row
        style = "winner" if trial == winner else "trial"
        canvas.text((8, y), f"trial {trial}: {interval.gain}", "label")
        if interval.is_told:
            canvas.line((x(interval.low), y + 16), (x(interval.high), y + 16), f"{style}-interval")
        canvas.dot((x(interval.ratio), y + 16), style, interval.gain, 6)
    return canvas


def _percent(ratio: float) -> float:
    """The gain that a ratio of speeds is."""
    return 100 * (ratio - 1)


def scatter(
    knob: str, trials: Sequence[Trial], objective: Objective, winner: int | None
) -> Canvas | None:
    """The objective over a knob of many values; ``None`` for a knob of few."""
    points = []
    for trial in trials:
        value = trial.configuration.get(knob)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and trial.purpose.is_of_search and trial.status is Status.OK:
            assert value is not None
            if trial.objective is not None:
                points.append((float(value), trial.objective, trial))
    values = [value for value, _, _ in points]
    if len(set(values)) <= MOST_LEVELS:
        return None
    canvas = Canvas(NARROW, 220, f"objective over {knob}")
    log = min(values) > 0 and max(values) / min(values) >= 20
    whole = all(value.is_integer() for value in values)
    x = Axis.around(values, LEFT + 8, NARROW - RIGHT - 8, whole=whole and not log, log=log)
    y = Axis.around([found for _, found, _ in points], 220 - 46, 22)
    canvas.frame(x, y, knob, unit(trials, objective))
    for value, found, trial in points:
        canvas.dot((x(value), y(found)), _style(trial, winner), describe(trial))
    return canvas


def timeline(trials: Sequence[Trial], ended_s: Mapping[int, float], width: float) -> Canvas | None:
    """When each trial ran, by stage, a row for each lane; ``None`` where times are not known."""
    spans = sorted(
        (ended_s[t.number] - t.seconds, ended_s[t.number], t) for t in trials if t.number in ended_s
    )
    total = sum(trial.seconds for trial in trials)
    if len(spans) < 2 or total < _SHORTEST_S:
        return None
    lanes = sorted({trial.lane for _, _, trial in spans})
    stages: dict[str, float] = {}
    for trial in trials:
        stages[_stage(trial)] = stages.get(_stage(trial), 0.0) + trial.seconds
    keys = {f"{name} {duration(seconds)}": f"stage-{name}" for name, seconds in stages.items()}
    if any(trial.status.has_failed for trial in trials):
        keys["failed"] = "stage-failed"
    canvas = Canvas(width, 0, "when each trial ran")
    top = canvas.key(keys, 16, 14, 130)
    canvas.height = top + 26 * len(lanes) + 44
    placed, cuts = _without_pauses([(begin, end) for begin, end, _ in spans], total)
    x = Axis(0.0, max(end for _, end in placed), 16, width - RIGHT)
    for (begin, end), (_, _, trial) in zip(placed, spans, strict=True):
        y = top + 26 * lanes.index(trial.lane)
        size = (max(1.0, x(end) - x(begin) - 0.5), 22)
        style = "stage-failed" if trial.status.has_failed else f"stage-{_stage(trial)}"
        canvas.box((x(begin), y), size, style, f"{duration(trial.seconds)}, {describe(trial)}")
    for cut in cuts:
        canvas.line((x(cut), top - 4), (x(cut), top + 26 * len(lanes)), "baseline-line")
    canvas.frame(x, None, "s" if not cuts else "s; dashed: a pause left out")
    return canvas


def _without_pauses(
    spans: Sequence[tuple[float, float]], total: float
) -> tuple[list[tuple[float, float]], list[float]]:
    """The same spans from 0 on with long pauses cut, and where they were cut."""
    longest = _LONGEST_PAUSE * total
    placed, cuts = [], []
    shift = latest = spans[0][0]
    for begin, end in spans:
        if begin - latest > longest:
            shift += begin - latest - longest
            cuts.append(begin - shift - longest / 2)
        placed.append((begin - shift, end - shift))
        latest = max(latest, end)
    return placed, cuts


def _stage(trial: Trial) -> str:
    if trial.purpose in (Purpose.BASELINE, Purpose.SENTINEL, Purpose.SEARCH):
        return "search" if trial.purpose is Purpose.SEARCH else "baseline"
    return "confirm"


def _style(trial: Trial, winner: int | None) -> str:
    if trial.number == winner:
        return "winner"
    return {Purpose.BASELINE: "baseline", Purpose.SENTINEL: "sentinel"}.get(trial.purpose, "trial")


# -----------------------------------------------------------------------------
# The steps.


def distribution(rows: Mapping[str, Sequence[float]], width: float) -> Canvas | None:
    """How long the steps of each row took; ``None`` where there are too few of them."""
    rows = {label: steps for label, steps in rows.items() if len(steps) >= _FEWEST_STEPS}
    if not rows:
        return None
    low = min(min(steps) for steps in rows.values()) * 1e3
    high = max(percentile(steps, 0.98) for steps in rows.values()) * 1e3
    bins = _BINS if width > NARROW else _BINS // 2
    size = (high - low) / bins or 1.0
    top = 18.0 * len(rows) + 14
    canvas = Canvas(width, top + 210, "how long steps take")
    shares = {label: _shares(steps, low, size, bins) for label, steps in rows.items()}
    x = Axis(low, low + size * bins, LEFT, width - RIGHT)
    y = Axis(0.0, 1.1 * max(max(each) for each in shares.values()), top + 176, top + 12)
    canvas.frame(x, y, "ms a step", "")
    canvas.text((4, top + 4), "% of steps", "tick")
    for place, (label, steps) in enumerate(rows.items()):
        style = colour(place)
        outline = [(x(low), y(0.0))]
        for at, share in enumerate(shares[label]):
            outline += [(x(low + size * at), y(share)), (x(low + size * (at + 1)), y(share))]
        canvas.area([*outline, (x(low + size * bins), y(0.0))], f"heap {style}")
        middle = percentile(steps, 0.5) * 1e3
        canvas.line((x(middle), y(0.0)), (x(middle), top + 12), f"line {style}")
        canvas.box((8, 5 + 18 * place), (10, 10), style)
        quarters = [number(percentile(steps, share) * 1e3) for share in (0.25, 0.75)]
        words = f"{label}: {number(middle)} ms, half of the steps {' to '.join(quarters)}"
        canvas.text((24, 14 + 18 * place), words, "tick")
    return canvas


def _shares(steps: Sequence[float], low: float, size: float, bins: int) -> list[float]:
    counts = [0] * bins
    for step in steps:
        place = int((step * 1e3 - low) / size)
        if place <= bins:  # slower ones are beyond the picture
            counts[min(place, bins - 1)] += 1
    return [100.0 * count / len(steps) for count in counts]


def phases(rows: Mapping[str, Measurement], width: float) -> Canvas:
    """Where a step's time goes, one stacked bar a row."""
    parts = {label: phase_parts(m) for label, m in rows.items()}
    names = list(dict.fromkeys(name for row in parts.values() for name in row))
    styles = {name: colour(place) for place, name in enumerate(names)}
    canvas = Canvas(width, 0, "where the time of a step goes")
    top = canvas.key(styles, 8, 14, 126) + 8
    canvas.height = top + 50 * len(parts) + 40
    x = Axis(0.0, max(sum(row.values()) for row in parts.values()) * 1.02, 8, width - RIGHT)
    for row, (label, row_parts) in enumerate(parts.items()):
        y, begin = top + 50 * row, 0.0
        samples = rows[label].samples_per_step
        counted = "a step" if samples is None else f"{number(samples)} samples"
        whole = f"{label}: {number(sum(row_parts.values()))} ms for {counted}"
        canvas.text((8, y + 8), whole, "label")
        for name, ms in row_parts.items():
            words = f"{label}, {name}: {ms:.2f} ms"
            canvas.box((x(begin), y + 14), (x(begin + ms) - x(begin), 24), styles[name], words)
            begin += ms
    canvas.frame(x, None, "ms a step")
    return canvas


def phase_parts(measurement: Measurement) -> dict[str, float]:
    """Milliseconds of phases that do not overlap and sum to the mean step over the ranks.

    ``train_batch`` is shown only where its parts are not known; what no phase covers is ``rest``,
    or part of what a script's own profile calls ``other``.
    """
    phases = dict(measurement.phases_ms)
    if any(name in phases for name in _INSIDE):
        phases.pop("train_batch", None)
    ranks = measurement.environment.get("ranks", [])
    steps_ms = [float(r["step_ms"]) for r in ranks if r.get("step_ms")]
    step_ms = fmean(steps_ms or [s * 1e3 for s in measurement.step_seconds])
    rest = step_ms - sum(phases.values())
    if rest > 0:
        unnamed = "other" if "other" in phases else "rest"
        phases[unnamed] = phases.get(unnamed, 0.0) + rest
    order = {name: place for place, name in enumerate(_ORDER)}
    listed = sorted(phases.items(), key=lambda item: order.get(item[0], len(order)))
    return {name: ms for name, ms in listed if ms > 0}


# -----------------------------------------------------------------------------
# Knobs, memory, the system.


def importance(found: Sequence[KnobImportance], width: float) -> Canvas:
    """Each knob's levels with their intervals."""
    is_wide = width > NARROW
    left, right = (250.0, 130.0) if is_wide else (112.0, 66.0)
    rows = sum(len(e.levels) + 1 for e in found)
    height = 48 + 20 * rows
    canvas = Canvas(width, height, "effect of each setting's values on the speed")
    levels = [level for e in found for level in e.levels]
    values = [1.0, *(level.speed_up for level in levels)]
    values += [v for level in levels if level.has_interval for v in (level.low, level.high)]
    scale = Axis.around([_percent(v) for v in values], left + 12, width - right)
    caption = "percent faster than the mean trial, other settings equal (95% interval)"
    canvas.frame(scale, None, caption if is_wide else "percent faster than the mean trial")
    canvas.line((scale(0.0), 6), (scale(0.0), height - 34), "baseline-line")

    def x(ratio: float) -> float:
        return scale(_percent(ratio))

    y = 4.0
    for effect in found:
        y += 20
        canvas.text((8, y), effect.knob, "label")
        for level in effect.levels:
            y += 20
            count = f"{level.trials} trial{'' if level.trials == 1 else 's'}"
            gain = f"{level.speed_up - 1:+.1%}"
            words = f"{gain}, {count}"
            style = "trial" if level.is_sure else "sentinel"
            label = level.label if len(level.label) <= left / 7.4 else level.label[:13] + "\u2026"
            canvas.text((left, y), label, "tick", "end")
            if level.has_interval:
                canvas.line((x(level.low), y - 4), (x(level.high), y - 4), f"{style}-interval")
            canvas.dot((x(level.speed_up), y - 4), style, words)
            shown = words if is_wide else gain
            canvas.text((width - right + 8, y), shown, "tick")
    return canvas


def memory(trials: Sequence[Trial], limit_gib: float | None, width: float) -> Canvas:
    """Peak memory of every trial, and which trials had too little."""
    shown = [t for t in trials if t.purpose.is_of_search]
    peaks = [
        (t, t.measurement.peak_allocated_gib)
        for t in shown
        if t.measurement is not None and t.measurement.peak_allocated_gib is not None
    ]
    canvas = Canvas(width, 260, "peak memory of every trial")
    x = _trial_axis(shown, width)
    known = [p for _, p in peaks] + ([limit_gib] if limit_gib else [])
    y = Axis.around(known, 260 - 46, 22, zero=True)
    canvas.frame(x, y, "trial", "peak allocated, GiB")
    if limit_gib:
        canvas.line((LEFT, y(limit_gib)), (width - RIGHT, y(limit_gib)), "limit-line")
        canvas.text((width - RIGHT, y(limit_gib) - 5), "device memory", "note", "end")
    for trial, peak in peaks:
        canvas.dot((x(trial.number), y(peak)), "trial", f"{peak:.2f} GiB, {describe(trial)}")
    for trial in shown:
        if trial.status is Status.OOM:
            canvas.cross((x(trial.number), 26), "failed", describe(trial))
    return canvas


SYSTEM = (
    ("utilization_percentage", "utilisation, %", 1.0),
    ("memory_usage_megabytes", "GPU memory used, MB", 1.0),
    ("power_usage_watts", "GPU power, W", 1.0),
    ("system_memory_available_megabytes", "host memory available, MB", 1.0),
    ("network_receive_megabytes_per_s", "network received, MB/s", 0.1),
    ("network_transmit_megabytes_per_s", "network sent, MB/s", 0.1),
    ("disk_read_megabytes_per_s", "disk read, MB/s", 0.1),
    ("disk_write_megabytes_per_s", "disk written, MB/s", 0.1),
)
"""Endings of readings, what they are, and what of them is as good as nothing."""


def system(series: Sequence[Mapping[str, Any]]) -> list[Canvas]:
    """System metrics over time, a picture a kind, a line for the host or for each GPU."""
    if not series:
        return []
    begin = min(float(sample["time_s"]) for sample in series)
    several = len({sample.get("node", 0) for sample in series}) > 1
    pictures = []
    for suffix, title, least in SYSTEM:
        lines: dict[str, list[Point]] = {}
        for sample in series:
            for key, value in sample.items():
                if key.endswith(suffix) and not key.startswith("interface/"):
                    name = key.removesuffix(suffix).strip("_").replace("_", " ")
                    name = f"node {sample.get('node', 0)} {name}" if several else name
                    at = float(sample["time_s"]) - begin
                    lines.setdefault(name.strip(), []).append((at, float(value)))
        most = max((value for points in lines.values() for _, value in points), default=0.0)
        if most >= least and any(len(points) > 1 for points in lines.values()):
            pictures.append(_over_time(title, lines))
    return pictures


def _over_time(title: str, lines: Mapping[str, Sequence[Point]]) -> Canvas:
    lines = {name: _thinned(points) for name, points in lines.items()}
    styles = {name: colour(place) for place, name in enumerate(lines)}
    canvas = Canvas(NARROW, 0, title)
    # the host's own need no name
    top = canvas.key(styles, LEFT, 28, 98) if any(lines) else 20.0
    canvas.height = top + 160
    every = [point for points in lines.values() for point in points]
    x = Axis(0.0, max(t for t, _ in every) or 1.0, LEFT, NARROW - RIGHT)
    y = Axis.around([v for _, v in every], canvas.height - 34, top, zero=True)
    canvas.frame(x, y, "s", title)
    for name, points in lines.items():
        canvas.path([(x(t), y(v)) for t, v in points], f"line {styles[name]}")
    return canvas


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Means of neighbours, so that a long search makes no large file and no burst is left out."""
    size = max(1, -(-len(points) // _POINTS))
    parts = [points[place : place + size] for place in range(0, len(points), size)]
    return [(fmean(t for t, _ in part), fmean(v for _, v in part)) for part in parts]


def _trial_axis(trials: Sequence[Trial], width: float) -> Axis:
    numbers = [float(trial.number) for trial in trials]
    if len(set(numbers)) == 1:
        return Axis(numbers[0] - 0.5, numbers[0] + 0.5, LEFT, width - RIGHT, whole=True)
    return Axis.around(numbers, LEFT + 8, width - RIGHT, margin=0.02, whole=True)


def unit(trials: Sequence[Trial], objective: Objective) -> str:
    """Unit of the objective, as far as the trials tell it."""
    return objective.unit(next((t.measurement for t in trials if t.measurement), None))


def duration(seconds: float) -> str:
    """A time as people write it."""
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def describe(trial: Trial) -> str:
    """A trial in one line, for pointing at."""
    knobs = ", ".join(f"{k}={show_value(v)}" for k, v in trial.configuration.items())
    value = "" if trial.objective is None else f", {number(trial.objective)}"
    return f"trial {trial.number} ({trial.status}{value}): {knobs} {trial.reason}".strip()


def colour(place: int) -> str:
    """Style of a line or a box among others."""
    return f"c{place % _COLOURS}"
