"""The same configuration for DeepSpeed, HF Trainer and Accelerate, as far as each can say it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfsearch import knobs
from perfsearch.core.hardware import Hardware
from perfsearch.core.knob import Value, same_value
from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.knobs import ddp
from perfsearch.knobs.base import Use
from perfsearch.knobs.batch import ACCUMULATION, MICRO_BATCH, Batch
from perfsearch.knobs.ddp import BUCKET_CAP
from perfsearch.knobs.fsdp import BACKWARD_PREFETCH, CPU_OFFLOAD, FORWARD_PREFETCH, STAGE
from perfsearch.knobs.optimizer import IMPLEMENTATION
from perfsearch.knobs.zero import (
    BLOCKS_PER_UNIT,
    CHECKPOINTING,
    MIXED_PRECISION,
    RESHARD_GROUP,
    SHARD_GROUP,
    SYNC_EACH,
)
from perfsearch.metrics.memory import MemoryFacts
from perfsearch.runners.zero import forms


def export_files(
    configuration: Mapping[str, Value],
    batch: Batch,
    hardware: Hardware,
    facts: MemoryFacts | None,
    trials: Sequence[Trial],
    directory: Path,
) -> list[Path]:
    """Write every form that its framework loads as what was measured, and notes on the others.

    Args:
        configuration: every knob, pinned ones included.
        batch: the arithmetic of batches.
        hardware: where it was found.
        facts: of the job's tensors, where they are known.
        trials: of the search, for the summary.
        directory: made when it is missing.

    """
    directory.mkdir(parents=True, exist_ok=True)
    whole = {**configuration, ACCUMULATION.name: batch.accumulation_of(configuration)}
    job = Job(
        world_size=hardware.world_size,
        nodes=hardware.nnodes,
        on_gpu=hardware.device == "cuda",
        half=facts is not None and facts.cast_bytes == 2,
        block_class="" if facts is None else facts.block_class,
    )
    files: dict[str, str] = {"zero.py": training_code(whole, job)}
    notes: list[str] = []
    for name, (form, reason) in {
        "ds_config.json": (deepspeed(whole, job), ""),
        "hf_trainer_args.json": trainer(whole, job),
        "accelerate_fsdp.yaml": accelerate(whole, job),
    }.items():
        text = "" if form is None else as_yaml(form) if name.endswith("yaml") else _as_json(form)
        reason = reason or forms.why_not_handed_over(name, text, measured_by(whole, job))
        if reason:
            notes.append(f"{name} is not written: {reason}")
            continue
        files[name] = text
        if name == "ds_config.json":
            notes += deepspeed_notes(whole)
        elif name == "accelerate_fsdp.yaml":
            notes += fsdp_notes(whole, job)
        said = _in_deepspeed(whole) if name == "ds_config.json" else _in_frameworks(whole)
        notes += left_out_notes(name, said, whole, trials)
    files["summary.txt"] = tuning_summary(trials, batch, configuration)
    if notes:
        files["notes.txt"] = "\n".join([*notes, ""])
    for name, text in files.items():
        (directory / name).write_text(text)
    return [directory / name for name in files]


def _as_json(form: Mapping[str, Any]) -> str:
    return json.dumps(form, indent=2) + "\n"


def as_yaml(form: Mapping[str, Any], indent: str = "") -> str:
    """Nested mappings of plain scalars as YAML."""
    lines = []
    for name, value in form.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{name}:\n{as_yaml(value, indent + '  ')}")
        else:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            lines.append(f"{indent}{name}: {text!r}\n" if text in ("no", "") else
                         f"{indent}{name}: {text}\n")  # fmt: skip
    return "".join(lines)


def tuning_summary(trials: Sequence[Trial], batch: Batch, pinned: Mapping[str, Value]) -> str:
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
    every = CHECKPOINTING.of(whole)
    name = f"z{STAGE.number(whole)}"
    return f"{name}_ac{every}" if every else name


def _best(trials: Sequence[Trial], pinned: Mapping[str, Value]) -> list[str]:
    valid = [t for t in trials if t.status is Status.OK and t.cost is not None]
    if not valid:
        return ["none", "none"]
    best = min(valid, key=lambda t: t.cost or 0.0)
    micro = MICRO_BATCH.of({**pinned, **best.configuration})
    name = _space(best, pinned) + ("" if micro is None else f"_tmbspg{micro}")
    return [f"{best.objective:.2f}", f"{name} (trial {best.number})"]


# -----------------------------------------------------------------------------
# The forms of DeepSpeed, Trainer and Accelerate.

_MIB = 2**20

Form = tuple[dict[str, Any] | None, str]
"""A form, or why there is none."""


@dataclass(frozen=True)
class Job:
    """What the forms need beside the knobs.

    Attributes:
        world_size: ranks.
        nodes: they run on.
        on_gpu: whether on GPUs.
        half: whether mixed precision computes in two bytes.
        block_class: name of the class of the repeated blocks; empty where there is none.

    """

    world_size: int
    nodes: int
    on_gpu: bool
    half: bool
    block_class: str


def measured_by(whole: Mapping[str, Value], job: Job) -> dict[str, Any]:
    """What was measured, in the words of those who load a form (``forms``)."""
    return {
        "ranks": job.world_size,
        MICRO_BATCH.name: MICRO_BATCH.number(whole),
        ACCUMULATION.name: ACCUMULATION.number(whole),
        STAGE.name: STAGE.number(whole),
        "half": job.half,
        "checkpointed": bool(CHECKPOINTING.number(whole)),
        CPU_OFFLOAD.name: bool(CPU_OFFLOAD.of(whole)),
        "block_class": [job.block_class],
    }


def deepspeed(whole: Mapping[str, Value], job: Job) -> dict[str, Any]:
    """``ds_config.json``; optimizer and schedule stay the client's."""
    stage = STAGE.number(whole)
    zero: dict[str, Any] = {"stage": stage}
    bucket = float(BUCKET_CAP.of(whole) or BUCKET_CAP.default)
    if stage in (0, 1) and bucket != BUCKET_CAP.default:
        zero["reduce_bucket_size"] = int(bucket * _MIB / (2 if job.half else 4))
    if stage >= 2 and CPU_OFFLOAD.of(whole):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    if stage == 3 and SHARD_GROUP.number(whole):
        zero["mics_shard_size"] = SHARD_GROUP.number(whole)
    if stage == 3 and RESHARD_GROUP.number(whole):
        zero["zero_hpz_partition_size"] = RESHARD_GROUP.number(whole)
    micro, times = MICRO_BATCH.number(whole), ACCUMULATION.number(whole)
    form: dict[str, Any] = {
        "train_batch_size": micro * times * job.world_size,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": times,
        "zero_optimization": zero,
    }
    if job.half:
        form["bf16"] = {"enabled": True}
    return form


def deepspeed_notes(whole: Mapping[str, Value]) -> Iterator[str]:
    """What ``ds_config.json`` cannot say."""
    every = CHECKPOINTING.number(whole)
    if every:
        yield (
            "ds_config.json: DeepSpeed checkpoints activations where the model calls it; wrap "
            f"{'every block' if every == 1 else f'one block in {every}'} as zero.py does"
        )
    if STAGE.number(whole) == 2:
        yield (
            "ds_config.json: DeepSpeed's stage 2 keeps whole parameters between steps, torch's "
            "form of it (zero.py) spreads them; its memory and speed were not measured"
        )
    yield "ds_config.json was derived from the torch form and not run under DeepSpeed"


def trainer(whole: Mapping[str, Value], job: Job) -> Form:
    """Arguments of ``transformers.TrainingArguments``."""
    every, stage = CHECKPOINTING.number(whole), STAGE.number(whole)
    reason = _inexpressible(whole, job)
    if reason:
        return None, reason
    if stage == 1:
        return None, "Trainer has no ZeroRedundancyOptimizer; use ds_config.json or zero.py"
    form: dict[str, Any] = {
        "per_device_train_batch_size": MICRO_BATCH.number(whole),
        "gradient_accumulation_steps": ACCUMULATION.number(whole),
    }
    if job.half:
        form["bf16"] = True
    if not job.on_gpu:
        form["use_cpu"] = True
    if every and stage < 2:
        form["gradient_checkpointing"] = True
        form["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    if stage == 0:
        bucket = float(BUCKET_CAP.of(whole) or BUCKET_CAP.default)
        if bucket != BUCKET_CAP.default:
            form["ddp_bucket_cap_mb"] = int(bucket)
        return form, ""
    form["fsdp"] = True
    form["fsdp_config"] = {
        "version": 2,
        "reshard_after_forward": stage == 3,
        "cpu_offload": bool(CPU_OFFLOAD.of(whole)),
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": [job.block_class],
        "activation_checkpointing": bool(every),
    }
    return form, ""


def accelerate(whole: Mapping[str, Value], job: Job) -> Form:
    """A configuration file of ``accelerate launch`` with FSDP2."""
    stage = STAGE.number(whole)
    if stage < 2:
        return None, f"stage {stage} does not shard parameters, so FSDP has nothing to do"
    reason = _inexpressible(whole, job)
    if reason:
        return None, reason
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": "bf16" if job.half else "no",
        "num_machines": job.nodes,
        "num_processes": job.world_size,
        "use_cpu": not job.on_gpu,
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": stage == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": job.block_class,
            "fsdp_offload_params": bool(CPU_OFFLOAD.of(whole)),
            "fsdp_activation_checkpointing": bool(CHECKPOINTING.number(whole)),
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        },
    }, ""


def fsdp_notes(whole: Mapping[str, Value], job: Job) -> Iterator[str]:
    """What Trainer's and Accelerate's forms of a sharded stage cannot say."""
    micro, times = MICRO_BATCH.number(whole), ACCUMULATION.number(whole)
    if times > 1:
        # accelerate launch refuses a file with a key that it does not know
        yield (
            "accelerate_fsdp.yaml has no place for accumulation: build "
            f"Accelerator(gradient_accumulation_steps={times}) in the script, or set "
            f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={times}, and load batches of {micro}"
        )
    else:
        yield f"accelerate_fsdp.yaml has no place for the batch: load batches of {micro}"
    if job.half:
        yield (
            "Trainer and Accelerate also reduce gradients in bfloat16 by default; zero.py, as "
            "measured, in float32"
        )


def _inexpressible(whole: Mapping[str, Value], job: Job) -> str:
    """Why Trainer and Accelerate cannot say it."""
    if CHECKPOINTING.number(whole) > 1:
        return "it checkpoints all blocks or none, not every second or fourth"
    if STAGE.number(whole) < 2:
        return ""
    if not job.on_gpu:
        return "it shards on GPUs alone, and would train plain copies on a CPU; use zero.py"
    if not job.block_class:
        return "it wraps blocks by the name of their class, and the job names no blocks"
    for name in (SHARD_GROUP.name, RESHARD_GROUP.name, SYNC_EACH.name):
        if whole.get(name):
            return f"it has no {name}={whole[name]}"
    if (BLOCKS_PER_UNIT.number(whole) or 1) > 1:
        return "it gathers each block by itself"
    return ""


# -----------------------------------------------------------------------------
# What a form has no place for.


def _in_deepspeed(whole: Mapping[str, Value]) -> set[str]:
    """Knobs that ``ds_config.json`` says, or has a note of its own on."""
    said = {r.name for r in (STAGE, MICRO_BATCH, ACCUMULATION, CHECKPOINTING, CPU_OFFLOAD)}
    if STAGE.number(whole) == 3:
        said |= {SHARD_GROUP.name, RESHARD_GROUP.name}
    return said | {BUCKET_CAP.name}


def _in_frameworks(whole: Mapping[str, Value]) -> set[str]:
    """Knobs that Trainer's and Accelerate's forms say, or have a note of their own on."""
    said = {r.name for r in (STAGE, MICRO_BATCH, ACCUMULATION, CHECKPOINTING, CPU_OFFLOAD)}
    bucket = float(BUCKET_CAP.of(whole) or BUCKET_CAP.default)
    return said | {BUCKET_CAP.name} if bucket.is_integer() else said


def left_out_notes(
    form: str, said: set[str], whole: Mapping[str, Value], trials: Sequence[Trial]
) -> Iterator[str]:
    """Which knobs that were measured a form cannot carry, and what that costs, in one line.

    Args:
        form: the file's name.
        said: knobs that it says.
        whole: the configuration.
        trials: of the search, for the cost.

    """
    stage = STAGE.number(whole)
    lost: dict[str, Value] = {}
    for record in knobs.of(Use.ZERO):
        value = record.of(whole)
        of_wrapper = isinstance(record, ddp.DdpArgument)
        stages = (0, 1) if of_wrapper else record.knob.when.get(STAGE.name, (stage,))
        set_here = value is not None and not same_value(value, record.default)
        if record.name not in said and set_here and stage in stages:
            lost[record.name] = value
    if lost:
        named = ", ".join(f"{name}={str(v).lower()}" for name, v in lost.items())
        yield f"{form} has no place for {named}: {_cost_without(lost, whole, trials)}"


def _cost_without(
    lost: Mapping[str, Value], whole: Mapping[str, Value], trials: Sequence[Trial]
) -> str:
    """How much slower the same configuration was without some knobs, where that was measured."""
    without = {**whole, **{name: knobs.by_name[name].default for name in lost}}
    with_them = _mean_cost(whole, whole, trials)
    plain = _mean_cost(without, whole, trials)
    if with_them is None or plain is None:
        return "what that costs was not measured"
    return f"without, a step took {100 * (plain / with_them - 1):+.1f}% in this search"


def _mean_cost(
    wanted: Mapping[str, Value], whole: Mapping[str, Value], trials: Sequence[Trial]
) -> float | None:
    """Mean over the trials of a configuration; ``None`` where there was none."""
    costs = [
        trial.cost
        for trial in trials
        if trial.status is Status.OK
        and trial.cost is not None
        and all(same_value(wanted[n], v) for n, v in trial.configuration.items() if n in wanted)
        and all(n in trial.configuration or same_value(wanted[n], whole[n]) for n in wanted)
    ]
    return statistics.fmean(costs) if costs else None


# -----------------------------------------------------------------------------
# A configuration as lines of Python that build exactly it with torch alone.

_HEAD = '''"""Built from a measured configuration; call `build`, then `train_step` each step.

`blocks` are the repeated modules of `model` in order; `make_optimizer(parameters)` makes yours;
`loss_of(model, batch)` is the mean loss of a batch; `micro_batches` has {times} batches of {micro}.
"""
'''


def training_code(whole: Mapping[str, Value], job: Job) -> str:
    """The whole file."""
    stage = STAGE.number(whole)
    head = _HEAD.format(times=ACCUMULATION.number(whole), micro=MICRO_BATCH.number(whole))
    body = _replicated(whole, job) if stage < 2 else _sharded(whole, job)
    parts = [head, *_imports(whole, job), "", "", "def build(model, blocks, make_optimizer):"]
    parts += [f"    {line}".rstrip() for line in [*_checkpointing(whole), *body]]
    parts += ["", "", *_train_step(whole, job)]
    return "\n".join([*parts, ""])


def _imports(whole: Mapping[str, Value], job: Job) -> list[str]:
    stage = STAGE.number(whole)
    lines = ["import contextlib", "", "import torch"]
    if stage >= 2:
        names = ["MixedPrecisionPolicy"] if _by_policy(whole, job) else []
        names = (["CPUOffloadPolicy"] if CPU_OFFLOAD.of(whole) else []) + names
        lines += [
            "from torch.distributed.device_mesh import init_device_mesh",
            f"from torch.distributed.fsdp import {', '.join([*names, 'fully_shard'])}",
        ]
    if stage == 1:
        lines.append("from torch.distributed.optim import ZeroRedundancyOptimizer")
    if stage < 2:
        lines.append("from torch.nn.parallel import DistributedDataParallel")
    if CHECKPOINTING.number(whole):
        lines.append("from torch.utils.checkpoint import checkpoint")
    return lines


def _by_policy(whole: Mapping[str, Value], job: Job) -> bool:
    sharded = STAGE.number(whole) >= 2
    return job.half and sharded and MIXED_PRECISION.of(whole) != "autocast"


def _checkpointing(whole: Mapping[str, Value]) -> list[str]:
    every = CHECKPOINTING.number(whole)
    if not every:
        return []
    chosen = "blocks" if every == 1 else f"blocks[{every - 1}::{every}]"
    return [
        f"for block in {chosen}:",
        "    def forward(*args, own=block.forward, **kwargs):",
        "        return checkpoint(own, *args, use_reentrant=False, **kwargs)",
        "    block.forward = forward",
    ]


def _fused(whole: Mapping[str, Value]) -> list[str]:
    choice = IMPLEMENTATION.of(whole)
    if choice in (None, "default"):
        return []
    return [f"# make_optimizer must give its optimizer {choice}=True"]


def _replicated(whole: Mapping[str, Value], job: Job) -> list[str]:
    arguments = ["model"]
    if job.on_gpu:
        arguments.append("device_ids=[torch.cuda.current_device()]")
    arguments += [f"{name}={value!r}" for name, value in ddp.arguments(whole).items()]
    lines = [f"net = DistributedDataParallel({', '.join(arguments)})", *_fused(whole)]
    if STAGE.number(whole) == 0:
        return [*lines, "return net, make_optimizer(model.parameters())"]
    return [
        *lines,
        "whole = make_optimizer([p for p in model.parameters() if p.requires_grad])",
        "groups = [{'params': list(group['params'])} for group in whole.param_groups]",
        "def mine(parts, **_):  # this rank's parameters, in the groups that they were in",
        "    for group, part in zip(whole.param_groups, parts, strict=True):",
        "        group['params'] = part['params']",
        "    kept = {p for part in parts for p in part['params']}",
        "    for parameter in [p for p in whole.state if p not in kept]:",
        "        del whole.state[parameter]",
        "    return whole",
        "return net, ZeroRedundancyOptimizer(groups, mine)",
    ]


def _sharded(whole: Mapping[str, Value], job: Job) -> list[str]:
    stage, group = STAGE.number(whole), SHARD_GROUP.number(whole)
    kind = "cuda" if job.on_gpu else "cpu"
    if group:
        shape = f"({job.world_size // group}, {group}), mesh_dim_names=('replicate', 'shard')"
    else:
        shape = f"({job.world_size},), mesh_dim_names=('shard',)"
    reshard: bool | int = False if stage == 2 else RESHARD_GROUP.number(whole) or True
    lines = [
        f"mesh = init_device_mesh({kind!r}, {shape})",
        f"how = dict(mesh=mesh, reshard_after_forward={reshard})",
    ]
    if _by_policy(whole, job):
        lines += [
            "how['mp_policy'] = MixedPrecisionPolicy(",
            "    param_dtype=torch.bfloat16, reduce_dtype=torch.float32",
            ")",
        ]
    if CPU_OFFLOAD.of(whole):
        lines.append("how['offload_policy'] = CPUOffloadPolicy()")
    size = BLOCKS_PER_UNIT.number(whole) or 1
    if size == 1:
        lines += ["for block in blocks:", "    fully_shard(block, **how)"]
    else:
        lines += [
            f"for first in range(0, len(blocks), {size}):",
            f"    unit = list(blocks[first : first + {size}])",
            "    fully_shard(unit if len(unit) > 1 else unit[0], **how)",
        ]
    if _by_policy(whole, job):
        lines += [
            "how['mp_policy'] = MixedPrecisionPolicy(",
            "    param_dtype=torch.bfloat16, reduce_dtype=torch.float32,",
            "    output_dtype=torch.float32,  # of the outermost module alone",
            ")",
        ]
    lines += ["fully_shard(model, **how)"]
    if isinstance(reshard, bool):
        lines += [f"model.set_reshard_after_forward({reshard})  # the outermost module too"]
    lines += _prefetch(whole, size)
    trainable = "[p for p in model.parameters() if p.requires_grad]"
    return [*lines, *_fused(whole), f"return model, make_optimizer({trainable})"]


def _prefetch(whole: Mapping[str, Value], size: int) -> list[str]:
    ahead, behind = FORWARD_PREFETCH.number(whole), BACKWARD_PREFETCH.number(whole)
    if not ahead and not behind:
        return []
    lines = [f"units = blocks[::{size}]", "for place, unit in enumerate(units):"]
    if ahead:
        nearby = f"list(units[place + 1 : place + {1 + ahead}])"
        lines.append(f"    unit.set_modules_to_forward_prefetch({nearby})")
    if behind:
        lines.append(
            "    unit.set_modules_to_backward_prefetch("
            f"list(units[max(0, place - {behind}) : place])[::-1])"
        )
    return lines


def _train_step(whole: Mapping[str, Value], job: Job) -> list[str]:
    sharded, times = STAGE.number(whole) >= 2, ACCUMULATION.number(whole)
    autocast = job.half and not _by_policy(whole, job)
    lines = ["def train_step(net, optimizer, loss_of, micro_batches):"]
    lines += ["    for number, batch in enumerate(micro_batches, start=1):"]
    last = f"number == {times}"
    if sharded:
        sync = "True" if SYNC_EACH.of(whole) else last
        lines += [
            f"        net.set_requires_gradient_sync({sync})",
            f"        net.set_is_last_backward({last})",
            "        waiting = contextlib.nullcontext()",
        ]
    else:
        lines += [f"        waiting = contextlib.nullcontext() if {last} else net.no_sync()"]
    scale = f" / {times}" if times > 1 else ""
    lines += ["        with waiting:"]
    if autocast:
        kind = "cuda" if job.on_gpu else "cpu"
        lines += [f"            with torch.autocast({kind!r}, torch.bfloat16):"]
        lines += [f"                loss = loss_of(net, batch){scale}"]
    else:
        lines += [f"            loss = loss_of(net, batch){scale}"]
    lines += ["            loss.backward()", "    optimizer.step()"]
    return [*lines, "    optimizer.zero_grad(set_to_none=True)"]
