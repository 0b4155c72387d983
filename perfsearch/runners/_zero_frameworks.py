"""The same configuration for DeepSpeed, HF Trainer and Accelerate, as far as each can say it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from perfsearch.core.knob import Value
from perfsearch.parallel.wrapper import DEFAULT_BUCKET_MB

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


def _number(whole: Mapping[str, Value], name: str) -> int:
    return int(whole.get(name) or 0)


def deepspeed(whole: Mapping[str, Value], job: Job) -> dict[str, Any]:
    """``ds_config.json``; optimizer and schedule stay the client's."""
    stage = _number(whole, "zero_stage")
    zero: dict[str, Any] = {"stage": stage}
    bucket = float(whole.get("bucket_cap_mb") or DEFAULT_BUCKET_MB)
    if stage in (0, 1) and bucket != DEFAULT_BUCKET_MB:
        zero["reduce_bucket_size"] = int(bucket * _MIB / (2 if job.half else 4))
    if stage >= 2 and whole.get("cpu_offload"):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    if stage == 3 and _number(whole, "shard_group_size"):
        zero["mics_shard_size"] = _number(whole, "shard_group_size")
    if stage == 3 and _number(whole, "reshard_group_size"):
        zero["zero_hpz_partition_size"] = _number(whole, "reshard_group_size")
    micro, times = _number(whole, "micro_batch"), _number(whole, "gradient_accumulation")
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
    every = _number(whole, "activation_checkpointing")
    if every:
        yield (
            "ds_config.json: DeepSpeed checkpoints activations where the model calls it; wrap "
            f"{'every block' if every == 1 else f'one block in {every}'} as zero.py does"
        )
    if _number(whole, "zero_stage") == 2:
        yield (
            "ds_config.json: DeepSpeed's stage 2 keeps whole parameters between steps, torch's "
            "form of it (zero.py) spreads them; its memory and speed were not measured"
        )
    yield "ds_config.json was derived from the torch form and not run under DeepSpeed"


def trainer(whole: Mapping[str, Value], job: Job) -> Form:
    """Arguments of ``transformers.TrainingArguments``."""
    every, stage = _number(whole, "activation_checkpointing"), _number(whole, "zero_stage")
    reason = _inexpressible(whole, job)
    if reason:
        return None, reason
    form: dict[str, Any] = {
        "per_device_train_batch_size": _number(whole, "micro_batch"),
        "gradient_accumulation_steps": _number(whole, "gradient_accumulation"),
    }
    if job.half:
        form["bf16"] = True
    if not job.on_gpu:
        form["use_cpu"] = True
    if every and stage < 2:
        form["gradient_checkpointing"] = True
        form["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    if stage == 1:
        return None, "Trainer has no ZeroRedundancyOptimizer; use ds_config.json or zero.py"
    if stage == 0:
        bucket = float(whole.get("bucket_cap_mb") or DEFAULT_BUCKET_MB)
        if bucket != DEFAULT_BUCKET_MB:
            form["ddp_bucket_cap_mb"] = int(bucket)
        return form, ""
    offload = " offload" if whole.get("cpu_offload") else ""
    form["fsdp"] = ("full_shard" if stage == 3 else "shard_grad_op") + offload + " auto_wrap"
    form["fsdp_config"] = {
        "fsdp_version": 2,
        "reshard_after_forward": stage == 3,
        "transformer_layer_cls_to_wrap": [job.block_class],
        "activation_checkpointing": bool(every),
    }
    return form, ""


def accelerate(whole: Mapping[str, Value], job: Job) -> Form:
    """A configuration file of ``accelerate launch`` with FSDP2."""
    stage = _number(whole, "zero_stage")
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
            "fsdp_offload_params": bool(whole.get("cpu_offload")),
            "fsdp_activation_checkpointing": bool(_number(whole, "activation_checkpointing")),
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        },
    }, ""


def fsdp_notes(whole: Mapping[str, Value], job: Job) -> Iterator[str]:
    """What Trainer's and Accelerate's forms of a sharded stage cannot say."""
    micro, times = _number(whole, "micro_batch"), _number(whole, "gradient_accumulation")
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
    if _number(whole, "activation_checkpointing") > 1:
        return "it checkpoints all blocks or none, not every second or fourth"
    if _number(whole, "zero_stage") < 2:
        return ""
    if not job.block_class:
        return "it wraps blocks by the name of their class, and the job names no blocks"
    for name in ("shard_group_size", "reshard_group_size", "gradient_sync_each"):
        if whole.get(name):
            return f"it has no {name}={whole[name]}"
    if (_number(whole, "blocks_per_unit") or 1) > 1:
        return "it gathers each block by itself"
    return ""


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
