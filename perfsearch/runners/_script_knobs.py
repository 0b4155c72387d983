"""The knobs of an unchanged script: what it builds, what its environment and arguments set."""

from __future__ import annotations

from collections.abc import Mapping

from perfsearch.core.knob import Kind, Knob, Numerics, Scope, Value
from perfsearch.core.narrow import SEARCH
from perfsearch.instrument.mapping import current
from perfsearch.runners._nccl_knobs import Made, nccl_knobs
from perfsearch.runners._script_objects import (
    MAKERS,
    MISSING,
    ScriptSurroundings,
    at_todays_value,
)

EFFECT_ORDER = (
    "micro_batch",
    "zero_stage",
    "forward_prefetch",
    "backward_prefetch",
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
    "find_unused_parameters",
    "static_graph",
    "pin_memory",
    "persistent_workers",
    "prefetch_factor",
    "cpu_offload",
)
"""The knob with the largest expected effect first; mapped ones of other names come last."""


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
    for name, maker in MAKERS.items():
        if name in {m.name for m in where.maps}:
            continue  # the script's own argument is the surer way
        if through is not None and name not in through:
            made.append((name, MISSING.get(name, "the script makes nothing that takes it")))
        elif name == "first_bucket_mb" and "bucket_cap_mb_list" not in where.torch_takes:
            made.append((name, "the installed torch takes no list of bucket sizes"))
        elif name in ("pin_memory", "cpu_offload") and not where.on_gpu:
            made.append((name, "no GPU is used"))
        elif name == "static_graph" and where.facts is not None and where.facts.accumulates:
            why = "torch cannot begin a static graph with gradients that are not reduced (no_sync)"
            made.append((name, why))
        elif name == "optimizer_implementation" and _has_one_implementation(where):
            made.append((name, "the script's optimizer has no other"))
        elif name == "find_unused_parameters" and not _looks_for_unused(where):
            made.append((name, "the script does not ask for it"))
        else:
            made.append(at_todays_value(maker(where), where.facts))
    switch = "cudnn_benchmark"
    if where.on_gpu:
        knob = Knob(
            switch, Kind.BOOLEAN, False, numerics=Numerics.REORDERED,
            help="cuDNN tries its algorithms and keeps the fastest",
        )  # fmt: skip
        made.append(at_todays_value(knob, where.facts))
    else:
        made.append((switch, "no GPU is used"))
    return made


def _has_one_implementation(where: ScriptSurroundings) -> bool:
    return where.facts is not None and where.facts.implementations == ["default"]


def _looks_for_unused(where: ScriptSurroundings) -> bool:
    return where.facts is not None and where.facts.values.get("find_unused_parameters") is True


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
