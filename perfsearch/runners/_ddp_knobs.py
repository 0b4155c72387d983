"""The knobs of data-parallel training, and where each of them exists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from perfsearch.core.hardware import Hardware, threads_today
from perfsearch.core.knob import Kind, Knob, Numerics, Scope
from perfsearch.runners._nccl_knobs import Made, nccl_knobs
from perfsearch.workloads.spec import Traits

EFFECT_ORDER = (
    "nccl_nsocks_perthread",
    "nccl_socket_nthreads",
    "bucket_cap_mb",
    "dataloader_workers",
    "optimizer_implementation",
    "compile_mode",
    "channels_last",
    "cudnn_benchmark",
    "omp_num_threads",
    "gradient_as_bucket_view",
    "hierarchical_group_size",
    "nccl_algo",
    "nccl_proto",
    "nccl_max_ctas",
    "nccl_min_ctas",
    "nccl_buffsize",
    "first_bucket_mb",
    "static_graph",
    "pin_memory",
    "prefetch_factor",
)
"""Every knob of this runner, the one with the largest expected effect first."""


@dataclass(frozen=True)
class Surroundings:
    """What decides which knobs there are.

    Attributes:
        hardware: devices and ranks.
        traits: of the workload.
        environ: the user's environment, whose settings are the baseline's.
        wrapper_parameters: what the installed ``DistributedDataParallel`` takes.

    """

    hardware: Hardware
    traits: Traits
    environ: Mapping[str, str]
    wrapper_parameters: frozenset[str]

    @property
    def threads(self) -> int:
        """CPU threads of a rank today: the user's own setting, else what torchrun would set."""
        return threads_today(self.environ, self.hardware)

    @property
    def over_sockets(self) -> bool:
        """Whether NCCL's connections go over TCP sockets: several nodes, or one so forced."""
        off = all(self.environ.get(f"NCCL_{way}_DISABLE") == "1" for way in ("P2P", "SHM"))
        return self.hardware.nnodes > 1 or off


def declare(where: Surroundings) -> tuple[list[Knob], dict[str, str]]:
    """Every knob that exists here, and why each other one does not."""
    knobs: list[Knob] = []
    absent: dict[str, str] = {}
    on_gpu = where.hardware.device == "cuda"
    for made in (
        *_wrapper(where),
        *_compute(where),
        *_loading(where),
        *nccl_knobs(where.environ, on_gpu, where.over_sockets),
    ):
        if isinstance(made, Knob):
            knobs.append(made)
        else:
            absent[made[0]] = made[1]
    order = {name: place for place, name in enumerate(EFFECT_ORDER)}
    return sorted(knobs, key=lambda k: order[k.name]), absent


def _wrapper(where: Surroundings) -> list[Made]:
    takes = where.wrapper_parameters
    world = where.hardware.world_size
    made: list[Made] = [
        Knob(
            "bucket_cap_mb",
            Kind.REAL,
            25.0,
            low=1.0,
            high=512.0,
            log=True,
            unit="MiB",
            numerics=Numerics.REORDERED,
            help="gradients are reduced in buckets of this size",
        )
    ]
    if "bucket_cap_mb_list" in takes:
        made.append(
            Knob(
                "first_bucket_mb",
                Kind.ORDINAL,
                1.0,
                values=(0.25, 1.0, 4.0, 16.0),
                unit="MiB",
                numerics=Numerics.REORDERED,
                help="size of the bucket that is ready first",
            )
        )
    else:
        made.append(("first_bucket_mb", "the installed torch takes no list of bucket sizes"))
    helps = {
        "gradient_as_bucket_view": "gradients live in the buckets, which saves a copy",
        "static_graph": "the same parameters are used in every step",
    }
    for name, text in helps.items():
        if name in takes:
            made.append(Knob(name, Kind.BOOLEAN, False, help=text))
        else:
            made.append((name, "the installed torch lacks it"))
    sizes = [d for d in range(2, world) if world % d == 0]
    if world >= 4 and sizes:
        made.append(
            Knob(
                "hierarchical_group_size",
                Kind.ORDINAL,
                0,
                values=(0, *sizes),
                unit="ranks",
                scope=Scope.GROUP,
                numerics=Numerics.REORDERED,
                help="reduce-scatter inside groups of so many, all-reduce across; 0 is off",
            )
        )
    else:
        reason = f"{world} ranks cannot be split into groups (at least 4, not a prime number)"
        made.append(("hierarchical_group_size", reason))
    return made


def _compute(where: Surroundings) -> list[Made]:
    on_gpu = where.hardware.device == "cuda"
    modes = ("none", "default", "max-autotune")
    made: list[Made] = [
        Knob(
            "optimizer_implementation",
            Kind.CATEGORICAL,
            "default",
            values=("default", "foreach", "fused"),
            numerics=Numerics.REORDERED,
            help="how the optimizer walks over parameters",
        ),
        Knob(
            "compile_mode",
            Kind.CATEGORICAL,
            "none",
            values=(*modes, "reduce-overhead") if on_gpu else modes,
            numerics=Numerics.REORDERED,
            help="torch.compile; off unless asked for, since compiling takes minutes",
        ),
    ]
    if where.traits.convolutional:
        made.append(
            Knob(
                "channels_last",
                Kind.BOOLEAN,
                False,
                numerics=Numerics.REORDERED,
                help="memory layout of images and convolutions",
            )
        )
    else:
        made.append(("channels_last", "the workload has no convolutions"))
    if where.traits.convolutional and on_gpu:
        made.append(
            Knob(
                "cudnn_benchmark",
                Kind.BOOLEAN,
                False,
                numerics=Numerics.REORDERED,
                help="cuDNN tries its algorithms and keeps the fastest",
            )
        )
    else:
        reason = "no GPU is used" if not on_gpu else "the workload has no convolutions"
        made.append(("cudnn_benchmark", reason))
    made.append(_threads(where, on_gpu))
    return made


def _threads(where: Surroundings, on_gpu: bool) -> Made:
    name = "omp_num_threads"
    if on_gpu:
        return (name, "on a GPU the host's threads do not compute")
    most = max(1, where.hardware.cores // where.hardware.nproc)
    choices = {1, most, where.threads, *(2**i for i in range(8) if 2**i <= most)}
    if len(choices) < 2:
        return (name, f"{where.hardware.nproc} ranks on {where.hardware.cores} cores leave one")
    return Knob(
        name,
        Kind.ORDINAL,
        where.threads,
        values=tuple(sorted(choices)),
        unit="threads",
        numerics=Numerics.REORDERED,
        help="CPU threads of each rank",
    )


def _loading(where: Surroundings) -> list[Made]:
    most = max(1, where.hardware.cores // where.hardware.nproc)
    counts = tuple(n for n in (0, 1, 2, 4, 8) if n <= most)
    numerics = Numerics.ALTERING if where.traits.draws_in_loader else Numerics.EXACT
    made: list[Made] = [
        Knob(
            "dataloader_workers",
            Kind.ORDINAL,
            0,
            values=counts,
            unit="processes",
            numerics=numerics,
            help="loader processes of each rank; 0 loads in the training process",
        ),
        Knob(
            "prefetch_factor",
            Kind.ORDINAL,
            2,
            values=(2, 4, 8),
            unit="batches",
            when={"dataloader_workers": tuple(n for n in counts if n)},
            help="batches that each loader process keeps ready",
        ),
    ]
    if where.hardware.device == "cuda":
        text = "batches are copied to page-locked memory, and from there beside computing"
        made.append(Knob("pin_memory", Kind.BOOLEAN, False, help=text))
    else:
        made.append(("pin_memory", "no GPU is used"))
    return made
