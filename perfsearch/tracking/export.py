"""Files that a search leaves in its run directory."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perfsearch.core.knob import Knob, Value
from perfsearch.core.trial import Trial
from perfsearch.tracking.files import write_json, write_text
from perfsearch.tracking.names import plain

SUMMARY_SCHEMA = 1
TRIALS_FILE = "trials.csv"

_OUTCOMES = (
    "objective",
    "samples_per_s",
    "step_ms",
    "peak_allocated_gib",
    "peak_reserved_gib",
    "first_losses",
    "world_size",
    "rewrap_ms",
    "trial_seconds",
    "reason",
)


def write_trials(
    run_dir: Path,
    trials: Sequence[Trial],
    knobs: Sequence[Knob],
    pinned: Mapping[str, Value] | None = None,
) -> Path:
    """Write ``trials.csv``, a row a trial, and return its path. ``runner=replay`` reads it.

    Args:
        run_dir: where it goes.
        trials: in the order of their rows.
        knobs: the searched knobs, a column each.
        pinned: the other knobs, a column each of the one value that they have.

    Raises:
        OSError: it cannot be written.
        ValueError: a knob is named as an outcome is.

    """
    fixed = {k: v for k, v in (pinned or {}).items() if k not in {knob.name for knob in knobs}}
    names = [*(knob.name for knob in knobs), *fixed]
    header = ["trial", "purpose", "status", *names, *_OUTCOMES]
    if len(set(header)) != len(header):
        doubled = next(name for name in names if header.count(name) > 1)
        raise ValueError(f"the knob {doubled} has the name of an outcome in {TRIALS_FILE}")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for trial in trials:
        values = {**fixed, **trial.configuration}
        row = [str(trial.number), trial.purpose.value, trial.status.value]
        row += [plain(values[name]) if name in values else "" for name in names]
        writer.writerow(row + _outcomes(trial))
    path = run_dir / TRIALS_FILE
    write_text(path, text.getvalue())
    return path


def write_config(path: Path, settings: Mapping[str, Any]) -> None:
    """Write settings as YAML that reads back as exactly the same.

    Args:
        path: the file.
        settings: plain values: mappings, lists, strings, numbers, booleans, ``None``.

    Raises:
        OSError: it cannot be written.
        ValueError: the settings hold something that YAML would not give back.

    """
    import yaml  # type: ignore[import-untyped]

    try:
        json.dumps(dict(settings))
        text = yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True)
    except (yaml.YAMLError, TypeError) as error:
        raise ValueError(f"{path}: the settings are not plain values: {error}") from error
    if yaml.safe_load(text) != dict(settings):
        raise ValueError(f"{path}: the settings would not read back as they are")
    write_text(path, text)


def write_summary(path: Path, summary: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
    """Write ``best/summary.json``: numbers and interval, and under ``provenance`` their origin.

    Raises:
        OSError: it cannot be written.
        TypeError: something in it is no plain value.

    """
    write_json(path, {"schema": SUMMARY_SCHEMA, **summary, "provenance": dict(provenance)})


def _outcomes(trial: Trial) -> list[str]:
    found = trial.measurement
    values: dict[str, Any] = {
        "objective": trial.objective,
        "trial_seconds": round(trial.seconds, 3),
        "reason": " ".join(trial.reason.split()),
    }
    if found is not None:
        values.update(
            samples_per_s=found.samples_per_s if found.step_seconds else None,
            step_ms=" ".join(f"{s * 1e3:.4f}" for s in found.step_seconds),
            peak_allocated_gib=found.peak_allocated_gib,
            peak_reserved_gib=found.peak_reserved_gib,
            first_losses=" ".join(repr(loss) for loss in found.first_losses),
            world_size=found.world_size,
            rewrap_ms=round(found.rewrap_seconds * 1e3, 2),
        )
    return ["" if values.get(name) is None else str(values[name]) for name in _OUTCOMES]
