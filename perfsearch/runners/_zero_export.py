"""A configuration in the forms that a job can use without perfsearch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perfsearch.core.knob import Value
from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.metrics.memory_facts import MemoryFacts
from perfsearch.runners import _zero_frameworks, _zero_torch_form
from perfsearch.runners._zero_batch import Batch
from perfsearch.workers.environment import Hardware


def write(
    configuration: Mapping[str, Value],
    batch: Batch,
    hardware: Hardware,
    facts: MemoryFacts | None,
    trials: Sequence[Trial],
    directory: Path,
) -> list[Path]:
    """Write every form that fits, and a note on what the forms leave out.

    Args:
        configuration: every knob, pinned ones included.
        batch: the arithmetic of batches.
        hardware: where it was found.
        facts: of the job's tensors, where they are known.
        trials: of the search, for the summary.
        directory: made when it is missing.

    """
    directory.mkdir(parents=True, exist_ok=True)
    whole = {**configuration, "gradient_accumulation": batch.accumulation_of(configuration)}
    job = _zero_frameworks.Job(
        world_size=hardware.world_size,
        nodes=hardware.nnodes,
        on_gpu=hardware.device == "cuda",
        half=facts is not None and facts.cast_bytes == 2,
        block_class="" if facts is None else facts.block_class,
    )
    files: dict[str, str] = {
        "zero.py": _zero_torch_form.code(whole, job),
        "ds_config.json": _as_json(_zero_frameworks.deepspeed(whole, job)),
    }
    notes = list(_zero_frameworks.deepspeed_notes(whole))
    for name, (form, reason) in {
        "hf_trainer_args.json": _zero_frameworks.trainer(whole, job),
        "accelerate_fsdp.yaml": _zero_frameworks.accelerate(whole, job),
    }.items():
        if form is None:
            notes.append(f"{name} is not written: {reason}")
        elif name.endswith(".json"):
            files[name] = _as_json(form)
        else:
            files[name] = _zero_frameworks.as_yaml(form)
            notes += _zero_frameworks.fsdp_notes(whole, job)
    files["summary.txt"] = summary(trials, batch, configuration)
    if notes:
        files["notes.txt"] = "\n".join([*notes, ""])
    for name, text in files.items():
        (directory / name).write_text(text)
    return [directory / name for name in files]


def _as_json(form: Mapping[str, Any]) -> str:
    return json.dumps(form, indent=2) + "\n"


def summary(trials: Sequence[Trial], batch: Batch, pinned: Mapping[str, Value]) -> str:
    """A table in the manner of DeepSpeed's autotuner: a row for each tuning space.

    Args:
        trials: of the search.
        batch: the arithmetic of batches.
        pinned: values of the knobs that trials do not name, as they all share them.

    """
    tried = [t for t in trials if t.purpose in (Purpose.BASELINE, Purpose.SEARCH)]
    spaces: dict[str, list[Trial]] = {}
    for trial in tried:
        spaces.setdefault(_space(trial, pinned), []).append(trial)
    rows = [["tuning_space", "num_experiments", "best_metric_val", "best_exp_name"]]
    for name, members in sorted(spaces.items()):
        rows.append([name, str(len(members)), *_best(members, pinned)])
    rows.append(["all", str(len(tried)), *_best(tried, pinned)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
             for row in rows]  # fmt: skip
    seconds = sum(t.seconds for t in trials)
    failed = sum(t.status.is_failure for t in tried)
    lines += [
        "",
        f"Tuning took {seconds:.1f} s in {len(trials)} experiment{'s' * (len(trials) != 1)}, "
        "confirmation included; "
        f"{failed} of the {len(tried)} above failed ("
        f"{sum(t.status is Status.OOM for t in tried)} out of memory).",
        f"batch={batch.rule}, global batch of the baseline {batch.global_batch}; metric: the "
        "objective of the search, single readings.",
    ]
    return "\n".join([*lines, ""])


def _space(trial: Trial, pinned: Mapping[str, Value]) -> str:
    whole = {**pinned, **trial.configuration}
    every = whole.get("activation_checkpointing")
    name = f"z{whole.get('zero_stage') or 0}"
    return f"{name}_ac{every}" if every else name


def _best(trials: Sequence[Trial], pinned: Mapping[str, Value]) -> list[str]:
    valid = [t for t in trials if t.status is Status.OK and t.cost is not None]
    if not valid:
        return ["none", "none"]
    best = min(valid, key=lambda t: t.cost or 0.0)
    micro = {**pinned, **best.configuration}.get("micro_batch")
    name = _space(best, pinned) + ("" if micro is None else f"_tmbspg{micro}")
    return [f"{best.objective:.2f}", f"{name} (trial {best.number})"]
