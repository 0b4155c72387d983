"""From trials to MLflow's params, metrics and tags."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from perfsearch.core.knob import Configuration, Kind, Knob, Value
from perfsearch.core.trial import Measurement, Status, Trial
from perfsearch.metrics.diagnosis import diagnose
from perfsearch.metrics.throughput import mfu_of, step_time_summary

PARAM_LIMIT = 500
"""Characters of a param; servers of older versions refuse more."""

TAG_LIMIT = 5000

SERIES_LIMIT = 200
"""Points of a series; the UI slows down with more."""

_UNSHOWN = ("_rank", "_error_ms")
"""Evidence that is not shown: each key is a card in the UI, which slows down with many."""

_EXACT = 2.0**53
"""Whole numbers below are written as such."""

_KEY = re.compile(r"[^/\w.\- ]")


def trial_metrics(trial: Trial) -> dict[str, float]:
    """Summary metrics of a trial. Only a trial that ended well has ``objective/value``."""
    metrics: dict[str, float | int | None] = {}
    if trial.status is Status.OK:
        metrics["objective/value"] = trial.objective  # the UI's views begin with the first one
    metrics["trial/seconds"] = trial.seconds
    metrics["trial/overhead_seconds"] = trial.overhead_seconds
    found = trial.measurement
    if found is None:
        return finite(metrics)
    metrics.update({f"step_time/{k}": v for k, v in step_time_summary(found.step_seconds).items()})
    if found.step_seconds and found.step_time_s > 0:
        metrics.update(_throughput(found))
        # the step that the phases are of, which in a profile have a window of their own
        known = found.bottleneck_evidence
        step_ms = known.get("phases_step_ms") or known.get("detailed_step_ms")
        step_ms = step_ms or found.step_time_s * 1e3
        metrics.update({f"timing_share/{k}": v / step_ms for k, v in found.phases_ms.items()})
    metrics.update({f"timing/{phase}_ms": v for phase, v in found.phases_ms.items()})
    metrics.update(
        {
            "memory/peak_allocated_gib": found.peak_allocated_gib,
            "memory/peak_reserved_gib": found.peak_reserved_gib,
            "trial/rewrap_seconds": found.rewrap_seconds,
            "trial/compile_seconds": found.compile_seconds,
            "trial/discarded_seconds": found.discarded_seconds,
            "trial/discarded_steps": found.discarded_steps,
        }
    )
    evidence = found.bottleneck_evidence.items()
    metrics.update({f"timing_evidence/{k}": v for k, v in evidence if not k.endswith(_UNSHOWN)})
    metrics.update({f"system/{k}": v for k, v in found.system.items()})
    return finite(metrics)


def _throughput(found: Measurement) -> dict[str, float | None]:
    world, step_s = found.world_size, found.step_time_s
    metrics: dict[str, float | None] = {}
    if found.samples_per_s is None:
        metrics["throughput/steps_per_s"] = found.steps_per_s
    else:
        metrics["throughput/samples_per_s"] = found.samples_per_s
        metrics["throughput/device/samples_per_s"] = found.samples_per_s / world
    if found.tokens_per_s is not None:
        metrics["throughput/tokens_per_s"] = found.tokens_per_s
        metrics["throughput/device/tokens_per_s"] = found.tokens_per_s / world
    if found.flops_per_step is not None:
        metrics["throughput/device/tflops"] = found.flops_per_step / step_s / world / 1e12
        metrics["throughput/device/mfu"] = mfu_of(found)
    return metrics


def trial_series(trial: Trial) -> dict[str, list[tuple[int, float]]]:
    """Series of a trial by name, as pairs of step (from 1) and value."""
    if trial.measurement is None:
        return {}
    steps = [s * 1e3 for s in trial.measurement.step_seconds]
    return {
        "series/step_time_ms": downsample(steps),
        "series/first_loss": downsample(trial.measurement.first_losses),
    }


def downsample(values: Sequence[float], limit: int = SERIES_LIMIT) -> list[tuple[int, float]]:
    """At most ``limit`` finite values, evenly spaced, with their positions counted from 1."""
    stride = max(1, math.ceil(len(values) / limit))
    points = list(enumerate(values, start=1))[::stride]
    return [(step, float(value)) for step, value in points if math.isfinite(value)]


def trial_tags(trial: Trial) -> dict[str, str]:
    """Tags of a trial's run."""
    tags = {
        "perfsearch.status": trial.status.value,
        "perfsearch.purpose": trial.purpose.value,
        "perfsearch.trial": str(trial.number),
        "perfsearch.trial_id": run_name(trial.number),
    }
    if trial.reason:
        tags["perfsearch.reason"] = trial.reason
        tags["mlflow.note.content"] = trial.reason
    found = trial.measurement
    if found is not None and found.step_seconds and found.phases_ms:
        findings = found.environment.get("findings") or [str(f) for f in diagnose(found)]
        bottleneck = found.environment.get("bottleneck") or diagnose(found)[0].name
        tags["perfsearch.bottleneck"] = str(bottleneck)
        tags.setdefault("mlflow.note.content", "\n".join(f"- {line}" for line in findings))
    if trial.log_path:
        tags["perfsearch.log_path"] = trial.log_path
    return tags


def run_name(number: int) -> str:
    """Name of a trial's run."""
    return f"t{number:04d}"


def mlflow_status(status: Status) -> str:
    """MLflow's status of a trial's run."""
    if status in (Status.OK, Status.PRUNED):
        return "FINISHED"
    return "KILLED" if status is Status.INTERRUPTED else "FAILED"


def digest(trial: Trial) -> str:
    """A fingerprint of a trial's record, by which an upload is known to be complete."""
    record = json.dumps(trial.to_json(), sort_keys=True, default=str)
    return hashlib.sha256(record.encode()).hexdigest()[:16]


def knob_params(
    configuration: Configuration, names: Sequence[str], nulls: Mapping[str, int | str]
) -> dict[str, str]:
    """One param a knob, the same set in every trial."""
    params = {}
    for name in names:
        value = configuration.get(name)
        shown: Any = nulls.get(name, "none") if value is None else value
        params[clean_key(f"knob/{name}")] = plain(shown)
    return params


def nulls(definition: Mapping[str, Any]) -> dict[str, int | str]:
    """The same for every searched knob, by the definition of the search in its journal."""
    baseline = definition.get("baseline", {})
    found: dict[str, int | str] = {}
    for name, kind, values, *_ in definition.get("knobs", ()):
        is_number = kind in (Kind.INTEGER, Kind.REAL)
        known = [v for v in (*values, baseline.get(name)) if v is not None]
        found[name] = -1 if is_number else null_of(known)
    return found


def null_value(knob: Knob) -> int | str:
    """What stands for ``null`` in a knob's param: a number where its values are numbers.

    The parallel-coordinates view drops a run that lacks a value, or that has a text among numbers.
    """
    if knob.kind in (Kind.INTEGER, Kind.REAL):
        return -1
    return null_of([v for v in (*knob.values, knob.default) if v is not None])


def null_of(values: Sequence[Value]) -> int | str:
    """The same from values that were seen."""
    numbers = [isinstance(v, int | float) and not isinstance(v, bool) for v in values]
    return -1 if numbers and all(numbers) else "none"


def flat(parameters: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested parameters as dotted keys and plain values."""
    found: dict[str, str] = {}
    for key, value in parameters.items():
        if isinstance(value, Mapping) and value:
            found.update(flat(value, f"{prefix}{key}."))
        else:
            found[clean_key(f"{prefix}{key}")] = plain(value)
    return found


def plain(value: Any) -> str:
    """A value as YAML and the command line write it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple | dict):
        return json.dumps(value, default=str)
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return str(int(value))  # one value is one text, whoever proposed it
    return "null" if value is None else str(value)


def clean_key(key: str) -> str:
    """A key that MLflow accepts on every system: other characters become underscores."""
    return _KEY.sub("_", key)[:250]


def finite(metrics: Mapping[str, float | int | None]) -> dict[str, float]:
    """Metrics that MLflow may have: NaN, which sorts first, and infinities are left out."""
    return {
        clean_key(name): float(value)
        for name, value in metrics.items()
        if value is not None and math.isfinite(value)
    }
