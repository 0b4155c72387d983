"""Serve recorded measurements, so that strategies can be tried without hardware."""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import math
import stat
import statistics
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from perfsearch.config.options import build_options
from perfsearch.core.errors import FORMULAS, BadInputError, nearest, printable
from perfsearch.core.hardware import Environment
from perfsearch.core.hints import Hints, Prediction
from perfsearch.core.knob import Configuration, Kind, Knob, Value
from perfsearch.core.objective import REWARDS_LESS, Metric
from perfsearch.core.option import option
from perfsearch.core.space import Space, key_of
from perfsearch.core.steps import Statistic, read_window, step_time_s, whole_periods
from perfsearch.core.trial import Measurement, Outcome, Status, Trial
from perfsearch.knobs import effect_order
from perfsearch.knobs.base import Use
from perfsearch.knobs.batch import ACCUMULATION, MICRO_BATCH, Batch
from perfsearch.knobs.ddp import BUCKET_CAP
from perfsearch.knobs.fsdp import STAGE
from perfsearch.knobs.loader import PREFETCH
from perfsearch.knobs.starts import starts
from perfsearch.metrics.memory import MemoryFacts
from perfsearch.runners.base import MeasuresBeside, NoKnobs, Plan, Runner, environment_of
from perfsearch.runners.deepspeed import config
from perfsearch.runners.zero.memory import FACTS_FILE, HEADROOM, Memory
from perfsearch.training.clock import USABLE, State, StepWindow, WindowRule

if TYPE_CHECKING:
    from perfsearch.config.schema import Settings

_LEAST_STEP_SHARE = 0.05
"""A step drawn with inflated noise takes at least this share of the median."""


class Replay(Runner, MeasuresBeside, NoKnobs):
    """Serves the rows of a table; what a trial sees depends on the seed, the trial's number, its
    attempt and its configuration, and on nothing else.

    Step times are drawn with replacement from those recorded for the configuration; where it was
    visited several times, from those of one visit, drawn for the trial. Recorded steps of which
    some are slow are served in their order, round and round from a place that is drawn.

    Where more than half of the table's knobs, and at least two, are those of ``runner=ddp``,
    ``zero`` or ``deepspeed``, a strategy is told of them what that runner would tell, and nothing
    of the table's outcomes: the order of their expected effects, with ``ddp``'s what somebody who
    knows the field would try first, and with ``zero``'s the predicted peak of memory, provided
    that ``runner.model_facts`` is there.

    Args:
        options: the table and how to serve it.
        environment: its seed is the noise's.
        keeps_batch: whether only rows with the baseline's global batch are served, where the
            table tells it.

    Raises:
        ValueError: the table or the baseline cannot be used; the message names the key.

    """

    @dataclass(frozen=True)
    class Options(Runner.Options):
        """Options of ``runner=replay``, as keys ``runner.*``.

        Attributes:
            table: a CSV file with a row a visit of a configuration; ``trials.csv`` of a prior
                search is one. Columns are described in ``perfsearch.runners.replay``.
            baseline: the configuration to start from, all knobs named; ``None`` takes the row
                nearest to the libraries' defaults.
            batch: ``free`` serves every row; ``fixed`` those with the baseline's global batch;
                ``null``: as ``batch`` says, where the table tells batches.
            noise: factor on the spread of the recorded step times; 0 serves their mean.
            process_noise: relative standard deviation of a factor that all steps of a trial share,
                as between two starts of the same job.
            model_facts: the ``model_facts.json`` that a search of ``runner=zero`` left, so that
                peaks of memory can be predicted as that runner does; ``null``: the one beside the
                table, where there is one.
            device_memory_gib: memory of the devices that were measured; ``null``: not known.
            real_time: factor on the time that a trial took when it was recorded, which it then
                really takes: its ``trial_seconds``, or its steps where the table has none. 0 does
                not wait.

        """

        table: str
        baseline: Mapping[str, Value] | None = None
        batch: str | None = None
        noise: float = 1.0
        process_noise: float = 0.0
        model_facts: str | None = None
        device_memory_gib: float | None = option(None, above=0)
        real_time: float = option(0.0, low=0)

        def __post_init__(self) -> None:
            if not self.table:
                raise ValueError(f"runner.table: {_EXPECTED}")
            if self.batch not in (None, "fixed", "free"):
                raise ValueError(f"runner.batch={self.batch}: allowed: fixed, free.")
            for key in ("noise", "process_noise"):
                value = getattr(self, key)
                if not (math.isfinite(value) and 0 <= value <= 100):
                    raise ValueError(f"runner.{key}={value}: allowed is 0 to 100.")

    trains = False
    shares_host = False
    no_knobs = (
        "runner=replay takes its knobs from the table, so none can be pinned here. To narrow the "
        "search, leave rows out of the table."
    )

    @classmethod
    def build(cls, settings: Settings) -> Self:
        """Build it from ``runner.*`` and ``seed``."""
        if "knobs" in settings.runner.options:
            raise BadInputError(f"runner.knobs: {cls.no_knobs}")
        if settings.objective.metric is Metric.FLOPS:
            raise BadInputError(
                "objective.metric=flops: a table does not count operations. "
                "Allowed with runner=replay: throughput, latency."
            )
        options = build_options(cls.Options, settings.runner.options, "runner")
        keeps = options.batch is None and settings.batch == "fixed"
        made = cls(options, environment_of(settings), keeps)
        if made.batches > 1 and settings.objective.metric is Metric.LATENCY:
            raise BadInputError(REWARDS_LESS.replace("batch=free", "rows of several batches"))
        if made.batches > 1 and settings.batch == "fixed":
            raise BadInputError(
                f"runner.batch=free: rows of {made.batches} batches would be compared as one "
                "computation. Set batch=free too, or leave runner.batch out for the baseline's"
            )
        return made

    def __init__(
        self, options: Options, environment: Environment, keeps_batch: bool = False
    ) -> None:
        super().__init__(options, environment)
        table = read_table(Path(options.table))
        if options.baseline is None:
            start = default_baseline(table)
        else:
            start = find_entry(table, options.baseline)
        entries = list(table.entries)
        told = start.samples_per_step is not None
        if options.batch == "fixed" or (keeps_batch and told):
            entries = _of_same_batch(entries, start)
        knobs = [replace(knob, default=start.configuration[knob.name]) for knob in table.knobs]
        self.space = Space(knobs, points=[entry.configuration for entry in entries])
        self.baseline = self.space.canonical(start.configuration)
        self.devices = start.world_size
        self._entries = {key_of(entry.configuration): entry for entry in entries}
        self._digest = table.digest
        self._batch = options.batch or ("fixed" if keeps_batch and told else "free")
        self.batches = len({e.samples_per_step for e in entries if e.samples_per_step is not None})
        self.lanes = environment.parallel_trials
        self._ended = threading.Event()
        self._memory: Memory | None = None
        beside = Path(options.table).parent / FACTS_FILE
        if options.model_facts is not None or beside.is_file():
            self._memory = memory_of(
                Path(options.model_facts or beside),
                self.space.by_name,
                start.samples_per_step,
                start.world_size,
                options.device_memory_gib,
            )

    def identity(self) -> dict[str, str]:
        """The table's content and how noise is added to it."""
        return {
            "table": self._digest,
            "batch": self._batch,
            "noise": f"{self.options.noise:g}",
            "process_noise": f"{self.options.process_noise:g}",
        }

    def hints(self, trials: Sequence[Trial]) -> Hints:
        """What the runner of the table's knobs would tell; nothing of the table's outcomes."""
        return known_hints(self.space.by_name, self.baseline, self._memory, trials)

    def settings_of(self, configuration: Configuration) -> dict[str, Any]:
        """The table's row that is served as the baseline."""
        return {"baseline": dict(configuration)}

    def measure(self, configuration: Configuration, plan: Plan) -> Outcome:
        """Draw step times for ``configuration``, or serve the failure that was recorded."""
        entry = self._entries.get(key_of(self.space.canonical(configuration)))
        if entry is None:
            return Outcome(Status.INVALID, reason="the table has no such row")
        extra = {} if entry.trial_seconds is None else {"trial_seconds": entry.trial_seconds}
        outcome = self._served(entry, plan, extra)
        if self.options.real_time:
            seconds = entry.trial_seconds
            if seconds is None:
                seconds = sum(outcome.measurement.step_seconds) if outcome.measurement else 0.0
            self._ended.wait(self.options.real_time * seconds)
        return outcome

    def break_off(self) -> None:
        """Wait for nothing any more."""
        self._ended.set()

    def _served(self, entry: Entry, plan: Plan, extra: dict[str, Any]) -> Outcome:
        if entry.status not in (Status.OK, Status.PRUNED):
            reason = entry.reason or f"recorded as {entry.status} in {self.options.table}"
            return Outcome(entry.status, reason=reason, extra=extra)
        window, cut = self._window(entry, plan)
        measurement = Measurement(
            **window.result(),
            samples_per_step=entry.samples_per_step or 1,
            world_size=entry.world_size,
            rewrap_seconds=entry.rewrap_seconds,
            peak_allocated_gib=entry.peak_allocated_gib,
            peak_reserved_gib=entry.peak_reserved_gib,
            first_losses=list(entry.first_losses),
            in_force=dict(entry.configuration),
        )
        if cut or entry.status is Status.PRUNED:
            reason = entry.reason or f"slower than {plan.stop_above_cost_s} s a step"
            return Outcome(Status.PRUNED, measurement, reason, extra=extra)
        return Outcome(Status.OK, measurement, extra=extra)

    def export(self, configuration: Configuration, directory: Path) -> list[Path]:
        """Write nothing: what the knobs of a table stand for is not known."""
        return []

    def true_step_seconds(self, configuration: Configuration) -> float | None:
        """Recorded step time without noise, for benchmarks; ``None`` for a failure."""
        return self._entries[key_of(self.space.canonical(configuration))].true_step_seconds

    def _window(self, entry: Entry, plan: Plan) -> tuple[StepWindow, bool]:
        """The window of a trial, and whether it was cut short as steps are too slow."""
        rule = WindowRule(
            plan.scored_steps,
            plan.scored_seconds,
            warmup_steps=(0, 0),
            look_steps=plan.look_steps,
            look_seconds=plan.look_seconds,
            limit_s=USABLE * plan.time_limit_s,
        )
        window = StepWindow(rule)
        drawn = self._steps(entry, plan)
        fewest, most = plan.scored_steps
        steps: list[float] = []
        cut = False
        while len(steps) < fewest or (len(steps) < most and sum(steps) < plan.scored_seconds):
            steps.append(next(drawn))
            cut = _surely_above(steps, plan.stop_above_cost_s)
            if cut:
                break
        window.score(steps)
        while window.state is State.SCORED and not cut:
            window.score([next(drawn) for _ in range(window.count)])
        return window, cut

    def _steps(self, entry: Entry, plan: Plan) -> Iterator[float]:
        """Step times of a trial, without end."""
        words = (
            f"{self.environment.seed}|{plan.number}|{plan.attempt}|{key_of(entry.configuration)}"
        )
        digest = hashlib.blake2b(words.encode(), digest_size=16).digest()
        generator = np.random.default_rng(int.from_bytes(digest, "big"))
        middle = entry.true_step_seconds
        assert middle is not None
        recorded = entry.visits[0]
        if len(entry.visits) > 1:
            recorded = entry.visits[int(generator.integers(len(entry.visits)))]
        factor = math.exp(self.options.process_noise * float(generator.standard_normal()))
        for seconds in _served(recorded, generator):
            spread = middle + self.options.noise * (seconds - middle)
            yield factor * max(spread, min(seconds, _LEAST_STEP_SHARE * middle))


def _served(recorded: Sequence[float], generator: np.random.Generator) -> Iterator[float]:
    """Recorded steps without end: any of them where they are alike, else in their order."""
    if _is_uneven(recorded):
        begin = int(generator.integers(len(recorded)))
        yield from itertools.cycle([*recorded[begin:], *recorded[:begin]])
    while True:
        yield recorded[int(generator.integers(len(recorded)))]


def _is_uneven(recorded: Sequence[float]) -> bool:
    return bool(read_window(recorded).slow)


def _surely_above(steps: Sequence[float], limit_s: float | None) -> bool:
    """Whether a step takes longer than the limit by three standard errors, after four steps."""
    if limit_s is None or len(steps) < 4:
        return False
    found = read_window(steps)
    return found.step_s * (1 - 3 * (found.log_error or 0.0)) > limit_s


def _of_same_batch(entries: Sequence[Entry], start: Entry) -> list[Entry]:
    """Entries with the global batch of ``start``.

    A failure has no measured batch: it is kept where all that were measured have the same, or where
    micro-batch times accumulation times ranks gives it, provided that this holds for every entry
    that has one.
    """
    wanted = start.samples_per_step
    if wanted is None:
        raise ValueError("runner.batch=fixed: the table does not tell the baseline's global batch.")
    measured = [e for e in entries if e.samples_per_step is not None]
    if {e.samples_per_step for e in measured} == {wanted}:
        return list(entries)
    lawful = all(_nominal_batch(e, start) == e.samples_per_step for e in measured)
    kept = []
    for entry in entries:
        batch = entry.samples_per_step
        if batch is None and lawful:
            batch = _nominal_batch(entry, start)
        if batch == wanted:
            kept.append(entry)
    return kept


def _nominal_batch(entry: Entry, start: Entry) -> int | None:
    values = [entry.configuration.get(k, 1) for k in (MICRO_BATCH.name, ACCUMULATION.name)]
    if not all(isinstance(v, int) for v in values) or MICRO_BATCH.name not in entry.configuration:
        return None
    return int(values[0] or 1) * int(values[1] or 1) * start.world_size


# -----------------------------------------------------------------------------
# What the runner that searches knobs of these names would tell a strategy about them.
#
# A table of measurements has no runner any more, but its knobs have the names of one, so what
# that runner knows without a trial (what to try first, which knobs matter most, what fits) holds
# for them too.

_ORDERS: Mapping[str, tuple[str, ...]] = {
    "ddp": effect_order(Use.DDP),
    "zero": effect_order(Use.ZERO),
    "deepspeed": config.EFFECT_ORDER,
}
"""Runners by name, with their knobs in the order of expected effect; the first of equals wins."""


def owning_runner(names: Sequence[str]) -> str | None:
    """The runner that knows most of the knobs, at least two and more than half of them."""
    known = {runner: sum(n in order for n in names) for runner, order in _ORDERS.items()}
    runner = max(known, key=lambda name: known[name])
    return runner if known[runner] >= 2 and 2 * known[runner] > len(names) else None


def known_hints(
    knobs: Mapping[str, Knob],
    baseline: Mapping[str, Value],
    memory: Memory | None,
    trials: Sequence[Trial],
) -> Hints:
    """Hints for knobs of known names.

    Args:
        knobs: that are searched, by name.
        baseline: trial 0.
        memory: predicts peaks; ``None`` where the job's tensors are not known.
        trials: so far; predictions use them, also those that are added later.

    """
    runner = owning_runner(list(knobs))
    order = _ORDERS.get(runner or "", ())
    ordered = {name for name, knob in knobs.items() if knob.is_ordered}
    found = Hints(
        baseline=dict(baseline),
        effect_order=tuple(name for name in order if name in knobs),
        starts=tuple(starts(knobs, baseline)) if runner == "ddp" else (),
        monotonic={MICRO_BATCH.name: 1} if MICRO_BATCH.name in ordered else {},
        stage_knob=STAGE.name if STAGE.name in knobs else None,
    )
    if memory is None:
        return found

    def predict(configuration: Configuration) -> Prediction:
        return memory.predict(configuration, trials)

    return replace(found, memory_limit_gib=memory.limit_gib, predict=predict)


def memory_of(
    facts: Path,
    knobs: Mapping[str, Knob],
    global_batch: int | None,
    world_size: int,
    capacity_gib: float | None,
) -> Memory | None:
    """The memory model of a table of ``runner=zero``; ``None`` where its knobs do not allow one.

    Args:
        facts: ``model_facts.json`` of a search.
        knobs: that are searched, by name.
        global_batch: of the baseline.
        world_size: ranks.
        capacity_gib: of a device.

    Raises:
        ValueError: the file cannot be read; the message names the key.

    """
    given = RecordedFacts(facts)
    if (
        owning_runner(list(knobs)) != "zero"
        or MICRO_BATCH.name not in knobs
        or global_batch is None
    ):
        return None
    micro_batches = [int(v or 1) for v in knobs[MICRO_BATCH.name].choices() or ()]
    free = ACCUMULATION.name in knobs
    if not free and any(global_batch % (m * world_size) for m in micro_batches):
        return None
    batch = Batch("free" if free else "fixed", global_batch, world_size, micro_batches[0])
    return Memory(
        given, batch, {}, capacity_gib, on_gpu=capacity_gib is not None, headroom=HEADROOM
    )


class RecordedFacts:
    """Facts of a job's tensors that a prior search left, read at once."""

    error = ""

    def __init__(self, file: Path) -> None:
        try:
            self._facts = MemoryFacts.from_json(json.loads(file.read_text())["facts"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"runner.model_facts={file}: it cannot be used ({error}). Name the "
                "model_facts.json that runner=zero left beside its journal, or null."
            ) from error

    def get(self) -> MemoryFacts | None:
        """The facts."""
        return self._facts


# -----------------------------------------------------------------------------
# A table of measured configurations: rows of a CSV file as knobs, values and step times.

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

_LIBRARY_DEFAULTS: Mapping[str, float] = {
    BUCKET_CAP.name: 25,
    PREFETCH.name: 2,
}
"""Defaults that are neither the smallest value nor ``False``."""


@dataclass
class Entry:
    """All that was recorded of one configuration, repeats pooled.

    Attributes:
        configuration: the knobs' values.
        status: how most of its visits ended; ``ok`` on a tie.
        visits: raw step times, a list for each visit that ended like that; of uneven steps whole
            periods.
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
        """Median over the visits of the mean step; ``None`` where nothing was timed."""
        times = [statistics.fmean(steps) for steps in self.visits]
        return statistics.median(times) if times else None


@dataclass(frozen=True)
class Table:
    """The columns that vary as knobs (defaults not yet set), and an entry a configuration."""

    path: Path
    knobs: tuple[Knob, ...]
    entries: tuple[Entry, ...]
    digest: str


def read_table(path: Path) -> Table:
    """Read a table of measurements, or the ``trials.csv`` of a prior search.

    Raises:
        ValueError: there is no such file, or its contents are not such a table.

    """
    text, columns, every_row = read_rows(path)
    if not {"step_ms", "samples_per_s"} & set(columns):
        raise ValueError(
            f"runner.table={path}: it has neither a column step_ms nor samples_per_s; "
            f"its columns are {', '.join(columns) or 'none'}. {_EXPECTED}"
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
            f"{len(rows)} rows, so there is nothing to search. Allowed: columns of settings, with "
            "two values or more in one of them."
        )
    groups: dict[str, list[int]] = {}
    points: list[dict[str, Value]] = []
    for number in range(len(rows)):
        point = {knob.name: values[knob.name][number] for knob in knobs}
        groups.setdefault(key_of(point), []).append(number)
        points.append(point)
    entries = tuple(_pool(points[g[0]], [rows[i] for i in g]) for g in groups.values())
    return Table(path, knobs, entries, hashlib.sha256(text.encode()).hexdigest()[:16])


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
        seen = ", ".join(sorted({entry.status for entry in table.entries})) or "none"
        raise ValueError(
            f"runner.table={table.path}: no row has status ok, so nothing can be the baseline; its "
            f"statuses are {seen}. Allowed: a table with a row that was measured and has status ok."
        )
    marked = [entry for entry in good if entry.is_baseline]
    if marked:
        return marked[0]

    targets = [(knob, _library_default(knob)) for knob in table.knobs]

    def distance(entry: Entry) -> float:
        total = 0.0
        for knob, target in targets:
            value = entry.configuration[knob.name]
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
        others = [v for v in distinct if isinstance(v, bool) or not isinstance(v, int | float)]
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
    entry.visits = [whole_periods([ms / 1e3 for ms in times]) for times in times_ms if times]
    rates = [rate for row in kept for rate in row.positive("samples_per_s")]
    if not entry.visits and not rates:
        raise kept[0].refusal("step_ms", f"A row with status {status} needs it, or samples_per_s.")
    if not entry.visits:  # a rate alone: serve a step of one sample
        entry.visits, entry.samples_per_step = [[1.0 / rate] for rate in rates], 1
    elif rates:
        first_s = [ms / 1e3 for ms in times_ms[0]] or entry.visits[0]
        entry.samples_per_step = _batch(rates[0], first_s)
    return entry


def _batch(samples_per_s: float, seconds: Sequence[float]) -> int:
    """Samples of a step, from a table's rate, which may be that of the mean or the median step."""
    mean_s = statistics.fmean(seconds)
    for step_s in (*(step_time_s(seconds, statistic) for statistic in Statistic), mean_s):
        size = samples_per_s * step_s
        if round(size) >= 1 and abs(size / round(size) - 1) < _WHOLE:
            return round(size)
    return max(1, round(samples_per_s * mean_s))


_WHOLE = 1e-3
"""How far from a whole number the samples of a step may be, as tables are rounded."""


def _of(rows: Sequence[Row], column: str) -> list[float]:
    return [number for row in rows for number in row.amounts(column)]


# -----------------------------------------------------------------------------
# A row of a table of measurements: its cells as values, and errors that say where they stand.

_EXPECTED = "Name a CSV file of measured configurations, such as a search's trials.csv."


_LEAST, _MOST = 1e-9, 1e15
"""Milliseconds, rates and sizes outside of these are none that were measured."""

_LARGEST_TABLE = 256 * 2**20
"""Bytes; reading takes several times as much memory."""


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        path: the table's file.
        number: of its line, as editors and spreadsheets count: the header is 1.
        cells: text by column; ``None`` where the row is too short.

    """

    path: Path
    number: int
    cells: Mapping[str, str | None]

    def text(self, column: str) -> str:
        """A cell's text; empty where there is none."""
        text = (self.cells.get(column) or "").strip()
        return text[1:] if text[:1] == "'" and text[1:2] in FORMULAS else text

    @property
    def status(self) -> Status:
        """How the visit ended; ``ok`` where the row does not tell.

        Raises:
            ValueError: there is no such status.

        """
        word = self.text("status") or str(Status.OK)
        try:
            return Status(word)
        except ValueError as error:
            raise self.refusal("status", nearest(word, Status)) from error

    def value(self, column: str) -> Value:
        """A knob's value: null, a truth value, a number, or a word."""
        word = self.text(column)
        if word.lower() in ("", "none", "null"):
            return None
        if word.lower() in ("true", "false"):
            return word.lower() == "true"
        for kind in (int, float):
            try:
                number = kind(word)
            except ValueError:
                continue
            if -_MOST <= number <= _MOST:  # any other, and what is no number, is a word
                return number
        return word

    def numbers(self, column: str) -> list[float]:
        """Numbers apart by blanks.

        Raises:
            ValueError: something else is among them.

        """
        try:
            return [float(word) for word in self.text(column).split()]
        except ValueError as error:
            raise self.refusal(column, "A number is needed, or several apart by blanks.") from error

    def positive(self, column: str) -> list[float]:
        """The same, where nothing else than positive numbers makes sense.

        Raises:
            ValueError: one of them is zero, negative, no number, or beyond what can be computed
                with.

        """
        found = self.numbers(column)
        if not all(_LEAST <= number <= _MOST for number in found):
            raise self.refusal(
                column, f"It is not positive, or not finite: {_LEAST:g} to {_MOST:g} is allowed."
            )
        return found

    def amounts(self, column: str) -> list[float]:
        """The same, where 0 makes sense too.

        Raises:
            ValueError: one of them is negative, no number, or beyond what can be computed with.

        """
        found = self.numbers(column)
        if not all(0 <= number <= _MOST for number in found):
            raise self.refusal(column, f"0 to {_MOST:g} is allowed.")
        return found

    def refusal(self, column: str, reason: str) -> ValueError:
        """The error for a cell that cannot be used."""
        shown = self.text(column)
        shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
        where = f"runner.table={self.path}, row {self.number}, column {column}"
        return ValueError(f"{where}: {shown!r}. {reason}")


def read_rows(path: Path) -> tuple[str, list[str], Iterator[Row]]:
    """The text of a CSV file, its columns, and its rows in order.

    Raises:
        ValueError: it cannot be read, or is no CSV file; also while rows are taken.

    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"runner.table={path}: it is no regular file. {_EXPECTED}")
        if found.st_size > _LARGEST_TABLE:
            raise ValueError(
                f"runner.table={path}: it has {found.st_size / 2**20:.0f} MiB, and a table may "
                f"have {_LARGEST_TABLE / 2**20:.0f}. Leave rows or recorded steps out."
            )
        text = printable(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"runner.table={path}: it cannot be read ({error.strerror}). {_EXPECTED}"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"runner.table={path}: it is no text in UTF-8 (byte {error.start}). {_EXPECTED}"
        ) from error
    reader = csv.DictReader(text.splitlines())
    return text, _columns(reader, path), _rows(reader, path)


def _columns(reader: csv.DictReader[str], path: Path) -> list[str]:
    try:
        return list(reader.fieldnames or ())
    except csv.Error as error:
        raise ValueError(f"runner.table={path}: {error}. {_EXPECTED}") from error


def _rows(reader: csv.DictReader[str], path: Path) -> Iterator[Row]:
    try:
        for cells in reader:
            yield Row(path, reader.line_num, cells)
    except csv.Error as error:
        place = f"runner.table={path}, row {reader.line_num}"
        raise ValueError(f"{place}: {error}. {_EXPECTED}") from error
