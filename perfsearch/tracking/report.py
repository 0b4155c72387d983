"""``report.html``: one file, nothing loaded from elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from perfsearch.core.figures import show_value
from perfsearch.core.files import write_text
from perfsearch.core.knob import Knob, same_value
from perfsearch.core.objective import Objective
from perfsearch.core.secrets import Redactor
from perfsearch.core.space import key_of
from perfsearch.core.trial import Measurement, Purpose, Status, Trial
from perfsearch.metrics.bounds import gain_text, profiled_measurement, upper_bounds
from perfsearch.metrics.diagnosis import diagnose
from perfsearch.tracking import pictures
from perfsearch.tracking.canvas import NARROW, WIDE, Canvas, number
from perfsearch.tracking.importance import knob_importance

TEMPLATE = "report.html.jinja"

_ROWS = 1000

_SEED = 0
"""The intervals of the same trials are the same in every report."""

_SAME_MEMORY = 0.05
"""Peaks that differ by a smaller share are the same."""

Drawn = tuple[Canvas, Canvas] | None
"""A picture for a screen and for a telephone."""


def write_report(
    path: Path,
    trials: Sequence[Trial],
    verdict: Verdict,
    objective: Objective,
    *,
    title: str = "perfsearch",
    job: Mapping[str, str] | None = None,
    snippets: Sequence[tuple[str, str]] = (),
    ended_s: Mapping[int, float] | None = None,
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
        job: what was searched, on what and when, by label.
        snippets: how the result is used: what each is, and its text, to be copied.
        ended_s: when each trial ended, by its number.
        system_series: the sampler's raw samples.
        memory_limit_gib: what fits on a device.
        headroom: the most that all searched knobs could gain, relative; ``None`` where unknown.
        knobs: those of the search, which say where each of them matters.

    Raises:
        OSError: it cannot be written.

    """
    winner = verdict.winner
    columns, rows = _table(trials, objective)
    write_page(
        path,
        TEMPLATE,
        title=title,
        verdict=verdict.reason,
        job=job or {},
        best=_best(trials, winner),
        winner=winner,
        snippets=snippets,
        trials=len(trials),
        counts=Counter(t.status.value for t in trials).most_common(),
        progress=_progress(trials, objective, winner),
        speed_ups=drawn(lambda width: pictures.speed_ups(verdict.intervals, winner, width))
        if verdict.intervals
        else None,
        distribution=drawn(lambda width: pictures.distribution(_steps(trials, verdict), width)),
        timeline=drawn(lambda width: pictures.timeline(trials, ended_s or {}, width)),
        phases=_phases(trials, winner),
        findings=_findings(trials, winner),
        upper_bounds=_upper_bounds(trials, headroom),
        importance=_importance(trials, knobs),
        scatters=_scatters(trials, objective, winner),
        memory=_memory(trials, memory_limit_gib),
        system=pictures.system(system_series),
        columns=columns,
        rows=rows,
        left_out=len(trials) - len(rows),
    )


def write_page(path: Path, template: str, **values: Any) -> None:
    """Write a page of a template, everything in it escaped and secrets masked.

    Raises:
        OSError: it cannot be written.

    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    page = environment.get_template(template).render(**values)
    legible = page.encode(errors="backslashreplace").decode()  # paths may be no text
    write_text(path, Redactor().text(legible) + "\n", durable=True)


class Verdict(Protocol):
    """What the confirmation said."""

    @property
    def intervals(self) -> Mapping[int, pictures.Ratio]:
        """Speed-up of each finalist by its trial's number."""

    @property
    def winner(self) -> int | None:
        """Trial whose configuration is handed over; ``None`` for the baseline's."""

    @property
    def reason(self) -> str:
        """One line for people."""


def drawn(draw: Callable[[float], Canvas | None]) -> Drawn:
    """A picture in both widths; ``None`` where there is none in one of them."""
    wide, narrow = draw(WIDE), draw(NARROW)
    return None if wide is None or narrow is None else (wide, narrow)


def _best(trials: Sequence[Trial], winner: int | None) -> list[tuple[str, str, str]]:
    """Each knob whose value differs: its name, its value before, and the one handed over."""
    before = next((t.configuration for t in trials if t.purpose is Purpose.BASELINE), {})
    after = next((t.configuration for t in trials if t.number == winner), before)
    return [
        (name, show_value(before[name]) if name in before else "", show_value(value))
        for name, value in after.items()
        if name not in before or not same_value(before[name], value)
    ]


def _progress(trials: Sequence[Trial], objective: Objective, winner: int | None) -> Drawn:
    """Nothing where there is only the baseline."""
    if sum(t.purpose.is_of_search for t in trials) < 2:
        return None
    return drawn(lambda width: pictures.progress(trials, objective, winner, width))


def _steps(trials: Sequence[Trial], verdict: Verdict) -> dict[str, list[float]]:
    """Step times of the baseline and of the winner, else of the finalist that came nearest.

    Those of the confirmation where there is one, which were measured side by side.
    """
    nearest = max(verdict.intervals, key=lambda n: verdict.intervals[n].ratio, default=None)
    number = nearest if verdict.winner is None else verdict.winner
    baseline = next((t for t in trials if t.purpose is Purpose.BASELINE), None)
    other = next((t for t in trials if t.number == number), None)
    found = {}
    for label, one in (("baseline", baseline), (f"trial {number}", other)):
        if one is None:
            continue
        same = [t for t in trials if key_of(t.configuration) == key_of(one.configuration)]
        confirmed = [t for t in same if t.purpose is Purpose.CONFIRM and t.status is Status.OK]
        measured = [t.measurement for t in confirmed or [one] if t.measurement is not None]
        found[label] = [step for m in measured for step in m.step_seconds]
    return found


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


def _phases(trials: Sequence[Trial], winner: int | None) -> Drawn:
    rows = {label: m for label, m in _find(trials, winner).items() if m.phases_ms}
    return drawn(lambda width: pictures.phases(rows, width)) if rows else None


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


def _importance(trials: Sequence[Trial], knobs: Sequence[Knob]) -> Drawn:
    when = {knob.name: knob.when for knob in knobs}
    generator = np.random.default_rng(_SEED)
    found = knob_importance(trials, _knob_names(trials), generator, when)
    return drawn(lambda width: pictures.importance(found, width)) if found else None


def _scatters(trials: Sequence[Trial], objective: Objective, winner: int | None) -> list[Canvas]:
    drawn = [pictures.scatter(n, trials, objective, winner) for n in _knob_names(trials)]
    return [canvas for canvas in drawn if canvas is not None]


def _memory(trials: Sequence[Trial], limit_gib: float | None) -> Drawn:
    """Nothing where no trial differs and none came near the limit."""
    peaks = [t.measurement.peak_allocated_gib for t in trials if t.measurement]
    known = [peak for peak in peaks if peak]
    if not known:
        return None
    same = max(known) - min(known) < _SAME_MEMORY * max(known)
    roomy = max(known) < (limit_gib or float("inf")) / 2
    if same and roomy and not any(t.status is Status.OOM for t in trials):
        return None
    return drawn(lambda width: pictures.memory(trials, limit_gib, width))


def _knob_names(trials: Sequence[Trial]) -> list[str]:
    return list(dict.fromkeys(name for t in trials for name in t.configuration))


def _table(trials: Sequence[Trial], objective: Objective) -> tuple[list[str], list[list[str]]]:
    """Names of the columns, and a row for each of the first trials."""
    knobs = _knob_names(trials)
    unit = pictures.unit(trials, objective)
    columns = ["trial", "purpose", "status", unit, "ms/step", "GiB", *knobs, "reason"]
    rows = []
    for trial in trials[:_ROWS]:
        found = trial.measurement
        step_ms = found.step_time_s * 1e3 if found and found.step_seconds else None
        cells = [str(trial.number), trial.purpose.value, trial.status.value]
        cells += [_cell(trial.objective), _cell(step_ms)]
        cells.append(_cell(found.peak_allocated_gib if found else None))
        cells += [
            show_value(trial.configuration[k]) if k in trial.configuration else "" for k in knobs
        ]
        rows.append([*cells, trial.reason])
    return columns, rows


def _cell(value: float | None) -> str:
    return "" if value is None else number(value)
