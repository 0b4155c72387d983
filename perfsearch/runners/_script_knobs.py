"""The knobs of an unchanged script: what it builds, what its environment and arguments set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from perfsearch.instrument.facts import Facts
from perfsearch.instrument.mapping import Mapped, current
from perfsearch.runners._nccl_knobs import Made, nccl_knobs
from perfsearch.search.errors import BadInputError
from perfsearch.search.knob import Configuration, Kind, Knob, Numerics, Scope, Value
from perfsearch.search.narrow import SEARCH
from perfsearch.workers.environment import Hardware

EFFECT_ORDER = (
    "micro_batch",
    "zero_stage",
    "nccl_nsocks_perthread",
    "nccl_socket_nthreads",
    "bucket_cap_mb",
    "dataloader_workers",
    "activation_checkpointing",
    "optimizer_implementation",
    "omp_num_threads",
    "cudnn_benchmark",
    "gradient_as_bucket_view",
    "nccl_algo",
    "nccl_proto",
    "nccl_max_ctas",
    "nccl_min_ctas",
    "nccl_buffsize",
    "first_bucket_mb",
    "fsdp_backward_prefetch",
    "fsdp_forward_prefetch",
    "static_graph",
    "pin_memory",
    "persistent_workers",
    "prefetch_factor",
)
"""The knob with the largest expected effect first; mapped ones of other names come last."""


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
    facts: Facts | None
    draws_in_loader: bool | None = None
    free: bool = False
    wanted: Mapping[str, Any] = field(default_factory=dict)
    torch_takes: frozenset[str] = field(default_factory=frozenset)

    @property
    def on_gpu(self) -> bool:
        """Whether it runs on GPUs."""
        return self.hardware.device == "cuda"


def declare(where: ScriptSurroundings) -> tuple[list[Knob], dict[str, str]]:
    """Every knob that the script has, and why each other one does not exist for it."""
    knobs: list[Knob] = []
    absent: dict[str, str] = {}
    off = all(where.environ.get(f"NCCL_{way}_DISABLE") == "1" for way in ("P2P", "SHM"))
    sockets = where.hardware.nnodes > 1 or off
    for made in (
        *_of_objects(where),
        _threads(where),
        *nccl_knobs(where.environ, where.on_gpu, sockets),
        *_mapped(where),
    ):
        if isinstance(made, Knob):
            knobs.append(made)
        else:
            absent[made[0]] = made[1]
    mapped = {m.name for m in where.maps}
    knobs = [k for k in knobs if k.name not in mapped or k.scope is Scope.PROCESS]
    order = {name: place for place, name in enumerate(EFFECT_ORDER)}
    return sorted(knobs, key=lambda k: order.get(k.name, len(order))), absent


def _of_objects(where: ScriptSurroundings) -> list[Made]:
    through = None if where.facts is None else where.facts.changeable()
    made: list[Made] = []
    for name, maker in _MAKERS.items():
        if name in {m.name for m in where.maps}:
            continue  # the script's own argument is the surer way
        if through is not None and name not in through:
            made.append((name, _MISSING.get(name, "the script makes nothing that takes it")))
        elif name == "first_bucket_mb" and "bucket_cap_mb_list" not in where.torch_takes:
            made.append((name, "the installed torch takes no list of bucket sizes"))
        elif name == "pin_memory" and not where.on_gpu:
            made.append((name, "no GPU is used"))
        else:
            made.append(_at_todays_value(maker(where), where.facts))
    switch = "cudnn_benchmark"
    if where.on_gpu:
        knob = Knob(
            switch, Kind.BOOLEAN, False, numerics=Numerics.REORDERED,
            help="cuDNN tries its algorithms and keeps the fastest",
        )  # fmt: skip
        made.append(_at_todays_value(knob, where.facts))
    else:
        made.append((switch, "no GPU is used"))
    return made


def _at_todays_value(knob: Knob, facts: Facts | None) -> Knob:
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
    draws = where.draws_in_loader
    if draws is None and where.facts is not None:
        draws = where.facts.draws_in_loader
    counts = tuple(n for n in (0, 1, 2, 4, 8) if n <= most)
    return Knob(
        "dataloader_workers", Kind.ORDINAL, 0, values=counts,
        unit="processes", scope=Scope.PROCESS,
        numerics=Numerics.ALTERING if draws else Numerics.EXACT,
        help="loader processes of each rank; 0 loads in the training process",
    )  # fmt: skip


def _of_workers(name: str, values: tuple[Value, ...], default: Value, text: str) -> _Maker:
    def make(where: ScriptSurroundings) -> Knob:
        kind = Kind.BOOLEAN if isinstance(default, bool) else Kind.ORDINAL
        counts = _at_todays_value(_workers(where), where.facts).values
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


_Maker = Callable[[ScriptSurroundings], Knob]

_MAKERS: dict[str, _Maker] = {
    "bucket_cap_mb": _bucket_cap,
    "first_bucket_mb": _first_bucket,
    "gradient_as_bucket_view": _flag(
        "gradient_as_bucket_view", "gradients live in the buckets, which saves a copy"
    ),
    "static_graph": _flag("static_graph", "the same parameters are used in every step"),
    "zero_stage": _stage,
    "fsdp_backward_prefetch": _choice(
        "fsdp_backward_prefetch", ("pre", "post", "none"),
        "when FSDP gathers the next parameters of the backward pass", Scope.PROCESS, Numerics.EXACT,
    ),
    "fsdp_forward_prefetch": _flag(
        "fsdp_forward_prefetch", "FSDP gathers the next parameters of the forward pass early",
        Scope.PROCESS,
    ),
    "optimizer_implementation": _choice(
        "optimizer_implementation", ("default", "foreach", "fused"),
        "how the optimizer walks over parameters", Scope.STEP, Numerics.REORDERED,
    ),
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

_MISSING = {
    **dict.fromkeys(
        ("bucket_cap_mb", "first_bucket_mb", "gradient_as_bucket_view", "static_graph"),
        "the script makes no DistributedDataParallel",
    ),
    "zero_stage": "the script makes no FSDP module",
    "fsdp_backward_prefetch": "the script makes no FullyShardedDataParallel",
    "fsdp_forward_prefetch": "the script makes no FullyShardedDataParallel",
    "optimizer_implementation": "the script makes no torch optimizer",
    **dict.fromkeys(
        ("dataloader_workers", "prefetch_factor", "persistent_workers", "pin_memory"),
        "the script makes no DataLoader",
    ),
}


def _threads(where: ScriptSurroundings) -> Made:
    name = "omp_num_threads"
    if where.on_gpu:
        return (name, "on a GPU the host's threads do not compute")
    most = max(1, where.hardware.cores // where.hardware.nproc)
    choices = {1, most, where.threads, *(2**i for i in range(8) if 2**i <= most)}
    if len(choices) < 2:
        return (name, f"{where.hardware.nproc} ranks on {where.hardware.cores} cores leave one")
    return Knob(
        name, Kind.ORDINAL, where.threads, values=tuple(sorted(choices)), unit="threads",
        scope=Scope.PROCESS, numerics=Numerics.REORDERED, help="CPU threads of each rank",
    )  # fmt: skip


def _mapped(where: ScriptSurroundings) -> list[Made]:
    by_name = {mapped.name: mapped for mapped in where.maps}
    today = {name: current(where.arguments, mapped) for name, mapped in by_name.items()}
    made: list[Made] = []
    for name in by_name:
        if name == "micro_batch":
            made.append(_micro_batch(where, today))
        elif name == "gradient_accumulation":
            made.append((name, "it follows from micro_batch, so that the global batch stays"))
        elif name == "activation_checkpointing":
            made.append(
                Knob(name, Kind.BOOLEAN, bool(today[name]), scope=Scope.PROCESS,
                     help="activations are computed again in the backward pass")
            )  # fmt: skip
        elif isinstance(today[name], bool):
            made.append(Knob(name, Kind.BOOLEAN, today[name], scope=Scope.PROCESS))
        else:
            made.append(
                Knob(name, Kind.CATEGORICAL, today[name], values=_choices(where, name, today[name]),
                     scope=Scope.PROCESS, help=f"the script's {by_name[name]}")
            )  # fmt: skip
    return made


def _micro_batch(where: ScriptSurroundings, today: Mapping[str, Value]) -> Made:
    micro, accumulation = today["micro_batch"], today.get("gradient_accumulation")
    if not isinstance(micro, int) or isinstance(micro, bool):
        return ("micro_batch", "its value today is not among the script's arguments")
    if not isinstance(accumulation, int) and where.free:
        values: tuple[Value, ...] = tuple(micro * 2**i // 4 for i in range(6) if micro * 2**i >= 4)
        return _of_batch(micro, values)
    if not isinstance(accumulation, int):
        return (
            "micro_batch",
            "alone it would change the global batch: map gradient_accumulation too",
        )
    share = micro * accumulation
    return _of_batch(micro, tuple(d for d in range(1, share + 1) if share % d == 0))


def _of_batch(micro: int, values: tuple[Value, ...]) -> Knob:
    return Knob(
        "micro_batch", Kind.ORDINAL, micro, values=values, unit="samples", scope=Scope.PROCESS,
        numerics=Numerics.REORDERED, help="samples of one forward pass of a rank",
    )  # fmt: skip


def _choices(where: ScriptSurroundings, name: str, today: Value) -> tuple[Value, ...]:
    """Today's value and those that the user names; nothing else is known of a script's argument."""
    wanted = where.wanted.get(name)
    named = list(wanted) if isinstance(wanted, list | tuple) else [wanted]
    values = [today, *(v for v in named if v is not None and v != SEARCH)]
    return tuple(v for place, v in enumerate(values) if v not in values[:place])


def with_accumulation(configuration: Configuration, where: ScriptSurroundings) -> dict[str, Value]:
    """The configuration with the accumulation that keeps the global batch, where it is mapped."""
    whole = dict(configuration)
    by_name = {mapped.name: mapped for mapped in where.maps}
    micro = whole.get("micro_batch")
    if micro is None or "gradient_accumulation" not in by_name:
        return whole
    today = [current(where.arguments, by_name[n]) for n in ("micro_batch", "gradient_accumulation")]
    share = int(today[0] or 0) * int(today[1] or 0)
    if share % int(micro):
        raise BadInputError(
            f"runner.knobs.micro_batch={micro}: it does not divide the {share} samples that a rank "
            "trains a step today"
        )
    whole["gradient_accumulation"] = share // int(micro)
    return whole
