"""``report.html``: one file, nothing loaded from elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from perfsearch.core.knob import Knob
from perfsearch.core.objective import Objective
from perfsearch.core.trial import Measurement, Purpose, Trial
from perfsearch.metrics.bounds import bounds, closest_look, percent
from perfsearch.metrics.diagnosis import diagnose
from perfsearch.tracking import charts
from perfsearch.tracking.effects import knob_effects
from perfsearch.tracking.files import write_text
from perfsearch.tracking.names import plain
from perfsearch.tracking.svg import number

_ROWS = 1000
_SEED = 0
"""The intervals of the same trials are the same in every report."""


class Verdict(Protocol):
    """What the confirmation said."""

    @property
    def intervals(self) -> Mapping[int, charts.Ratio]:
        """Speed-up of each finalist by its trial's number."""

    @property
    def winner(self) -> int | None:
        """Trial whose configuration is handed over; ``None`` for the baseline's."""

    @property
    def reason(self) -> str:
        """One line for people."""


def write_report(
    path: Path,
    trials: Sequence[Trial],
    verdict: Verdict,
    objective: Objective,
    *,
    title: str = "perfsearch",
    system_series: Sequence[Mapping[str, Any]] = (),
    memory_limit_gib: float | None = None,
    bound: float | None = None,
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
        bound: the most that all searched knobs could gain, relative; ``None`` where unknown.
        knobs: those of the search, which say where each of them matters.

    Raises:
        OSError: it cannot be written.

    """
    sections = [
        ("Progress", charts.progress(trials, objective, verdict.winner), _PROGRESS),
        ("Baseline against the finalists", _speed_ups(verdict), _SPEED_UPS),
        ("Where the time of a step goes", _phases(trials, verdict.winner), _PHASES),
        ("What holds the job back", _diagnosis(trials, verdict.winner), ""),
        ("What there was to gain, at most", _gains(trials, bound), _GAINS),
        ("Effect of each knob", _effects(trials, knobs), _EFFECTS),
        ("Memory", _memory(trials, memory_limit_gib), _MEMORY),
        ("System", "".join(charts.system(system_series)), ""),
        ("Trials", _table(trials, objective), ""),
    ]
    body = "".join(
        f"<section><h2>{escape(name)}</h2>{content}<p class=caption>{escape(caption)}</p></section>"
        for name, content, caption in sections
        if content
    )
    head = f"<h1>{escape(title)}</h1><p class=verdict>{escape(verdict.reason)}</p>"
    write_text(
        path,
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body>{head}{_counts(trials)}{body}</body></html>\n",
    )


def _counts(trials: Sequence[Trial]) -> str:
    if not trials:
        return "<p>No trial has ended yet.</p>"
    counts = Counter(t.status.value for t in trials)
    listed = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    return f"<p>{_many(trials)}: {escape(listed)}.</p>"


def _many(trials: Sequence[Trial]) -> str:
    return "1 trial" if len(trials) == 1 else f"{len(trials)} trials"


def _find(trials: Sequence[Trial], winner: int | None) -> dict[str, Measurement]:
    """Measurements of the baseline and of the winner, as far as there are any."""
    found: dict[str, Measurement] = {}
    for trial in trials:
        is_baseline = trial.purpose is Purpose.BASELINE
        if not is_baseline and (winner is None or trial.number != winner):
            continue
        look = closest_look(trials, trial.configuration)
        if look is not None:
            found["baseline" if is_baseline else f"trial {winner}"] = look
    return found


def _speed_ups(verdict: Verdict) -> str:
    return charts.speed_ups(verdict.intervals, verdict.winner) if verdict.intervals else ""


def _phases(trials: Sequence[Trial], winner: int | None) -> str:
    rows = {label: m for label, m in _find(trials, winner).items() if m.phases_ms}
    return charts.phases(rows) if rows else ""


def _diagnosis(trials: Sequence[Trial], winner: int | None) -> str:
    parts = []
    for label, measurement in _find(trials, winner).items():
        if not measurement.phases_ms:
            continue
        lines = measurement.environment.get("findings") or [str(f) for f in diagnose(measurement)]
        items = "".join(f"<li>{_emphasised(line)}</li>" for line in lines)
        parts.append(f"<h3>{escape(label)}</h3><ul>{items}</ul>")
    return "".join(parts)


def _gains(trials: Sequence[Trial], bound: float | None) -> str:
    """The bounds that were printed before the search, which decided on it."""
    baseline = next((t.measurement for t in trials if t.purpose is Purpose.BASELINE), None)
    found = [] if baseline is None else bounds(baseline)
    if not found:
        return ""
    rows = [(str(b.part), percent(b.gain), b.evidence) for b in found]
    if bound is not None:
        rows.append(("all that is searched", percent(bound), ""))
    cells = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table class=words>{cells}</table>"


def _emphasised(finding: str) -> str:
    name, space, rest = finding.partition(" ")
    return f"<b>{escape(name)}</b>{space}{escape(rest)}"


def _effects(trials: Sequence[Trial], knobs: Sequence[Knob]) -> str:
    names = list(dict.fromkeys(name for t in trials for name in t.configuration))
    when = {knob.name: knob.when for knob in knobs}
    found = knob_effects(trials, names, np.random.default_rng(_SEED), when)
    return charts.effects(found) if found else ""


def _memory(trials: Sequence[Trial], limit_gib: float | None) -> str:
    known = any(t.measurement and t.measurement.peak_allocated_gib for t in trials)
    return charts.memory(trials, limit_gib) if known else ""


def _table(trials: Sequence[Trial], objective: Objective) -> str:
    if not trials:
        return ""
    knobs = list(dict.fromkeys(name for t in trials for name in t.configuration))
    names = ["trial", "purpose", "status", objective.unit, "ms/step", "GiB", *knobs, "reason"]
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    rows = []
    for trial in trials[:_ROWS]:
        found = trial.measurement
        step_ms = found.step_time_s * 1e3 if found and found.step_seconds else None
        cells = [str(trial.number), trial.purpose.value, trial.status.value]
        cells += [_cell(trial.objective), _cell(step_ms)]
        cells.append(_cell(found.peak_allocated_gib if found else None))
        cells += [plain(trial.configuration[k]) if k in trial.configuration else "" for k in knobs]
        cells.append(trial.reason)
        rows.append("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in cells) + "</tr>")
    left_out = len(trials) - len(rows)
    more = f"<p>{left_out} more are in trials.csv.</p>" if left_out else ""
    return (
        f"<details><summary>{_many(trials)}</summary><div class=wide><table>"
        f"<tr>{head}</tr>{''.join(rows)}</table></div>{more}</details>"
    )


def _cell(value: float | None) -> str:
    return "" if value is None else number(value)


_PROGRESS = (
    "Each dot is one reading in a warm process, crosses are trials that failed, the line is the "
    "best reading so far. Single readings flatter the luckiest: only the comparison below counts."
)
_SPEED_UPS = "Measured in fresh processes, interleaved with the baseline. The line at 1 is no gain."
_PHASES = (
    "Means over ranks after a close look, else of the slowest; 'rest' is what no phase covers."
)
_GAINS = (
    "From the baseline's steps before the search: what a part takes, or what a step took less "
    "without it, and two standard errors. It bounds what knobs that touch only this part can give."
)
_EFFECTS = (
    "From an additive model of log speed over the trials in which a knob matters, with intervals "
    "from resampling trials; grey where the interval covers no effect, or one trial gives none. A "
    "search chooses where it looks: these are associations."
)
_MEMORY = "Crosses are trials that ran out of memory."

_COLOURS = (
    "#0072b2 #e69f00 #009e73 #cc79a7 #56b4e9 #d55e00 #8c6d31 #999999".split()  # noqa: SIM905
)
"""Okabe and Ito's palette, told apart also by the colour-blind; yellow is too pale on white."""

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#222;background:#fff;max-width:900px;
margin:2em auto;padding:0 1em}
h1{font-size:1.5em;margin-bottom:.2em}h2{font-size:1.15em;margin:1.8em 0 .4em}h3{font-size:1em}
.verdict{font-size:1.1em;font-weight:600}.caption{color:#666;font-size:.87em;margin:.2em 0}
svg{width:100%;height:auto;max-width:860px}
section svg:not(:only-of-type){max-width:430px}
svg text{font:12px system-ui,sans-serif;fill:#222}svg .tick,svg .note{fill:#666}
svg .tick{font-size:11px}svg .label{font-weight:600}
.grid{stroke:#eee}.axis{stroke:#999}polyline{fill:none;stroke-width:1.5}
.best-line{stroke:#009e73;stroke-width:2}.baseline-line{stroke:#666;stroke-dasharray:5 4}
.limit-line{stroke:#d55e00;stroke-dasharray:5 4}
.trial{fill:#0072b2}.baseline{fill:#222}.sentinel{fill:#999}.winner{fill:#009e73}
.failed{stroke:#d55e00;stroke-width:1.6;fill:none}
.trial-interval{stroke:#0072b2;stroke-width:2}.sentinel-interval{stroke:#999;stroke-width:2}
.winner-interval{stroke:#009e73;stroke-width:3}
table{border-collapse:collapse;font-size:.85em}td,th{padding:.15em .6em;text-align:left;
border-bottom:1px solid #eee;white-space:nowrap}.wide{overflow-x:auto}
.words td{vertical-align:top}.words td:last-child{white-space:normal}
""" + "".join(
    f".c{i}{{fill:{c}}}.line.c{i}{{fill:none;stroke:{c}}}" for i, c in enumerate(_COLOURS)
)
