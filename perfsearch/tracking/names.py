"""From trials to MLflow's params, metrics and tags."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from perfsearch.core.figures import show_value
from perfsearch.core.knob import Configuration, Kind, Knob, Value, same_value
from perfsearch.core.signals import VERDICTS
from perfsearch.core.trial import Measurement, Purpose, Status, Trial
from perfsearch.metrics.diagnosis import diagnose
from perfsearch.metrics.throughput import mfu_of, step_time_summary

PARAM_LIMIT = 500
"""Characters of a param; servers of older versions refuse more."""

TAG_LIMIT = 5000

SERIES_LIMIT = 200
"""Points of a series; the UI slows down with more."""

HEADLINES = (
    *("objective/value", "objective/speed_up"),
    *("throughput/samples_per_s", "throughput/steps_per_s", "throughput/tokens_per_s"),
    *("throughput/device/tflops", "throughput/device/mfu"),
    *("step_time/p50_ms", "step_time/p99_ms", "memory/peak_allocated_gib"),
    *("timing_share/dataloader_next", "timing_share/comm_exposed"),
    *("system/cpu_utilization_percentage", "system/gpu_utilization_percentage"),
    "trial/seconds",
)
"""The metrics of a trial's run: each key is a card in the UI, which slows down with many. All that
is known is in the run's artifact ``ALL_METRICS``."""

ALL_METRICS = "metrics.json"

EXPERIMENT_TAGS = {
    "mlflow.note.content": """\
Searches by perfsearch for the fastest configuration of a training job. A run is a search, named by
its strategy and what was confirmed; below it is a run for each trial, named by what differs from
the baseline.

- `objective/value`: what is optimised; of a search, that of the configuration handed over
- `objective/speed_up`: of a trial, one reading against the first of the baseline; of a search,
  what the confirmation came to
- `best/objective`, `best/speed_up`: the best so far by trial, to compare searches in a chart
- `knob/...`: a trial's configuration; `best/...`: that which is handed over
- `metrics.json`, artifact of a trial: every metric; `report.html`, of a search: the report
""",
}
"""Of an experiment that is made here."""

VIEW = "perfsearch"
"""Key of an experiment's saved view, which has columns that say something of searches."""

_COLUMNS = (
    *("metrics.`objective/value`", "metrics.`objective/speed_up`"),
    *("metrics.`step_time/p50_ms`", "metrics.`memory/peak_allocated_gib`"),
    "tags.`perfsearch.status`",
)

_RUN_NAME = "attributes.`Run Name`"

_KNOB_COLUMNS = 8

OF_STRATEGY = "strategy/"
"""What those parameters of a search begin with that are options of its strategy."""

NOT_SEARCHED = "not searched"
"""The verdict of what only measured the baseline."""

GAIN = "gain"
"""The verdict of a search that found one."""

_NAME_LIMIT = 100
"""Characters of a run's name, so that the table's other columns stay in sight."""

_MOST_POINTS = 300

_SYSTEM = (
    "utilization_percentage",
    *("memory_usage_megabytes", "memory_usage_percentage", "memory_available_megabytes"),
    *("power_usage_watts", "temperature_celsius", "throttled_percentage", "busy_percentage"),
    *("receive_megabytes_per_s", "transmit_megabytes_per_s"),
    *("read_megabytes_per_s", "write_megabytes_per_s", "disk_iops"),
)
"""Endings of the system metrics that a search's run has over time; all are in ``system.jsonl``."""

_EXACT = 2.0**53
"""Whole numbers below are written as such."""

_KEY = re.compile(r"[^/\w.\- ]")


def trial_metrics(trial: Trial, baseline_cost: float | None = None) -> dict[str, float]:
    """All metrics of a trial. Only a trial that ended well has ``objective/...``.

    Args:
        trial: whichever.
        baseline_cost: of the search's first reading of the baseline, where that is known.

    """
    metrics: dict[str, float | int | None] = {}
    if trial.status is Status.OK:
        metrics["objective/value"] = trial.objective  # the UI's views begin with the first one
        if trial.cost and baseline_cost:
            metrics["objective/speed_up"] = baseline_cost / trial.cost
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
    metrics.update({f"timing_evidence/{k}": v for k, v in found.bottleneck_evidence.items()})
    metrics.update({f"system/{k}": v for k, v in _by_place(found.system).items()})
    return finite(metrics)


def _by_place(system: Mapping[str, float]) -> dict[str, float]:
    """Readings by node where there are several; else a node's name would say them twice."""
    nodes = {key.partition("/")[0] for key in system if key.startswith("node_")}
    if len(nodes) != 1:
        return dict(system)
    return {key.removeprefix(f"{min(nodes)}/"): value for key, value in system.items()}


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
        "perfsearch.trial_id": trial_id(trial.number),
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


def trial_id(number: int) -> str:
    """A trial's number, such that texts sort as numbers do."""
    return f"t{number:04d}"


def trial_name(trial: Trial, baseline: Configuration) -> str:
    """Name of a trial's run: its number, why it was run, and what differs from the baseline."""
    words = {
        Purpose.BASELINE: ["baseline"],
        Purpose.SENTINEL: ["baseline again"],
        Purpose.SEARCH: [],
    }.get(trial.purpose, [str(trial.purpose)])
    told = changes(trial.configuration, baseline)
    if not told and trial.purpose not in (Purpose.BASELINE, Purpose.SENTINEL):
        told = ["baseline"]
    name = f"{trial.number:03d} {' '.join(words)}".rstrip()
    for place, change in enumerate(told):
        if len(name) + len(change) > _NAME_LIMIT:
            return f"{name} and {len(told) - place} more"
        name += f" {change}"
    return name


def changes(configuration: Configuration, baseline: Configuration) -> list[str]:
    """``knob=value`` of what differs from the baseline, values as people write them."""
    return [
        f"{name}={show_value(value)}"
        for name, value in configuration.items()
        if name not in baseline or not same_value(value, baseline[name])
    ]


def search_name(parameters: Mapping[str, Any], otherwise: str) -> str:
    """Name of a search's run while nothing is known of its end, by its journal's parameters."""
    runner, mode, seed = map(parameters.get, ("runner", "mode", "seed"))
    if not isinstance(runner, str) or runner.startswith("_"):  # none that a search was asked for
        return otherwise
    return f"{runner} {mode}" if mode else f"{runner} {strategy_name(parameters)} seed={seed}"


def strategy_name(parameters: Mapping[str, Any]) -> str:
    """A search's strategy with the options that are not its usual ones: ``bayes xi=0.1``."""
    options = [
        f"{key.removeprefix(OF_STRATEGY)}={plain(value)}"
        for key, value in parameters.items()
        if key.startswith(OF_STRATEGY)
    ]
    return " ".join([str(parameters.get("strategy", "")), *options])


def ended_name(name: str, metrics: Mapping[str, float], tags: Mapping[str, str]) -> str:
    """Name of a search's run with what came of it: ``ddp bayes seed=1: +49%``."""
    said = tags.get("perfsearch.verdict", "").replace("_", " ")
    if said == NOT_SEARCHED:
        said = tags.get("perfsearch.bottleneck_baseline", "")
    if said == GAIN and "search/speed_up" in metrics:
        said = f"{metrics['search/speed_up'] - 1:+.0%}"
    return f"{name}: {said}" if said else name


def saved_view(knobs: Sequence[str]) -> tuple[str, str]:
    """An experiment's tag, key and value, that MLflow's UI reads its table's columns from.

    No public function of MLflow's writes one; where a later UI reads it otherwise, it shows its own
    columns. They are those for the knobs of the latest search.
    """
    shown = [f"params.`{clean_key(f'knob/{name}')}`" for name in knobs[:_KNOB_COLUMNS]]
    columns = [*_COLUMNS, *shown]
    state = {
        "selectedColumns": columns,
        "columnOrder": [_RUN_NAME, *columns],
        "columnWidths": {_RUN_NAME: 400, **dict.fromkeys(columns, 150)},
    }
    return f"mlflow.sharedViewState.{VIEW}", json.dumps(state)


def headlines(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those of a trial's metrics that its run has."""
    return {name: metrics[name] for name in HEADLINES if name in metrics}


def system_series(
    samples: Sequence[Mapping[str, Any]],
) -> dict[str, list[tuple[int, int, float]]]:
    """Points of each system metric by key: time in milliseconds, seconds since the first, value.

    Keys are those of MLflow's own system metrics where it has the same; nodes are told apart where
    there are several. Samples without a time of day, which earlier versions wrote, have none.
    """
    timed = [sample for sample in samples if "unix_s" in sample]
    several = len({sample.get("node", 0) for sample in timed}) > 1
    found: dict[str, list[tuple[int, int, float]]] = {}
    begin_s = min((float(sample["unix_s"]) for sample in timed), default=0.0)
    for sample in timed:
        node = f"node_{sample.get('node', 0)}/" if several else ""
        at_s = float(sample["unix_s"])
        for key, value in sample.items():
            if key.endswith(_SYSTEM) and "/" not in key and math.isfinite(value):
                points = found.setdefault(clean_key(f"system/{node}{key}"), [])
                points.append((round(at_s * 1e3), round(at_s - begin_s), float(value)))
    return {
        key: points[:: max(1, -(-len(points) // _MOST_POINTS))] for key, points in found.items()
    }


def mlflow_status(status: Status) -> str:
    """MLflow's status of a trial's run."""
    if status in (Status.OK, Status.PRUNED):
        return "FINISHED"
    return "KILLED" if status is Status.INTERRUPTED else "FAILED"


def mlflow_status_of_search(exit_code: int) -> str:
    """MLflow's status of a search's run: FINISHED where it came to an answer, whichever it is."""
    return "FINISHED" if exit_code in VERDICTS else "FAILED"


def digest(trial: Trial) -> str:
    """A fingerprint of a trial's record, by which an upload is known to be complete."""
    record = json.dumps(trial.to_json(), sort_keys=True, default=str)
    return hashlib.sha256(record.encode()).hexdigest()[:16]


def knob_params(
    configuration: Configuration,
    names: Sequence[str],
    nulls: Mapping[str, int | str],
    folder: str = "knob",
) -> dict[str, str]:
    """One param a knob, the same set in every trial."""
    params = {}
    for name in names:
        value = configuration.get(name)
        shown: Any = nulls.get(name, "none") if value is None else value
        params[clean_key(f"{folder}/{name}")] = plain(shown)
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
