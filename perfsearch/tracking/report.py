"""``report.html``: one file, nothing loaded from elsewhere."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import numpy as np

from perfsearch.core.files import write_text
from perfsearch.core.knob import Knob
from perfsearch.core.objective import Objective
from perfsearch.core.secrets import Redactor
from perfsearch.core.trial import Measurement, Purpose, Status, Trial
from perfsearch.metrics.bounds import gain_text, profiled_measurement, upper_bounds
from perfsearch.metrics.diagnosis import diagnose
from perfsearch.tracking.importance import KnobImportance, knob_importance
from perfsearch.tracking.names import plain

TEMPLATE = "report.html.jinja"

_ROWS = 1000

_SEED = 0
"""The intervals of the same trials are the same in every report."""

_COLOURS = (
    "#0072b2 #e69f00 #009e73 #cc79a7 #56b4e9 #d55e00 #8c6d31 #999999".split()  # noqa: SIM905
)
"""Okabe and Ito's palette, told apart also by the colour-blind; yellow is too pale on white."""


def write_report(
    path: Path,
    trials: Sequence[Trial],
    verdict: Verdict,
    objective: Objective,
    *,
    title: str = "perfsearch",
    system_series: Sequence[Mapping[str, Any]] = (),
    memory_limit_gib: float | None = None,
    headroom: float | None = None,
    knobs: Sequence[Knob] = (),
) -> None:
    """Write the report of a search.

    Args:
        path: the file.
        trials: all of them, in order.
        verdict: of the confirmation.
        objective: what was optimised.
        title: heading of the page.
        system_series: the sampler's raw samples.
        memory_limit_gib: what fits on a device.
        headroom: the most that all searched knobs could gain, relative; ``None`` where unknown.
        knobs: those of the search, which say where each of them matters.

    Raises:
        OSError: it cannot be written.

    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    columns, rows = _table(trials, objective)
    page = environment.get_template(TEMPLATE).render(
        title=title,
        verdict=verdict.reason,
        colours=_COLOURS,
        trials=len(trials),
        counts=Counter(t.status.value for t in trials).most_common(),
        progress=progress(trials, objective, verdict.winner),
        speed_ups=speed_ups(verdict.intervals, verdict.winner) if verdict.intervals else None,
        phases=_phases(trials, verdict.winner),
        findings=_findings(trials, verdict.winner),
        upper_bounds=_upper_bounds(trials, headroom),
        importance=_importance(trials, knobs),
        memory=_memory(trials, memory_limit_gib),
        system=system(system_series),
        columns=columns,
        rows=rows,
        left_out=len(trials) - len(rows),
    )
    write_text(path, Redactor().text(page) + "\n", durable=True)


class Verdict(Protocol):
    """What the confirmation said."""

    @property
    def intervals(self) -> Mapping[int, Ratio]:
        """Speed-up of each finalist by its trial's number."""

    @property
    def winner(self) -> int | None:
        """Trial whose configuration is handed over; ``None`` for the baseline's."""

    @property
    def reason(self) -> str:
        """One line for people."""


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


def _find(trials: Sequence[Trial], winner: int | None) -> dict[str, Measurement]:
    """Measurements of the baseline and of the winner, as far as there are any."""
    found: dict[str, Measurement] = {}
    for trial in trials:
        is_baseline = trial.purpose is Purpose.BASELINE
        if not is_baseline and (winner is None or trial.number != winner):
            continue
        measured = profiled_measurement(trials, trial.configuration)
        if measured is not None:
            found["baseline" if is_baseline else f"trial {winner}"] = measured
    return found


def _phases(trials: Sequence[Trial], winner: int | None) -> Canvas | None:
    rows = {label: m for label, m in _find(trials, winner).items() if m.phases_ms}
    return phases(rows) if rows else None


def _findings(
    trials: Sequence[Trial], winner: int | None
) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """What the diagnosis says of the baseline and the winner, the name of each finding apart."""
    parts = []
    for label, measurement in _find(trials, winner).items():
        if measurement.phases_ms:
            known = measurement.environment.get("findings")
            lines = known or [str(finding) for finding in diagnose(measurement)]
            parts.append((label, [line.partition(" ") for line in lines]))
    return parts


def _upper_bounds(trials: Sequence[Trial], headroom: float | None) -> list[tuple[str, str, str]]:
    """The upper bounds that were printed before the search, which decided on it."""
    baseline = next((t.measurement for t in trials if t.purpose is Purpose.BASELINE), None)
    rows = (
        []
        if baseline is None
        else [(str(b.part), gain_text(b.gain), b.evidence) for b in upper_bounds(baseline)]
    )
    if rows and headroom is not None:
        rows.append(("all that is searched", gain_text(headroom), ""))
    return rows


def _importance(trials: Sequence[Trial], knobs: Sequence[Knob]) -> Canvas | None:
    names = list(dict.fromkeys(name for t in trials for name in t.configuration))
    when = {knob.name: knob.when for knob in knobs}
    found = knob_importance(trials, names, np.random.default_rng(_SEED), when)
    return importance(found) if found else None


def _memory(trials: Sequence[Trial], limit_gib: float | None) -> Canvas | None:
    known = any(t.measurement and t.measurement.peak_allocated_gib for t in trials)
    return memory(trials, limit_gib) if known else None


def _table(trials: Sequence[Trial], objective: Objective) -> tuple[list[str], list[list[str]]]:
    """Names of the columns, and a row for each of the first trials."""
    knobs = list(dict.fromkeys(name for t in trials for name in t.configuration))
    unit = _unit(trials, objective)
    columns = ["trial", "purpose", "status", unit, "ms/step", "GiB", *knobs, "reason"]
    rows = []
    for trial in trials[:_ROWS]:
        found = trial.measurement
        step_ms = found.step_time_s * 1e3 if found and found.step_seconds else None
        cells = [str(trial.number), trial.purpose.value, trial.status.value]
        cells += [_cell(trial.objective), _cell(step_ms)]
        cells.append(_cell(found.peak_allocated_gib if found else None))
        cells += [plain(trial.configuration[k]) if k in trial.configuration else "" for k in knobs]
        rows.append([*cells, trial.reason])
    return columns, rows


def _unit(trials: Sequence[Trial], objective: Objective) -> str:
    return objective.unit(next((t.measurement for t in trials if t.measurement), None))


def _cell(value: float | None) -> str:
    return "" if value is None else number(value)


# -----------------------------------------------------------------------------
# The pictures.

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


def progress(trials: Sequence[Trial], objective: Objective, winner: int | None) -> Canvas:
    """Every trial by its number, and the best so far against the baseline."""
    shown = [t for t in trials if t.purpose.is_of_search]
    good = [(t, t.objective) for t in shown if t.status is Status.OK and t.objective is not None]
    canvas = Canvas(WIDTH, 320, "objective of every trial, and the best so far")
    x = _trial_axis(shown)
    y = Axis.around([v for _, v in good], 320 - 58, 22)
    canvas.frame(x, y, "trial", _unit(trials, objective))
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
    return canvas


def speed_ups(intervals: Mapping[int, Ratio], winner: int | None) -> Canvas:
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
    return canvas


def phases(rows: Mapping[str, Measurement]) -> Canvas:
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
        counted = "a step" if samples is None else f"{number(samples)} samples"
        words = f"{number(begin)} ms for {counted}"
        canvas.text((x(begin) + 6, y + 19), words, "note")
    bottom = Axis(x.low, x.high, x.start, x.end)
    canvas.frame(bottom, None, "ms a step")
    return canvas


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


def importance(found: Sequence[KnobImportance]) -> Canvas:
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
    return canvas


def memory(trials: Sequence[Trial], limit_gib: float | None) -> Canvas:
    """Peak memory of every trial, and which trials had too little."""
    shown = [t for t in trials if t.purpose.is_of_search]
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
    return canvas


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


def system(series: Sequence[Mapping[str, Any]]) -> list[Canvas]:
    """System metrics over time, a picture a kind, a line for the host or for each GPU."""
    if not series:
        return []
    begin = min(float(sample["time_s"]) for sample in series)
    several = len({sample.get("node", 0) for sample in series}) > 1
    pictures = []
    for suffix, title in SYSTEM:
        lines: dict[str, list[tuple[float, float]]] = {}
        for sample in series:
            for key, value in sample.items():
                if key.endswith(suffix) and not key.startswith("interface/"):
                    name = key.removesuffix(suffix).strip("_").replace("_", " ")
                    name = f"node {sample.get('node', 0)} {name}" if several else name
                    at = float(sample["time_s"]) - begin
                    lines.setdefault(name.strip(), []).append((at, float(value)))
        if any(len(points) > 1 for points in lines.values()):
            pictures.append(_over_time(title, lines))
    return pictures


def _over_time(title: str, lines: Mapping[str, list[tuple[float, float]]]) -> Canvas:
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
    return canvas


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Means of neighbours, so that a long search makes no large file and no burst is left out."""
    size = max(1, -(-len(points) // _POINTS))
    parts = [points[place : place + size] for place in range(0, len(points), size)]
    return [(fmean(t for t, _ in part), fmean(v for _, v in part)) for part in parts]


def _trial_axis(trials: Sequence[Trial]) -> Axis:
    numbers = [float(trial.number) for trial in trials]
    if len(set(numbers)) == 1:
        return Axis(numbers[0] - 0.5, numbers[0] + 0.5, _LEFT, WIDTH - _RIGHT, whole=True)
    return Axis.around(numbers, _LEFT + 8, WIDTH - _RIGHT, margin=0.02, whole=True)


def describe(trial: Trial) -> str:
    """A trial in one line, for pointing at."""
    knobs = ", ".join(f"{k}={plain(v)}" for k, v in trial.configuration.items())
    value = "" if trial.objective is None else f", {number(trial.objective)}"
    return f"trial {trial.number} ({trial.status}{value}): {knobs} {trial.reason}".strip()


def _colour(names: Sequence[str], name: str) -> str:
    return f"c{list(names).index(name) % 8}"


# -----------------------------------------------------------------------------
# What pictures are drawn with.

Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """A linear scale from values to pixels.

    Attributes:
        low: value at ``start``.
        high: value at ``end``; above ``low``.
        start: pixel of ``low``.
        end: pixel of ``high``.
        whole: whether only whole numbers mean something.

    """

    low: float
    high: float
    start: float
    end: float
    whole: bool = False

    @classmethod
    def around(
        cls,
        values: Sequence[float],
        start: float,
        end: float,
        *,
        zero: bool = False,
        margin: float = 0.06,
        whole: bool = False,
    ) -> Axis:
        """A scale that shows all values, with zero if asked for, and never has no extent."""
        finite = [v for v in values if math.isfinite(v)] or [0.0]
        low, high = min(finite), max(finite)
        if zero:
            low, high = min(0.0, low), max(0.0, high)
        room = (high - low) * margin or abs(high) * margin or 1.0
        return cls(low if zero and low == 0 else low - room, high + room, start, end, whole)

    def __call__(self, value: float) -> float:
        """Pixel of a value."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values inside the scale, about ``count`` of them."""
        raw = (self.high - self.low) / max(1, count)
        size = 10.0 ** math.floor(math.log10(raw))
        step = next(m * size for m in (1, 2, 2.5, 5, 10) if m * size >= raw * 0.999)
        step = math.ceil(step) if self.whole else step
        first = math.ceil(self.low / step)
        values = [(first + i) * step for i in range(int((self.high - self.low) / step) + 2)]
        return [v for v in values if v <= self.high + 1e-9 * step]


@dataclass(frozen=True)
class Shape:
    """An element of a picture.

    Attributes:
        tag: its SVG element.
        attributes: of the element.
        text: what it says.
        title: what it says when pointed at; ``None``: nothing.

    """

    tag: str
    attributes: Mapping[str, str]
    text: str = ""
    title: str | None = None


class Canvas:
    """Shapes with classes of the report's style sheet.

    Args:
        width: pixels.
        height: pixels.
        label: what it shows, for readers who do not see it.

    """

    def __init__(self, width: float, height: float, label: str) -> None:
        self.shapes: list[Shape] = []
        self.width = width
        self.height = height
        self.label = label

    def line(self, begin: Point, end: Point, style: str) -> None:
        """A straight line."""
        ends = {"x1": begin[0], "y1": begin[1], "x2": end[0], "y2": end[1]}
        self._add("line", style, ends)

    def path(self, points: Sequence[Point], style: str) -> None:
        """A line through points."""
        self._add("polyline", style, points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points))

    def dot(self, at: Point, style: str, title: str = "", radius: float = 4) -> None:
        """A disc, with a text that shows when it is pointed at."""
        self._add("circle", style, {"cx": at[0], "cy": at[1], "r": radius}, title=title)

    def cross(self, at: Point, style: str, title: str = "", size: float = 4) -> None:
        """An oblique cross."""
        (x, y), long = at, 2 * size
        strokes = f"M{x - size:.1f} {y - size:.1f}l{long} {long}m0 {-long}l{-long} {long}"
        self._add("path", style, title=title, d=strokes)

    def box(self, corner: Point, size: Point, style: str, title: str = "") -> None:
        """A filled rectangle from its upper left corner."""
        (x, y), (width, height) = corner, size
        place = {"x": x, "y": y, "width": max(0.0, width), "height": height}
        self._add("rect", style, place, title=title)

    def text(self, at: Point, words: str, style: str = "", anchor: str = "start") -> None:
        """Words whose anchor is ``start``, ``middle`` or ``end``."""
        place = {"x": at[0], "y": at[1]}
        self._add("text", style, place, text=words, **{"text-anchor": anchor})

    def _add(
        self,
        tag: str,
        style: str,
        pixels: Mapping[str, float] | None = None,
        *,
        text: str = "",
        title: str | None = None,
        **attributes: str,
    ) -> None:
        places = {name: f"{value:.1f}" for name, value in (pixels or {}).items()}
        self.shapes.append(Shape(tag, {"class": style, **places, **attributes}, text, title))

    def frame(self, x: Axis | None, y: Axis | None, x_label: str = "", y_label: str = "") -> None:
        """Grid lines with their values, and the axes' labels."""
        bottom, left = self.height - 34, 64.0
        for value in y.ticks() if y else ():
            assert y is not None
            self.line((left, y(value)), (self.width - 12, y(value)), "grid")
            self.text((left - 6, y(value) + 4), number(value), "tick", "end")
        for value in x.ticks(8) if x else ():
            assert x is not None
            self.line((x(value), bottom), (x(value), bottom + 4), "axis")
            self.text((x(value), bottom + 17), number(value), "tick", "middle")
        self.line((left, bottom), (self.width - 12, bottom), "axis")
        self.text((self.width - 12, self.height - 4), x_label, "tick", "end")
        self.text((4, 12), y_label, "tick")


def number(value: float) -> str:
    """A number for people: at most four digits that count."""
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
