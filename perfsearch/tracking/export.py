"""Files that a search leaves in its run directory, and where a result comes from."""

from __future__ import annotations

import csv
import importlib.metadata
import io
import json
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perfsearch.core.errors import FORMULAS, printable
from perfsearch.core.files import write_json, write_text
from perfsearch.core.knob import Knob, Value
from perfsearch.core.secrets import Redactor
from perfsearch.core.trial import Trial
from perfsearch.core.version import version
from perfsearch.metrics import gpu
from perfsearch.tracking.names import plain

SUMMARY_SCHEMA = 1

TRIALS_FILE = "trials.csv"

SYSTEM_SERIES = "system.jsonl"
"""What the sampler of the host and its GPUs read, a line a sample."""

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
    writer.writerow([as_cell(name) for name in header])
    for trial in trials:
        values = {**fixed, **trial.configuration}
        row = [str(trial.number), trial.purpose.value, trial.status.value]
        row += [as_cell(values[name]) if name in values else "" for name in names]
        writer.writerow(row + _outcomes(trial))
    path = run_dir / TRIALS_FILE
    write_text(path, Redactor().text(text.getvalue()), durable=True)
    return path


def as_cell(value: Value) -> str:
    """A value as a cell that a spreadsheet takes for no formula, without control characters."""
    text = printable(plain(value))
    return f"'{text}" if isinstance(value, str) and text[:1] in FORMULAS else text


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
    write_text(path, text, durable=True)


def write_summary(path: Path, summary: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
    """Write ``best/summary.json``: numbers and interval, and under ``provenance`` their origin.

    Raises:
        OSError: it cannot be written.
        TypeError: something in it is no plain value.

    """
    found = {"schema": SUMMARY_SCHEMA, **summary, "provenance": dict(provenance)}
    write_json(path, Redactor().tree(found), durable=True)


def _outcomes(trial: Trial) -> list[str]:
    found = trial.measurement
    values: dict[str, Any] = {
        "objective": trial.objective,
        "trial_seconds": round(trial.seconds, 3),
        "reason": as_cell(" ".join(trial.reason.split())),
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


# -----------------------------------------------------------------------------
# Where a result comes from.

_PACKAGES = ("torch", "numpy", "nevergrad", "scikit-learn", "hydra-core", "mlflow", "deepspeed")

_NCCL_PREFIX = "nvidia-nccl-"

_GIT_TIMEOUT_S = 10


def provenance(
    directory: Path | None = None, device_uuids: Sequence[str] | None = None
) -> dict[str, Any]:
    """What is needed to judge, and to repeat, a result. What is not known is left out.

    Args:
        directory: the user's code, whose commit is looked up; the current directory.
        device_uuids: the job's GPUs; ``None`` goes by ``CUDA_VISIBLE_DEVICES``.

    Returns:
        Plain values: ``perfsearch``, ``versions``, ``host``, ``devices``, ``driver``, and ``code``
        with ``commit`` and ``dirty``. No environment variable and no command line is in it.

    """
    seen = gpu.environment(device_uuids)
    found: dict[str, Any] = {
        "perfsearch": version(),
        "versions": versions(),
        "host": {
            "name": platform.node(),
            "system": platform.platform(),
            "python": platform.python_version(),
            "cpus": _cpus(),
        },
        "devices": [
            {k: d[k] for k in ("uuid", "name", "index", "mig") if k in d} for d in seen["devices"]
        ],
    }
    if "driver" in seen:
        found["driver"] = seen["driver"]
    code = commit(directory or Path())  # also where that was removed meanwhile
    if code:
        found["code"] = dict(code)
    return found


def versions() -> dict[str, str]:
    """Installed versions of what decides speed and results."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"] or ""
        if name.startswith(_NCCL_PREFIX):
            found["nccl"] = distribution.version
    return found


def commit(directory: Path) -> Mapping[str, Any]:
    """Commit of the repository around ``directory`` and whether files differ from it.

    Empty outside of a repository, before its first commit, and without git.
    """
    head = _git(directory, "rev-parse", "HEAD")
    if head is None:
        return {}
    changes = _git(directory, "status", "--porcelain", "--untracked-files=no")
    return {"commit": head, "dirty": None if changes is None else bool(changes)}


def _git(directory: Path, *arguments: str) -> str | None:
    program = shutil.which("git")
    if program is None:
        return None
    try:
        result = subprocess.run(
            # Without optional locks a look at the state never disturbs the user's own git.
            [program, "--no-optional-locks", "-C", str(directory), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _cpus() -> int | None:
    import psutil

    count: int | None = psutil.cpu_count()
    return count
