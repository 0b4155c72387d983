"""The record of tuning while it trains: CSV, a row a sample, units in the names of the columns.

Lower is better in ``step_ms``, higher in ``score_steps_per_s``. The last row has the purpose
``final`` and says what was kept; without it training ended before tuning did.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from perfsearch.core.errors import BadInputError
from perfsearch.core.knob import Value
from perfsearch.core.space import key_of
from perfsearch.core.trial import Purpose, Status, Trial

FINAL = "final"
"""Purpose of the last row."""

_HEAD = ("trial", "purpose", "status", "train_iter", "steps", "step_ms", "score_steps_per_s")
_TAIL = ("reason", "job")


@dataclass
class Entry:
    """A row.

    Attributes:
        trial: number of the configuration's trial.
        purpose: why it was measured, or ``final``.
        status: how it ended; ``unfinished`` in a final row of training that ended too early.
        train_iter: optimizer steps when the row was written.
        configuration: every knob's value.
        step_s: seconds of each scored step on the slowest rank.
        cost_s: seconds of a step as they have it, or for ``final`` the mean over all samples of the
            configuration.
        reason: why it failed or why tuning ended.

    """

    trial: int
    purpose: str
    status: str
    train_iter: int
    configuration: Mapping[str, Value]
    step_s: Sequence[float] = ()
    cost_s: float | None = None
    reason: str = ""


@dataclass
class Log:
    """What a file holds.

    Attributes:
        job: what it was measured on; another job's numbers say nothing of this one.
        trials: every sample, in order.
        kept: the configuration that was kept, or the best so far of an unfinished run.
        finished: whether tuning came to its own end.

    """

    job: str
    trials: list[Trial] = field(default_factory=list)
    kept: dict[str, Value] = field(default_factory=dict)
    finished: bool = False

    @property
    def configurations(self) -> list[dict[str, Value]]:
        """Of every sample, in order, and the kept one last."""
        return [*(trial.configuration for trial in self.trials), self.kept]

    def cost_of(self, configuration: Mapping[str, Value]) -> float | None:
        """Mean seconds of a step over its samples; ``None`` where there are none."""
        key = key_of(configuration)
        costs = [t.cost for t in self.trials if key_of(t.configuration) == key and t.cost]
        return statistics.fmean(costs) if costs else None


class LogWriter:
    """Writes rows, each on its way to the disk before ``write`` returns.

    An older file of the same name is kept beside it, as ``NAME.1``, ``NAME.2``, ...

    Args:
        path: the CSV file.
        job: what it is measured on.
        knobs: names of the knobs' columns.

    """

    def __init__(self, path: Path, job: str, knobs: Sequence[str]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.rename(_free_name(path))
        self.path = path
        self._job = job
        self._file: TextIO = path.open("w", newline="")
        self._rows = csv.DictWriter(self._file, [*_HEAD, *knobs, *_TAIL])
        self._rows.writeheader()
        self._file.flush()

    def write(self, entry: Entry) -> None:
        """Append a row."""
        cost = entry.cost_s
        self._rows.writerow(
            {
                "trial": entry.trial,
                "purpose": entry.purpose,
                "status": entry.status,
                "train_iter": entry.train_iter,
                "steps": len(entry.step_s),
                "step_ms": "" if cost is None else f"{1e3 * cost:.4f}",
                "score_steps_per_s": "" if not cost else f"{1 / cost:.5g}",
                **{name: _shown(value) for name, value in entry.configuration.items()},
                "reason": entry.reason,
                "job": self._job,
            }
        )
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _free_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return candidate


def _shown(value: Value) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _read_value(text: str) -> Value:
    try:
        value: Value = json.loads(text)
    except ValueError:
        return text
    return value


def read(path: Path) -> Log:
    """What an earlier run wrote.

    Raises:
        BadInputError: the file is no such log, or holds no sample.

    """
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInputError(f"{path}: cannot be read: {error}") from error
    if not rows or any(name not in rows[0] for name in (*_HEAD, *_TAIL)):
        raise BadInputError(
            f"{path}: it is no log of tuning, or has no sample yet. Give a file that a run with "
            "autotune.log_file wrote."
        )
    log = Log(job=rows[0]["job"])
    for place, row in enumerate(rows, start=2):
        try:
            _take(row, log)
        except (ValueError, TypeError, KeyError) as error:
            raise BadInputError(f"{path}: line {place} is damaged: {error}") from error
    if not log.kept:
        measured = [t for t in log.trials if t.cost is not None and t.status is Status.OK]
        if not measured:
            raise BadInputError(f"{path}: it has no successful sample to start from.")
        log.kept = dict(min(measured, key=lambda t: t.cost or math.inf).configuration)
    return log


def _take(row: Mapping[str, Any], log: Log) -> None:
    names = [n for n in row if n not in (*_HEAD, *_TAIL)]
    configuration = {name: _read_value(row[name]) for name in names if row[name] != ""}
    if row["purpose"] == FINAL:
        log.kept, log.finished = configuration, row["status"] == Status.OK
        return
    status = Status(row["status"])
    cost = float(row["step_ms"]) / 1e3 if row["step_ms"] else None
    log.trials.append(
        Trial(
            number=int(row["trial"]),
            configuration=configuration,
            purpose=Purpose(row["purpose"]),
            status=status,
            cost=cost,
            cost_error=None if cost is None else _ASSUMED_ERROR,
            reason=row["reason"],
        )
    )


_ASSUMED_ERROR = 0.02
"""Standard error of a logarithm read from a log: conditions of an earlier run were not the same."""
