"""The report's pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Protocol

from perfsearch.core.objective import Objective
from perfsearch.core.trial import Measurement, Purpose, Status, Trial
from perfsearch.tracking.effects import KnobEffect
from perfsearch.tracking.names import plain
from perfsearch.tracking.svg import Axis, Canvas, number

WIDTH = 860.0
_LEFT, _RIGHT = 64.0, 12.0
_INSIDE = ("forward", "backward", "optimizer")
_ORDER = (
    *("dataloader_next", "to_device", "train_batch", "forward", "backward", "comm_exposed"),
    "rank_wait",
    *("optimizer", "step_lr_schedulers", "from_device", "reduce_metrics", "callbacks", "rest"),
)
"""Phases as they come in a step; others stand behind them."""
_POINTS = 240


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
    def short(self) -> str:
        """Both in words."""


def describe(trial: Trial) -> str:
    """A trial in one line, for pointing at."""
    knobs = ", ".join(f"{k}={plain(v)}" for k, v in trial.configuration.items())
    value = "" if trial.objective is None else f", {number(trial.objective)}"
    return f"trial {trial.number} ({trial.status}{value}): {knobs} {trial.reason}".strip()


def progress(trials: Sequence[Trial], objective: Objective, winner: int | None) -> str:
    """Every trial by its number, and the best so far against the baseline."""
    shown = [t for t in trials if t.purpose is not Purpose.CONFIRM]
    good = [(t, t.objective) for t in shown if t.status is Status.OK and t.objective is not None]
    canvas = Canvas(WIDTH, 320, "objective of every trial, and the best so far")
    x = _trial_axis(shown)
    y = Axis.around([v for _, v in good], 320 - 58, 22)
    canvas.frame(x, y, "trial", objective.unit)
    base = next((v for t, v in good if t.purpose is Purpose.BASELINE), None)
    if base is not None:
        canvas.line((_LEFT, y(base)), (WIDTH - _RIGHT, y(base)), "baseline-line")
        canvas.text((WIDTH - _RIGHT, y(base) - 5), f"baseline {number(base)}", "note", "end")
    best: float | None = None
    steps: list[tuple[float, float]] = []
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
        style = {Purpose.BASELINE: "baseline", Purpose.SENTINEL: "sentinel"}.get(
            trial.purpose, "trial"
        )
        style = "winner" if trial.number == winner else style
        radius = 6 if style in ("winner", "baseline") else 4
        canvas.dot((x(trial.number), y(value)), style, describe(trial), radius)
    for trial in shown:
        if trial.status.has_failed:
            canvas.cross((x(trial.number), 320 - 46), "failed", describe(trial))
    return canvas.render()


def _trial_axis(trials: Sequence[Trial]) -> Axis:
    numbers = [float(trial.number) for trial in trials]
    if len(set(numbers)) == 1:
        return Axis(numbers[0] - 0.5, numbers[0] + 0.5, _LEFT, WIDTH - _RIGHT, whole=True)
    return Axis.around(numbers, _LEFT + 8, WIDTH - _RIGHT, margin=0.02, whole=True)


def speed_ups(intervals: Mapping[int, Ratio], winner: int | None) -> str:
    """Each finalist's speed-up over the baseline with its interval."""
    height = 62 + 28 * len(intervals)
    canvas = Canvas(WIDTH, height, "speed-up of the finalists over the baseline, with intervals")
    values = [1.0, *(i.ratio for i in intervals.values())]
    values += [v for i in intervals.values() if i.is_told for v in (i.low, i.high)]
    x = Axis.around(values, 150, WIDTH - 190)
    canvas.frame(x, None, "speed-up over the baseline (95% interval)")
    canvas.line((x(1.0), 14), (x(1.0), height - 34), "baseline-line")
    for row, (trial, interval) in enumerate(intervals.items()):
        y = 28 + 28 * row
        style = "winner" if trial == winner else "trial"
        words = interval.short
        canvas.text((140, y + 4), f"trial {trial}", "label", "end")
        if interval.is_told:
            canvas.line((x(interval.low), y), (x(interval.high), y), f"{style}-interval")
        canvas.dot((x(interval.ratio), y), style, words, 6)
        canvas.text((WIDTH - 182, y + 4), words, "note")
    return canvas.render()


def phase_parts(measurement: Measurement) -> dict[str, float]:
    """Milliseconds of phases that do not overlap and sum to the mean step over the ranks.

    ``train_batch`` is shown only where its parts are not known; what no phase covers is ``rest``.
    """
    phases = dict(measurement.phases_ms)
    if any(name in phases for name in _INSIDE):
        phases.pop("train_batch", None)
    ranks = measurement.environment.get("ranks", [])
    steps_ms = [float(r["step_ms"]) for r in ranks if r.get("step_ms")]
    step_ms = fmean(steps_ms or [s * 1e3 for s in measurement.step_seconds])
    rest = step_ms - sum(phases.values())
    if rest > 0:
        phases["rest"] = rest
    order = {name: place for place, name in enumerate(_ORDER)}
    listed = sorted(phases.items(), key=lambda item: order.get(item[0], len(order)))
    return {name: ms for name, ms in listed if ms > 0}


def phases(rows: Mapping[str, Measurement]) -> str:
    """Where a step's time goes, one stacked bar a row."""
    parts = {label: phase_parts(m) for label, m in rows.items()}
    names = list(dict.fromkeys(name for row in parts.values() for name in row))
    height = 74 + 40 * len(parts) + 18 * ((len(names) + 5) // 6)
    canvas = Canvas(WIDTH, height, "where the time of a step goes")
    x = Axis(0.0, max(sum(row.values()) for row in parts.values()) * 1.3, 100, WIDTH - _RIGHT)
    for place, name in enumerate(names):
        at = (100 + 126 * (place % 6), 14 + 18 * (place // 6))
        canvas.box((at[0], at[1] - 9), (10, 10), _colour(names, name))
        canvas.text((at[0] + 14, at[1]), name, "tick")
    top = 26 + 18 * ((len(names) + 5) // 6)
    for row, (label, row_parts) in enumerate(parts.items()):
        y, begin = top + 40 * row, 0.0
        canvas.text((92, y + 19), label, "label", "end")
        for name, ms in row_parts.items():
            words = f"{label}, {name}: {ms:.2f} ms"
            size = (x(begin + ms) - x(begin), 28)
            canvas.box((x(begin), y), size, _colour(names, name), words)
            begin += ms
        samples = rows[label].samples_per_step
        words = f"{number(begin)} ms for {number(samples)} samples"
        canvas.text((x(begin) + 6, y + 19), words, "note")
    bottom = Axis(x.low, x.high, x.start, x.end)
    canvas.frame(bottom, None, "ms a step")
    return canvas.render()


def effects(found: Sequence[KnobEffect]) -> str:
    """Each knob's levels with their intervals."""
    rows = sum(len(e.levels) + 1 for e in found)
    height = 48 + 20 * rows
    canvas = Canvas(WIDTH, height, "effect of each knob's values on the speed")
    levels = [level for e in found for level in e.levels]
    values = [1.0, *(level.speed_up for level in levels)]
    values += [v for level in levels if level.has_interval for v in (level.low, level.high)]
    x = Axis.around(values, 270, WIDTH - 130)
    canvas.frame(x, None, "speed against the mean trial, other knobs equal (95% interval)")
    canvas.line((x(1.0), 6), (x(1.0), height - 34), "baseline-line")
    y = 4.0
    for effect in found:
        y += 20
        canvas.text((8, y), effect.knob, "label")
        for level in effect.levels:
            y += 20
            words = f"{level.speed_up:.3f}x, {level.trials} trials"
            words = words if level.has_interval else f"{level.speed_up:.3f}x, 1 trial"
            style = "trial" if level.is_sure else "sentinel"
            canvas.text((258, y), level.label[:34], "tick", "end")
            if level.has_interval:
                canvas.line((x(level.low), y - 4), (x(level.high), y - 4), f"{style}-interval")
            canvas.dot((x(level.speed_up), y - 4), style, words)
            canvas.text((WIDTH - 122, y), words, "tick")
    return canvas.render()


def memory(trials: Sequence[Trial], limit_gib: float | None) -> str:
    """Peak memory of every trial, and which trials had too little."""
    shown = [t for t in trials if t.purpose is not Purpose.CONFIRM]
    peaks = [
        (t, t.measurement.peak_allocated_gib)
        for t in shown
        if t.measurement is not None and t.measurement.peak_allocated_gib is not None
    ]
    canvas = Canvas(WIDTH, 260, "peak memory of every trial")
    x = _trial_axis(shown)
    known = [p for _, p in peaks] + ([limit_gib] if limit_gib else [])
    y = Axis.around(known, 260 - 46, 22, zero=True)
    canvas.frame(x, y, "trial", "peak allocated, GiB")
    if limit_gib:
        canvas.line((_LEFT, y(limit_gib)), (WIDTH - _RIGHT, y(limit_gib)), "limit-line")
        canvas.text((WIDTH - _RIGHT, y(limit_gib) - 5), "device memory", "note", "end")
    for trial, peak in peaks:
        canvas.dot((x(trial.number), y(peak)), "trial", f"{peak:.2f} GiB, {describe(trial)}")
    for trial in shown:
        if trial.status is Status.OOM:
            canvas.cross((x(trial.number), 26), "failed", describe(trial))
    return canvas.render()


SYSTEM = (
    ("utilization_percentage", "utilisation, %"),
    ("memory_usage_megabytes", "GPU memory used, MB"),
    ("power_usage_watts", "GPU power, W"),
    ("system_memory_available_megabytes", "host memory available, MB"),
    ("network_receive_megabytes_per_s", "network received, MB/s"),
    ("network_transmit_megabytes_per_s", "network sent, MB/s"),
    ("disk_read_megabytes_per_s", "disk read, MB/s"),
    ("disk_write_megabytes_per_s", "disk written, MB/s"),
)


def system(series: Sequence[Mapping[str, Any]]) -> list[str]:
    """System metrics over time, a picture a kind, a line for the host or for each GPU."""
    if not series:
        return []
    begin = min(float(sample["time_s"]) for sample in series)
    several = len({sample.get("node", 0) for sample in series}) > 1
    pictures = []
    for ending, title in SYSTEM:
        lines: dict[str, list[tuple[float, float]]] = {}
        for sample in series:
            for key, value in sample.items():
                if key.endswith(ending) and not key.startswith("interface/"):
                    name = key.removesuffix(ending).strip("_").replace("_", " ")
                    name = f"node {sample.get('node', 0)} {name}" if several else name
                    at = float(sample["time_s"]) - begin
                    lines.setdefault(name.strip(), []).append((at, float(value)))
        if any(len(points) > 1 for points in lines.values()):
            pictures.append(_over_time(title, lines))
    return pictures


def _over_time(title: str, lines: Mapping[str, list[tuple[float, float]]]) -> str:
    lines = {name: _thinned(points) for name, points in lines.items()}
    names = list(lines)
    keyed = names if any(names) else []  # the host's own need no name
    rows = (len(keyed) + 3) // 4
    width, height = 420.0, 180.0 + 14 * rows
    canvas = Canvas(width, height, title)
    every = [point for points in lines.values() for point in points]
    x = Axis(0.0, max(t for t, _ in every) or 1.0, _LEFT, width - _RIGHT)
    y = Axis.around([v for _, v in every], height - 34, 20 + 14 * rows, zero=True)
    canvas.frame(x, y, "s", title)
    for place, name in enumerate(keyed):
        left, top = _LEFT + 88 * (place % 4), 26 + 14 * (place // 4)
        canvas.box((left, top - 8), (8, 8), _colour(names, name))
        canvas.text((left + 12, top), name, "tick")
    for name, points in lines.items():
        canvas.path([(x(t), y(v)) for t, v in points], f"line {_colour(names, name)}")
    return canvas.render()


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Means of neighbours, so that a long search makes no large file and no burst is left out."""
    size = max(1, -(-len(points) // _POINTS))
    parts = [points[place : place + size] for place in range(0, len(points), size)]
    return [(fmean(t for t, _ in part), fmean(v for _, v in part)) for part in parts]


def _colour(names: Sequence[str], name: str) -> str:
    return f"c{list(names).index(name) % 8}"
