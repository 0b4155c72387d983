"""The knobs of ZeRO training (``runner=zero``) that only built-in jobs have. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from perfsearch.core.knob import Kind, Knob, Numerics, Part, Scope
from perfsearch.knobs import base, batch, ddp, fsdp, optimizer
from perfsearch.knobs.base import Job, Record, Use
from perfsearch.knobs.batch import ACCUMULATION, MICRO_BATCH, Batch, BatchJob
from perfsearch.knobs.fsdp import SHARDED, WHOLE_SHARDED

_ZERO = frozenset({Use.ZERO})


def _smaller_groups(knob: Knob, job: Job) -> Knob | str:
    world = job.machine.world_size
    parts = [d for d in range(2, world) if world % d == 0]
    if not parts:
        return f"{world} ranks have no smaller groups of equal size"
    return replace(knob, values=(0, *parts))


CHECKPOINTING = Record(
    Knob(
        "activation_checkpointing", Kind.ORDINAL, 0, values=(0, 4, 2, 1),
        help="every so many blocks one computes its activations again; 0 is none, 1 all",
        shortens=(Part.COMPUTING,),
    ),
    uses=frozenset({Use.ZERO, Use.SCRIPT}), effect=82, zero_effect=90,
)  # fmt: skip

BLOCKS_PER_UNIT = Record(
    Knob(
        "blocks_per_unit", Kind.ORDINAL, 1, values=(1, 2, 4), numerics=Numerics.REORDERED,
        when=SHARDED, help="blocks whose parameters are gathered together",
        shortens=(Part.COMMUNICATION,),
    ),
    uses=_ZERO, zero_effect=80,
)  # fmt: skip

SHARD_GROUP = Record(
    Knob(
        "shard_group_size", Kind.ORDINAL, 0, values=(0,), unit="ranks", scope=Scope.GROUP,
        numerics=Numerics.REORDERED, when=SHARDED, shortens=(Part.COMMUNICATION,),
        help="ranks that one copy of the model is spread over; 0 is all of them",
    ),
    uses=_ZERO, zero_effect=40, fit=_smaller_groups,
)  # fmt: skip

SYNC_EACH = Record(
    Knob(
        "gradient_sync_each", Kind.BOOLEAN, False, numerics=Numerics.REORDERED, when=SHARDED,
        help="reduce gradients after every micro-batch: less memory, more communication",
        shortens=(Part.COMMUNICATION,),
    ),
    uses=_ZERO, zero_effect=20,
)  # fmt: skip

RESHARD_GROUP = Record(
    Knob(
        "reshard_group_size", Kind.ORDINAL, 0, values=(0,), unit="ranks", when=WHOLE_SHARDED,
        help="ranks that parameters are spread over between forward and backward; 0 is the whole "
        "group", shortens=(Part.COMMUNICATION,),
    ),
    uses=_ZERO, zero_effect=10, fit=_smaller_groups,
)  # fmt: skip

MIXED_PRECISION = Record(
    Knob(
        "mixed_precision", Kind.CATEGORICAL, "policy", values=("policy", "autocast"),
        numerics=Numerics.ALTERING, when=SHARDED, shortens=(Part.COMPUTING, Part.COMMUNICATION),
        help="the job's own precision in stages 2 and 3: parameters cast as they are "
        "gathered, or operation by operation",
    ),
    uses=_ZERO, zero_effect=1,
)  # fmt: skip

RECORDS = (
    CHECKPOINTING, BLOCKS_PER_UNIT, SHARD_GROUP, SYNC_EACH, RESHARD_GROUP, MIXED_PRECISION,
)  # fmt: skip

_OF_RUNNER = base.by_effect(
    (*batch.RECORDS, *fsdp.RECORDS, *ddp.RECORDS, *optimizer.RECORDS, *RECORDS), Use.ZERO
)

EFFECT_ORDER = tuple(record.name for record in _OF_RUNNER)
"""Every knob of this runner, the one with the largest expected effect first."""


@dataclass(frozen=True)
class _Ranks:
    """As much of the devices as the knobs ask for."""

    device: str
    world_size: int
    nproc: int = 1
    nnodes: int = 1
    cores: int = 1


def declare(batches: Batch, on_gpu: bool) -> tuple[list[Knob], dict[str, str]]:
    """Every knob that exists here, and why each other one does not."""
    ranks = _Ranks("cuda" if on_gpu else "cpu", batches.world_size)
    takes = frozenset(r.parameter for r in ddp.constructor_records())
    job = BatchJob(ranks, {}, takes, batch=batches)
    return base.declare(_OF_RUNNER, job)


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
    today = {record.name: record.default for record in _OF_RUNNER}
    exempt = (MICRO_BATCH.name, ACCUMULATION.name) if free else ()
    return base.applicable(knobs, declared, absent, today, allowed, exempt)
