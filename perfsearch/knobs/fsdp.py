"""Knobs of sharding: ZeRO's stage, and what ``fully_shard`` and FSDP can be told. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from perfsearch.core.knob import Kind, Knob, Numerics, Part, Scope
from perfsearch.knobs.base import Fit, Job, Record, Taker, Use

_SHARDING = (Part.COMMUNICATION, Part.OPTIMIZER, Part.COMPUTING)


def _stage(knob: Knob, job: Job) -> Knob:
    """A script shards or it does not; all that is left to choose is when it gathers."""
    if job.use is not Use.SCRIPT:
        return knob
    once = job.seen is None or Taker.FSDP1 in job.seen.wrappers
    return replace(
        knob, default=3, values=(2, 3), numerics=Numerics.EXACT,
        scope=Scope.PROCESS if once else Scope.STEP,
        help="3 gathers parameters again for the backward pass; 2 keeps them, which takes memory",
    )  # fmt: skip


STAGE = Record(
    Knob(
        "zero_stage", Kind.ORDINAL, 0, values=(0, 1, 2, 3), numerics=Numerics.REORDERED,
        help="what ranks share out: nothing, optimizer state, also gradients, also parameters "
        "while a step runs", shortens=_SHARDING,
    ),
    uses=frozenset({Use.ZERO, Use.SCRIPT}), effect=98, zero_effect=95, fit=_stage,
    takers=(Taker.FULLY_SHARD, Taker.FSDP1), missing="the script makes no FSDP module",
)  # fmt: skip

SHARDED = {STAGE.name: (2, 3)}
"""Stages whose gradients are sharded."""
WHOLE_SHARDED = {STAGE.name: (3,)}
"""The stage whose parameters are sharded, too."""


@dataclass(frozen=True)
class _FullyShardRecord(Record):
    uses: frozenset[Use] = frozenset({Use.ZERO, Use.SCRIPT})
    takers: tuple[Taker, ...] = (Taker.FULLY_SHARD,)
    missing: str = "the script does not use fully_shard"


def _ahead(way: str) -> Fit:
    def fit(knob: Knob, job: Job) -> Knob:
        if job.use is not Use.SCRIPT:
            return knob
        return replace(
            knob, unit="units", when={} if way == "forward" else knob.when,
            help=f"units of fully_shard gathered ahead in the {way} pass; 0 is torch's own way",
        )  # fmt: skip

    return fit


FORWARD_PREFETCH = _FullyShardRecord(
    Knob(
        "forward_prefetch", Kind.ORDINAL, 0, values=(0, 1, 2), when=SHARDED,
        help="units gathered ahead in the forward pass; 0 is torch's own way",
        shortens=(Part.COMMUNICATION,),
    ),
    effect=96, zero_effect=60, fit=_ahead("forward"),
)  # fmt: skip

BACKWARD_PREFETCH = _FullyShardRecord(
    Knob(
        "backward_prefetch", Kind.ORDINAL, 0, values=(0, 1, 2), when=WHOLE_SHARDED,
        help="units gathered ahead in the backward pass; 0 is torch's own way",
        shortens=(Part.COMMUNICATION,),
    ),
    effect=94, zero_effect=25, fit=_ahead("backward"),
)  # fmt: skip


def _offload(knob: Knob, job: Job) -> Knob | str:
    if not job.on_gpu:
        return "no GPU is used"
    if job.use is not Use.SCRIPT:
        return knob
    return replace(
        knob, when={},
        help="parameters, gradients and optimizer of fully_shard rest in the host's memory",
    )  # fmt: skip


CPU_OFFLOAD = _FullyShardRecord(
    Knob(
        "cpu_offload", Kind.BOOLEAN, False, numerics=Numerics.REORDERED, when=SHARDED,
        help="parameters, gradients and optimizer rest in the host's memory", shortens=_SHARDING,
    ),
    effect=40, zero_effect=5, fit=_offload, script_scope=Scope.PROCESS,
)  # fmt: skip


@dataclass(frozen=True)
class _Fsdp1Record(Record):
    uses: frozenset[Use] = frozenset({Use.SCRIPT})
    takers: tuple[Taker, ...] = (Taker.FSDP1,)
    missing: str = "the script makes no FullyShardedDataParallel"
    script_scope: Scope | None = Scope.PROCESS


FSDP1_BACKWARD = _Fsdp1Record(
    Knob(
        "fsdp_backward_prefetch", Kind.CATEGORICAL, "pre", values=("pre", "post", "none"),
        help="when FSDP gathers the next parameters of the backward pass",
    ),
    effect=54,
)  # fmt: skip

FSDP1_FORWARD = _Fsdp1Record(
    Knob(
        "fsdp_forward_prefetch", Kind.BOOLEAN, False,
        help="FSDP gathers the next parameters of the forward pass early",
    ),
    effect=52,
)  # fmt: skip

RECORDS: tuple[Record, ...] = (
    STAGE, FORWARD_PREFETCH, BACKWARD_PREFETCH, CPU_OFFLOAD, FSDP1_BACKWARD, FSDP1_FORWARD,
)  # fmt: skip
