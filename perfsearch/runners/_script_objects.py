"""Knobs of what a script builds: data-parallel wrappers, loaders, optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from perfsearch.core.hardware import Hardware
from perfsearch.core.knob import Kind, Knob, Numerics, Scope, Value
from perfsearch.instrument.mapping import Mapped
from perfsearch.instrument.switch_names import FULLY_SHARD_KNOBS, LOADER_KNOBS, WRAPPER_KNOBS


class Built(Protocol):
    """What a script builds, as far as its knobs depend on it; see ``instrument.facts.Facts``."""

    wrappers: list[str]
    values: dict[str, Value]
    draws_in_loader: bool | None
    shared_out: bool
    implementations: list[str] | None
    accumulates: bool

    def changeable(self) -> dict[str, str]:
        """Knobs that can be changed in this script from outside, and through what."""


@dataclass(frozen=True)
class ScriptSurroundings:
    """What decides which knobs a script has.

    Attributes:
        hardware: devices and ranks.
        environ: the user's environment, whose settings are the baseline's.
        arguments: the script's.
        maps: knobs that it takes by these.
        threads: CPU threads of a rank today.
        facts: what the script builds; ``None``: it could not be seen, so everything may be there.
        draws_in_loader: whether loading draws random numbers, where the user says so.
        free: whether the global batch may change.
        wanted: ``runner.knobs``; the choices of mapped knobs that are the script's own come of it.
        torch_takes: what the installed ``DistributedDataParallel`` takes.

    """

    hardware: Hardware
    environ: Mapping[str, str]
    arguments: Sequence[str]
    maps: Sequence[Mapped]
    threads: int
    facts: Built | None
    draws_in_loader: bool | None = None
    free: bool = False
    wanted: Mapping[str, Any] = field(default_factory=dict)
    torch_takes: frozenset[str] = field(default_factory=frozenset)

    @property
    def on_gpu(self) -> bool:
        """Whether it runs on GPUs."""
        return self.hardware.device == "cuda"


def at_todays_value(knob: Knob, facts: Built | None) -> Knob:
    """The knob with the script's own value as its default, or torch's where it is not known."""
    today = None if facts is None else facts.values.get(knob.name)
    if today is None:
        return knob
    if knob.is_range:
        assert knob.low is not None and knob.high is not None and not isinstance(today, str)
        low, high = min(knob.low, today), max(knob.high, today)
        return replace(knob, default=today, low=low, high=high)
    if knob.contains(today):
        return replace(knob, default=today)
    if knob.kind is Kind.ORDINAL:
        values = sorted([*knob.values, today], key=lambda v: float(v or 0))
        return replace(knob, default=today, values=tuple(values))
    return replace(knob, default=today, values=(today, *knob.values))


def _bucket_cap(where: ScriptSurroundings) -> Knob:
    return Knob(
        "bucket_cap_mb", Kind.REAL, 25.0, low=1.0, high=512.0, log=True, unit="MiB",
        numerics=Numerics.REORDERED, help="gradients are reduced in buckets of this size",
    )  # fmt: skip


def _first_bucket(where: ScriptSurroundings) -> Knob:
    return Knob(
        "first_bucket_mb", Kind.ORDINAL, 1.0, values=(0.25, 1.0, 4.0, 16.0), unit="MiB",
        numerics=Numerics.REORDERED, help="size of the bucket that is ready first",
    )  # fmt: skip


def _workers(where: ScriptSurroundings) -> Knob:
    most = max(1, where.hardware.cores // where.hardware.nproc)
    draws, facts = where.draws_in_loader, where.facts
    counts = tuple(n for n in (0, 1, 2, 4, 8) if n <= most)
    if draws is None and facts is not None:
        draws = facts.draws_in_loader
        if facts.shared_out:  # one process has all samples, as the rank itself has
            counts = counts[:2]
            draws = draws or facts.values.get("dataloader_workers") not in counts
    return Knob(
        "dataloader_workers", Kind.ORDINAL, 0, values=counts,
        unit="processes", scope=Scope.PROCESS,
        numerics=Numerics.ALTERING if draws else Numerics.EXACT,
        help="loader processes of each rank; 0 loads in the training process",
    )  # fmt: skip


def _of_workers(name: str, values: tuple[Value, ...], default: Value, text: str) -> _Maker:
    def make(where: ScriptSurroundings) -> Knob:
        kind = Kind.BOOLEAN if isinstance(default, bool) else Kind.ORDINAL
        counts = at_todays_value(_workers(where), where.facts).values
        return Knob(
            name, kind, default, values=values, scope=Scope.PROCESS, help=text,
            when={"dataloader_workers": tuple(n for n in counts if n)},
        )  # fmt: skip

    return make


def _flag(name: str, text: str, scope: Scope = Scope.STEP) -> _Maker:
    return lambda where: Knob(name, Kind.BOOLEAN, False, scope=scope, help=text)


def _choice(
    name: str, values: tuple[Value, ...], text: str, scope: Scope, numerics: Numerics
) -> _Maker:
    return lambda where: Knob(
        name, Kind.CATEGORICAL, values[0], values=values, scope=scope, numerics=numerics, help=text
    )


def _stage(where: ScriptSurroundings) -> Knob:
    once = where.facts is None or "fsdp1" in where.facts.wrappers
    return Knob(
        "zero_stage", Kind.ORDINAL, 3, values=(2, 3), numerics=Numerics.EXACT,
        scope=Scope.PROCESS if once else Scope.STEP,
        help="3 gathers parameters again for the backward pass; 2 keeps them, which takes memory",
    )  # fmt: skip


def _ahead(name: str, text: str, stages: tuple[int, ...]) -> _Maker:
    def make(where: ScriptSurroundings) -> Knob:
        return Knob(
            name, Kind.ORDINAL, 0, values=(0, 1, 2), unit="units", numerics=Numerics.EXACT,
            when={"zero_stage": stages} if stages else {},
            help=f"units of fully_shard gathered ahead in the {text} pass; 0 is torch's own way",
        )  # fmt: skip

    return make


def _implementation(where: ScriptSurroundings) -> Knob:
    facts = where.facts
    names = (facts and facts.implementations) or ["default", "foreach", "fused"]
    if facts and facts.values.get("optimizer_implementation") in ("foreach", "fused"):
        names = [name for name in names if name != "default"]  # which would leave it as it is
    return Knob(
        "optimizer_implementation", Kind.CATEGORICAL, names[0], values=tuple(names),
        numerics=Numerics.REORDERED, help="how the optimizer walks over parameters",
    )  # fmt: skip


_Maker = Callable[[ScriptSurroundings], Knob]

MAKERS: dict[str, _Maker] = {
    "bucket_cap_mb": _bucket_cap,
    "first_bucket_mb": _first_bucket,
    "gradient_as_bucket_view": _flag(
        "gradient_as_bucket_view", "gradients live in the buckets, which saves a copy"
    ),
    "static_graph": _flag("static_graph", "the same parameters are used in every step"),
    "find_unused_parameters": _flag(
        "find_unused_parameters", "each step looks for parameters that get no gradient"
    ),
    "zero_stage": _stage,
    "forward_prefetch": _ahead("forward_prefetch", "forward", ()),
    "backward_prefetch": _ahead("backward_prefetch", "backward", (3,)),
    "cpu_offload": lambda where: Knob(
        "cpu_offload", Kind.BOOLEAN, False, scope=Scope.PROCESS, numerics=Numerics.REORDERED,
        help="parameters, gradients and optimizer of fully_shard rest in the host's memory",
    ),
    "fsdp_backward_prefetch": _choice(
        "fsdp_backward_prefetch", ("pre", "post", "none"),
        "when FSDP gathers the next parameters of the backward pass", Scope.PROCESS, Numerics.EXACT,
    ),
    "fsdp_forward_prefetch": _flag(
        "fsdp_forward_prefetch", "FSDP gathers the next parameters of the forward pass early",
        Scope.PROCESS,
    ),
    "optimizer_implementation": _implementation,
    "dataloader_workers": _workers,
    "prefetch_factor": _of_workers(
        "prefetch_factor", (2, 4, 8), 2, "batches that each loader process keeps ready"
    ),
    "persistent_workers": _of_workers(
        "persistent_workers", (False, True), False, "loader processes live on between epochs"
    ),
    "pin_memory": _flag(
        "pin_memory", "batches are copied to page-locked memory", Scope.PROCESS
    ),
}  # fmt: skip

MISSING = {
    **dict.fromkeys(
        WRAPPER_KNOBS,
        "the script makes no DistributedDataParallel",
    ),
    "zero_stage": "the script makes no FSDP module",
    **dict.fromkeys(FULLY_SHARD_KNOBS, "the script does not use fully_shard"),
    "fsdp_backward_prefetch": "the script makes no FullyShardedDataParallel",
    "fsdp_forward_prefetch": "the script makes no FullyShardedDataParallel",
    "optimizer_implementation": "the script makes no torch optimizer",
    **dict.fromkeys(
        LOADER_KNOBS,
        "the script makes no DataLoader",
    ),
}
