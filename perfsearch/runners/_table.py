"""A table of measured configurations: rows of a CSV file as knobs, values and step times."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from perfsearch.core.knob import Kind, Knob, Value
from perfsearch.core.space import key_of
from perfsearch.core.suggest import nearest
from perfsearch.core.trial import Status
from perfsearch.runners._table_row import Row, read_rows

OUTCOME_COLUMNS = frozenset(
    {
        "status",
        "purpose",
        "trial",
        "objective",
        "samples_per_s",
        "step_ms",
        "first_losses",
        "trial_seconds",
        "rewrap_ms",
        "reason",
        "world_size",
    }
)
"""Columns that are never knobs; beside them every column that starts with ``peak_``."""

_LIBRARY_DEFAULTS: Mapping[str, float] = {"bucket_cap_mb": 25, "prefetch_factor": 2}
"""Defaults that are neither the smallest value nor ``False``."""


@dataclass
class Entry:
    """All that was recorded of one configuration, repeats pooled.

    Attributes:
        configuration: the knobs' values.
        status: how most of its visits ended; ``ok`` on a tie.
        visits: raw step times, a list for each visit that ended like that.
        samples_per_step: the global batch, ``None`` where the table does not tell.
        world_size: number of ranks.
        peak_allocated_gib: largest over the visits.
        peak_reserved_gib: largest over the visits.
        first_losses: of the first visit that has them.
        rewrap_seconds: median over the visits.
        trial_seconds: median over the visits, ``None`` where the table does not tell.
        reason: of the first failed visit.
        is_baseline: whether the table says that this was a search's baseline.

    """

    configuration: dict[str, Value]
    status: Status
    visits: list[list[float]] = field(default_factory=list)
    samples_per_step: int | None = None
    world_size: int = 1
    peak_allocated_gib: float | None = None
    peak_reserved_gib: float | None = None
    first_losses: list[float] = field(default_factory=list)
    rewrap_seconds: float = 0.0
    trial_seconds: float | None = None
    reason: str = ""
    is_baseline: bool = False

    @property
    def true_step_seconds(self) -> float | None:
        """Median over the visits of their median steps; ``None`` where nothing was timed."""
        medians = [statistics.median(steps) for steps in self.visits]
        return statistics.median(medians) if medians else None


@dataclass(frozen=True)
class Table:
    """The columns that vary as knobs (defaults not yet set), and an entry a configuration."""

    knobs: tuple[Knob, ...]
    entries: tuple[Entry, ...]
    digest: str


def read_table(path: Path) -> Table:
    """Read a table of measurements, or the ``trials.csv`` of an earlier search.

    Raises:
        ValueError: there is no such file, or its contents are not such a table.

    """
    text, columns, every_row = read_rows(path)
    if not {"step_ms", "samples_per_s"} & set(columns):
        raise ValueError(
            f"runner.table={path}: it has neither a column step_ms nor samples_per_s; "
            f"its columns are {', '.join(columns) or 'none'}."
        )
    rows = [row for row in every_row if row.status not in _SAY_NOTHING]
    names = [c for c in columns if c not in OUTCOME_COLUMNS and not c.startswith("peak_")]
    values = {name: [row.value(name) for row in rows] for name in names}
    knobs = tuple(
        _knob(name, column)
        for name, column in values.items()
        if len({key_of({"": v}) for v in column}) > 1
    )
    if not knobs:
        raise ValueError(
            f"runner.table={path}: no column apart from the outcomes varies over its "
            f"{len(rows)} rows, so there is nothing to search."
        )
    groups: dict[str, list[int]] = {}
    points: list[dict[str, Value]] = []
    for number in range(len(rows)):
        point = {knob.name: values[knob.name][number] for knob in knobs}
        groups.setdefault(key_of(point), []).append(number)
        points.append(point)
    entries = tuple(_pool(points[g[0]], [rows[i] for i in g]) for g in groups.values())
    return Table(knobs, entries, hashlib.sha256(text.encode()).hexdigest()[:16])


def default_baseline(table: Table) -> Entry:
    """The entry that a user would have today.

    It is the one marked ``purpose=baseline``; else the ``ok`` entry nearest to the libraries'
    defaults: 25 MiB buckets, a prefetch factor of 2, booleans off, ``null`` where a knob has it,
    otherwise the smallest number (NCCL's settings, ZeRO stage, micro-batch, accumulation) or the
    first name in the table. Distance is summed over the knobs, each on a scale from 0 to 1.

    Raises:
        ValueError: no entry succeeded.

    """
    good = [entry for entry in table.entries if entry.status is Status.OK]
    if not good:
        raise ValueError("runner.table: no row has status ok, so nothing can be the baseline.")
    marked = [entry for entry in good if entry.is_baseline]
    if marked:
        return marked[0]

    def distance(entry: Entry) -> float:
        total = 0.0
        for knob in table.knobs:
            value, target = entry.configuration[knob.name], _library_default(knob)
            if knob.is_ordered:
                total += abs(knob.unit_position(value) - knob.unit_position(target))
            else:
                total += value != target
        return total

    return min(good, key=distance)


def find_entry(table: Table, wanted: Mapping[str, Value]) -> Entry:
    """The entry of ``runner.baseline`` as the user wrote it.

    Raises:
        ValueError: a knob is missing or unknown, there is no such row, or it failed.

    """
    names = [knob.name for knob in table.knobs]
    for name in wanted:
        if name not in names:
            raise ValueError(f"runner.baseline.{name}: no such knob. {nearest(name, names)}")
    for knob in table.knobs:
        if knob.name not in wanted:
            raise ValueError(f"runner.baseline: {knob.name} is missing; name every knob.")
        if not knob.contains(wanted[knob.name]):
            allowed = ", ".join(str(v) for v in knob.values)
            raise ValueError(
                f"runner.baseline.{knob.name}={wanted[knob.name]}: not in the table. "
                f"Allowed: {allowed}."
            )
    for entry in table.entries:
        if key_of(entry.configuration) == key_of(wanted):
            if entry.status is not Status.OK:
                raise ValueError(
                    f"runner.baseline={dict(wanted)}: its row has status {entry.status}; "
                    "the baseline must be a row with status ok."
                )
            return entry
    raise ValueError(f"runner.baseline={dict(wanted)}: the table has no such row.")


_SAY_NOTHING = (Status.INFRASTRUCTURE, Status.INTERRUPTED)


def _knob(name: str, column: Sequence[Value]) -> Knob:
    distinct = list({key_of({"": v}): v for v in column}.values())
    if all(isinstance(v, bool) for v in distinct):
        return Knob(name, Kind.BOOLEAN, default=False, values=(False, True))
    numbers = [v for v in distinct if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < len(distinct):
        others = [v for v in distinct if v not in numbers]
        values = (*others, *sorted(numbers))
        return Knob(name, Kind.CATEGORICAL, default=values[0], values=values)
    kind = Kind.ORDINAL if len(numbers) >= 3 else Kind.CATEGORICAL
    return Knob(name, kind, default=min(numbers), values=tuple(sorted(numbers)))


def _library_default(knob: Knob) -> Value:
    if knob.kind is Kind.BOOLEAN:
        return False
    if None in knob.values:
        return None
    numbers = [v for v in knob.values if isinstance(v, int | float)]
    if len(numbers) < len(knob.values):
        return knob.values[0]
    target = _LIBRARY_DEFAULTS.get(knob.name)
    if target is None or min(numbers) <= 0:
        return min(numbers)
    return min(numbers, key=lambda v: abs(math.log(v / target)))


def _pool(point: dict[str, Value], rows: Sequence[Row]) -> Entry:
    statuses = [row.status for row in rows]
    status = max(statuses, key=lambda s: (statuses.count(s), s is Status.OK, s is Status.PRUNED))
    entry = Entry(dict(point), status)
    kept = [row for row, its in zip(rows, statuses, strict=True) if its is status]
    entry.reason = next((reason for row in kept if (reason := row.text("reason"))), "")
    entry.is_baseline = any(row.text("purpose") == "baseline" for row in kept)
    sizes = [size for row in kept for size in row.positive("world_size")]
    entry.world_size = int(sizes[0]) if sizes else 1
    entry.peak_allocated_gib = max(_of(kept, "peak_allocated_gib"), default=None)
    entry.peak_reserved_gib = max(_of(kept, "peak_reserved_gib"), default=None)
    losses = [row.numbers("first_losses") for row in kept]
    entry.first_losses = next((values for values in losses if values), [])
    if seconds := _of(kept, "trial_seconds"):
        entry.trial_seconds = statistics.median(seconds)
    if rewraps := _of(kept, "rewrap_ms"):
        entry.rewrap_seconds = statistics.median(rewraps) / 1e3
    if status not in (Status.OK, Status.PRUNED):
        return entry
    times_ms = [row.positive("step_ms") for row in kept]
    entry.visits = [[ms / 1e3 for ms in times] for times in times_ms if times]
    rates = [rate for row in kept for rate in row.positive("samples_per_s")]
    if not entry.visits and not rates:
        raise kept[0].refusal("step_ms", f"A row with status {status} needs it, or samples_per_s.")
    if not entry.visits:  # a rate alone: serve a step of one sample
        entry.visits, entry.samples_per_step = [[1.0 / rate] for rate in rates], 1
    elif rates:
        first_s = [ms / 1e3 for ms in times_ms[0]] or entry.visits[0]
        entry.samples_per_step = max(1, round(rates[0] * statistics.median(first_s)))
    return entry


def _of(rows: Sequence[Row], column: str) -> list[float]:
    return [number for row in rows for number in row.numbers(column)]
