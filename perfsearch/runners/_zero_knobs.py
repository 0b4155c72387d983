"""The knobs of ZeRO training, and where each of them exists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perfsearch.core.errors import nearest
from perfsearch.core.knob import Kind, Knob, Numerics, Scope
from perfsearch.core.narrow import SEARCH, KnobError
from perfsearch.runners._zero_batch import Batch

EFFECT_ORDER = (
    "micro_batch",
    "zero_stage",
    "activation_checkpointing",
    "gradient_accumulation",
    "blocks_per_unit",
    "forward_prefetch",
    "gradient_as_bucket_view",
    "shard_group_size",
    "bucket_cap_mb",
    "backward_prefetch",
    "gradient_sync_each",
    "optimizer_implementation",
    "reshard_group_size",
    "cpu_offload",
    "mixed_precision",
)
"""Every knob of this runner, the one with the largest expected effect first."""

_WHOLE = (0, 1)
_SHARDED = (2, 3)


def declare(batch: Batch, on_gpu: bool) -> tuple[list[Knob], dict[str, str]]:
    """Every knob that exists here, and why each other one does not."""
    world = batch.world_size
    changes_batch = Numerics.ALTERING if batch.rule == "free" else Numerics.REORDERED
    parts = [d for d in range(2, world) if world % d == 0]
    knobs = [
        _choice("zero_stage", (0, 1, 2, 3), 0, "what ranks share out: nothing, optimizer state, "
                "also gradients, also parameters while a step runs", Numerics.REORDERED),
        _choice("micro_batch", batch.micro_batches(), batch.micro_batch,
                "samples of one forward pass of a rank", changes_batch, unit="samples"),
        _choice("activation_checkpointing", (0, 4, 2, 1), 0,
                "every so many blocks one computes its activations again; 0 is none, 1 all",
                Numerics.EXACT),
        _choice("bucket_cap_mb", (5.0, 25.0, 100.0, 400.0), 25.0,
                "gradients are reduced in buckets of this size", Numerics.REORDERED, unit="MiB",
                stages=_WHOLE),
        _choice("blocks_per_unit", (1, 2, 4), 1, "blocks whose parameters are gathered together",
                Numerics.REORDERED, stages=_SHARDED),
        _choice("forward_prefetch", (0, 1, 2), 0,
                "units gathered ahead in the forward pass; 0 is torch's own way",
                Numerics.EXACT, stages=_SHARDED),
        _choice("backward_prefetch", (0, 1, 2), 0,
                "units gathered ahead in the backward pass; 0 is torch's own way",
                Numerics.EXACT, stages=(3,)),
        Knob("gradient_as_bucket_view", Kind.BOOLEAN, False, when={"zero_stage": _WHOLE},
             help="gradients live in the buckets, which saves a copy"),
        Knob("gradient_sync_each", Kind.BOOLEAN, False, when={"zero_stage": _SHARDED},
             numerics=Numerics.REORDERED,
             help="reduce gradients after every micro-batch: less memory, more communication"),
        Knob("optimizer_implementation", Kind.CATEGORICAL, "default",
             values=("default", "foreach", "fused"), numerics=Numerics.REORDERED,
             help="how the optimizer walks over parameters"),
        Knob("mixed_precision", Kind.CATEGORICAL, "policy", values=("policy", "autocast"),
             numerics=Numerics.ALTERING, when={"zero_stage": _SHARDED},
             help="the job's own precision in stages 2 and 3: parameters cast as they are "
             "gathered, or operation by operation"),
    ]  # fmt: skip
    absent: dict[str, str] = {}
    if batch.rule == "free":
        knobs.append(
            _choice("gradient_accumulation", batch.accumulations(), batch.accumulation,
                    "micro-batches of a step", changes_batch, unit="micro-batches")
        )  # fmt: skip
    else:
        absent["gradient_accumulation"] = "with batch=fixed it follows from micro_batch"
    if parts:
        knobs.append(
            _choice("shard_group_size", (0, *parts), 0,
                    "ranks that one copy of the model is spread over; 0 is all of them",
                    Numerics.REORDERED, unit="ranks", stages=_SHARDED, scope=Scope.GROUP)
        )  # fmt: skip
        knobs.append(
            _choice("reshard_group_size", (0, *parts), 0,
                    "ranks that parameters are spread over between forward and backward; 0 is "
                    "the whole group", Numerics.EXACT, unit="ranks", stages=(3,))
        )  # fmt: skip
    else:
        reason = f"{world} ranks have no smaller groups of equal size"
        absent["shard_group_size"] = absent["reshard_group_size"] = reason
    if on_gpu:
        knobs.append(
            Knob("cpu_offload", Kind.BOOLEAN, False, when={"zero_stage": _SHARDED},
                 numerics=Numerics.REORDERED,
                 help="parameters, gradients and optimizer rest in the host's memory")
        )  # fmt: skip
    else:
        absent["cpu_offload"] = "no GPU is used"
    order = {name: place for place, name in enumerate(EFFECT_ORDER)}
    return sorted(knobs, key=lambda k: order[k.name]), absent


def _choice(
    name: str,
    values: Sequence[int | float],
    default: int | float,
    text: str,
    numerics: Numerics,
    unit: str = "",
    stages: tuple[int, ...] = (),
    scope: Scope = Scope.STEP,
) -> Knob:
    return Knob(
        name,
        Kind.ORDINAL,
        default,
        values=tuple(values),
        unit=unit,
        scope=scope,
        numerics=numerics,
        when={"zero_stage": stages} if stages else {},
        help=text,
    )


def applicable(
    knobs: Mapping[str, Any],
    declared: Sequence[Knob],
    absent: Mapping[str, str],
    allowed: Numerics,
    free: bool,
) -> tuple[dict[str, Any], dict[str, str]]:
    """What of ``runner.knobs`` there is here, and why the rest is left out.

    Args:
        knobs: as written.
        declared: knobs that exist.
        absent: others, with the reason.
        allowed: the most that a searched knob may do to the computation.
        free: whether the global batch may change, which ``batch=free`` has allowed.

    Raises:
        KnobError: an unknown knob, or one that was asked for expressly and cannot be.

    """
    by_name = {knob.name: knob for knob in declared}
    settings: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name, setting in knobs.items():
        if name in absent:
            if setting not in (SEARCH, None, False, 0):
                raise KnobError(
                    f"runner.knobs.{name}={setting}: {absent[name]}. Leave the key out."
                )
            left_out[name] = absent[name]
            continue
        if name not in by_name:
            raise KnobError(
                f"runner.knobs.{name}: no such knob. {nearest(name, {*by_name, *absent})}"
            )
        of_batch = free and name in ("micro_batch", "gradient_accumulation")
        too_much = by_name[name].numerics.rank > allowed.rank and not of_batch
        if too_much and setting == SEARCH:
            left_out[name] = f"it is {by_name[name].numerics} and numerics={allowed}"
            continue
        if too_much and isinstance(setting, list | tuple | Mapping):
            raise KnobError(
                f"runner.knobs.{name}: it is {by_name[name].numerics} and numerics={allowed}. "
                f"Set numerics={by_name[name].numerics} to search it, or pin it to one value."
            )
        settings[name] = setting
    return settings, left_out
