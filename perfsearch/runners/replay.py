"""Serve recorded measurements, so that strategies can be tried without hardware."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from perfsearch.config_options import build_options, option
from perfsearch.core.errors import BadInputError
from perfsearch.core.hints import Hints
from perfsearch.core.knob import Configuration, Value
from perfsearch.core.objective import Metric
from perfsearch.core.space import Space, key_of
from perfsearch.core.trial import Measurement, Status, Trial
from perfsearch.runners import _known_knobs
from perfsearch.runners._table import Entry, default_baseline, find_entry, read_table
from perfsearch.runners._zero_facts import FILE as FACTS_FILE
from perfsearch.runners._zero_memory import Memory
from perfsearch.runners.base import Outcome, Plan, Runner

if TYPE_CHECKING:
    from perfsearch.config import Settings

_LEAST_STEP_SHARE = 0.05
"""A step drawn with inflated noise takes at least this share of the median."""


@dataclass(frozen=True)
class ReplayOptions:
    """Options of ``runner=replay``, as keys ``runner.*``.

    Attributes:
        table: a CSV file with a row a visit of a configuration; ``trials.csv`` of an earlier
            search is one. Columns are described in ``perfsearch.runners._table``.
        baseline: the configuration to start from, all knobs named; ``None`` takes the row nearest
            to the libraries' defaults.
        batch: ``free`` serves every row; ``fixed`` those with the baseline's global batch.
        noise: factor on the spread of the recorded step times; 0 serves medians.
        process_noise: relative standard deviation of a factor that all steps of a trial share,
            as between two starts of the same job.
        model_facts: the ``model_facts.json`` that a search of ``runner=zero`` left, so that peaks
            of memory can be predicted as that runner does; ``null``: the one beside the table,
            where there is one.
        device_memory_gib: memory of the devices that were measured; ``null``: not known.

    """

    table: str
    baseline: Mapping[str, Value] | None = None
    batch: str = "free"
    noise: float = 1.0
    process_noise: float = 0.0
    model_facts: str | None = None
    device_memory_gib: float | None = option(None, above=0)

    def __post_init__(self) -> None:
        if not self.table:
            raise ValueError("runner.table: name a CSV file of measured configurations.")
        if self.batch not in ("fixed", "free"):
            raise ValueError(f"runner.batch={self.batch}: allowed: fixed, free.")
        for key in ("noise", "process_noise"):
            value = getattr(self, key)
            if not (math.isfinite(value) and 0 <= value <= 100):
                raise ValueError(f"runner.{key}={value}: allowed is 0 to 100.")


class Replay(Runner):
    """Serves the rows of a table; what a trial sees depends on the seed, the trial's number, its
    attempt and its configuration, and on nothing else.

    Step times are drawn with replacement from those recorded for the configuration; where it was
    visited several times, from those of one visit, drawn for the trial.

    Where more than half of the table's knobs, and at least two, are those of ``runner=ddp``,
    ``zero`` or ``deepspeed``, a strategy is told of them what that runner would tell, and nothing
    of the table's outcomes: the order of their expected effects, with ``ddp``'s what somebody who
    knows the field would try first, and with ``zero``'s the predicted peak of memory, provided
    that ``runner.model_facts`` is there.

    Args:
        options: the table and how to serve it.
        seed: seed of the noise.

    Raises:
        ValueError: the table or the baseline cannot be used; the message names the key.

    """

    trains = False
    no_knobs = (
        "runner=replay takes its knobs from the table, so none can be pinned here. To narrow the "
        "search, leave rows out of the table."
    )

    @classmethod
    def from_settings(cls, settings: Settings) -> Replay:
        """Build it from ``runner.*`` and ``seed``."""
        if "knobs" in settings.runner.options:
            raise BadInputError(f"runner.knobs: {cls.no_knobs}")
        options = build_options(ReplayOptions, settings.runner.options, "runner")
        if settings.objective.metric is Metric.FLOPS:
            raise BadInputError(
                "objective.metric=flops: a table does not count operations. "
                "Allowed with runner=replay: throughput, latency."
            )
        try:
            return cls(options, settings.seed)
        except ValueError as error:
            raise BadInputError(str(error)) from error

    def __init__(self, options: ReplayOptions, seed: int) -> None:
        self.options = options
        self.seed = seed
        table = read_table(Path(options.table))
        if options.baseline is None:
            start = default_baseline(table)
        else:
            start = find_entry(table, options.baseline)
        entries = list(table.entries)
        if options.batch == "fixed":
            entries = _of_same_batch(entries, start)
        knobs = [replace(knob, default=start.configuration[knob.name]) for knob in table.knobs]
        self.space = Space(knobs, points=[entry.configuration for entry in entries])
        self.baseline = self.space.canonical(start.configuration)
        self.devices = start.world_size
        self._entries = {key_of(entry.configuration): entry for entry in entries}
        self._digest = table.digest
        self._memory: Memory | None = None
        beside = Path(options.table).parent / FACTS_FILE
        if options.model_facts is not None or beside.is_file():
            self._memory = _known_knobs.memory_of(
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
            "batch": self.options.batch,
            "noise": f"{self.options.noise:g}",
            "process_noise": f"{self.options.process_noise:g}",
        }

    def hints(self, trials: Sequence[Trial]) -> Hints:
        """What the runner of the table's knobs would tell; nothing of the table's outcomes."""
        return _known_knobs.hints(self.space.by_name, self.baseline, self._memory, trials)

    def settings_of(self, configuration: Configuration) -> dict[str, Any]:
        """The table's row that is served as the baseline."""
        return {"baseline": dict(configuration)}

    def measure(self, configuration: Configuration, plan: Plan) -> Outcome:
        """Draw step times for ``configuration``, or serve the failure that was recorded."""
        entry = self._entries.get(key_of(self.space.canonical(configuration)))
        if entry is None:
            return Outcome(Status.INVALID, reason="the table has no such row")
        extra = {} if entry.trial_seconds is None else {"trial_seconds": entry.trial_seconds}
        if entry.status not in (Status.OK, Status.PRUNED):
            reason = entry.reason or f"recorded as {entry.status} in {self.options.table}"
            return Outcome(entry.status, reason=reason, extra=extra)
        steps, cut = self._draw(entry, plan)
        measurement = Measurement(
            step_seconds=steps,
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

    def true_step_seconds(self, configuration: Configuration) -> float | None:
        """Recorded step time without noise, for benchmarks; ``None`` for a failure."""
        return self._entries[key_of(self.space.canonical(configuration))].true_step_seconds

    def _draw(self, entry: Entry, plan: Plan) -> tuple[list[float], bool]:
        words = f"{self.seed}|{plan.number}|{plan.attempt}|{key_of(entry.configuration)}"
        digest = hashlib.blake2b(words.encode(), digest_size=16).digest()
        generator = np.random.default_rng(int.from_bytes(digest, "big"))
        median = entry.true_step_seconds
        assert median is not None
        recorded = entry.visits[0]
        if len(entry.visits) > 1:
            recorded = entry.visits[int(generator.integers(len(entry.visits)))]
        factor = math.exp(self.options.process_noise * float(generator.standard_normal()))
        fewest, most = plan.scored_steps
        steps: list[float] = []
        while len(steps) < fewest or (len(steps) < most and sum(steps) < plan.scored_seconds):
            drawn = recorded[int(generator.integers(len(recorded)))]
            spread = median + self.options.noise * (drawn - median)
            steps.append(factor * max(spread, _LEAST_STEP_SHARE * median))
            if _surely_above(steps, plan.stop_above_cost_s):
                return steps, True
        return steps, False


def _surely_above(steps: Sequence[float], limit_s: float | None) -> bool:
    """Whether the median step lies above the limit by three standard errors, after four steps."""
    if limit_s is None or len(steps) < 4:
        return False
    error = 1.2533 * statistics.stdev(steps) / math.sqrt(len(steps))
    return statistics.median(steps) - 3 * error > limit_s


def _of_same_batch(entries: Sequence[Entry], start: Entry) -> list[Entry]:
    """Entries with the global batch of ``start``.

    A failure has no measured batch: it is kept where micro-batch times accumulation times ranks
    gives it, provided that this holds for every entry that has one.
    """
    wanted = start.samples_per_step
    if wanted is None:
        raise ValueError("runner.batch=fixed: the table does not tell the baseline's global batch.")
    measured = [e for e in entries if e.samples_per_step is not None]
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
    values = [entry.configuration.get(k, 1) for k in ("micro_batch", "gradient_accumulation")]
    if not all(isinstance(v, int) for v in values) or "micro_batch" not in entry.configuration:
        return None
    return int(values[0] or 1) * int(values[1] or 1) * start.world_size
