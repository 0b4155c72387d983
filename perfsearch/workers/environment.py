"""Where and within which limits a runner's processes run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from perfsearch.core.knob import Numerics
from perfsearch.parallel.torch_features import nccl_version, torch_version
from perfsearch.workers.devices import Gpu, driver_version, visible_gpus

CPU_RANKS = 2


@dataclass(frozen=True)
class Limits:
    """The ``limits.*`` keys that concern processes.

    Attributes:
        startup_s: longest start-up of a group, importing torch and building the model included.
        trial_s: longest trial, start-up apart.
        grace_s: how long processes may take to end, or ranks to recover from a failure.

    """

    startup_s: float = 120.0
    trial_s: float = 300.0
    grace_s: float = 10.0


@dataclass(frozen=True)
class Environment:
    """What the user's command says about where to run.

    Attributes:
        run_dir: directory of the search; the record of started groups is kept there.
        nproc: ranks on this node; ``None``: one for every visible GPU, or two on a CPU.
        nnodes: number of nodes.
        rdzv_endpoint: rendezvous ``host:port``, needed for several nodes.
        interface: network interface for several nodes.
        seed: of weights, data and random numbers.
        numerics: the most that a searched knob may do to the computation.
        limits: time limits.
        variables: environment variables of the ranks beside those of the controller.

    """

    run_dir: Path
    nproc: int | None = None
    nnodes: int = 1
    rdzv_endpoint: str = ""
    interface: str = ""
    seed: int = 0
    numerics: Numerics = Numerics.REORDERED
    limits: Limits = field(default_factory=Limits)
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Hardware:
    """What is there to run on.

    Attributes:
        device: ``cpu`` or ``cuda``.
        nproc: ranks on this node.
        nnodes: number of nodes.
        gpus: the GPUs used on this node; empty on a CPU.
        cores: CPU cores that this process may use.

    """

    device: str
    nproc: int
    nnodes: int
    gpus: tuple[Gpu, ...]
    cores: int

    @property
    def world_size(self) -> int:
        """Ranks over all nodes."""
        return self.nproc * self.nnodes

    @property
    def memory_gib(self) -> float | None:
        """Memory of the smallest GPU used; ``None`` on a CPU."""
        return min((gpu.memory_gib for gpu in self.gpus), default=None)

    @property
    def device_name(self) -> str:
        """Model of the GPUs, or ``cpu``."""
        return ", ".join(sorted({gpu.name for gpu in self.gpus})) or "cpu"

    @property
    def device_set(self) -> str:
        """``cpu``, or the UUIDs of the GPUs used."""
        return ",".join(sorted(gpu.uuid for gpu in self.gpus)) or "cpu"

    def identity(self) -> dict[str, str]:
        """Ranks, devices and versions: what a result holds for."""
        return {
            "world_size": str(self.world_size),
            "gpu": self.device_name,
            "torch": torch_version(),
            "nccl": nccl_version() if self.gpus else "",
            "driver": driver_version() if self.gpus else "",
        }


def threads_today(environ: Mapping[str, str], hardware: Hardware) -> int:
    """CPU threads of a rank: the user's own setting, else what torchrun would set."""
    text = environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if text.isdigit() and int(text) > 0:
        return int(text)
    return 1 if hardware.nproc > 1 else hardware.cores


def detect(device: str, environment: Environment) -> Hardware:
    """Settle where ranks run.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``.
        environment: what the user asked for.

    Raises:
        ValueError: a device, rank count or rendezvous that is not possible here.

    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"runner.device={device}: allowed are auto, cpu, cuda")
    if environment.nnodes < 1:
        raise ValueError(f"nnodes={environment.nnodes}: must be at least 1")
    if environment.nnodes > 1 and not environment.rdzv_endpoint:
        raise ValueError(
            f"nnodes={environment.nnodes}: several nodes need rdzv_endpoint=host:port, the same on "
            "each of them"
        )
    nproc = environment.nproc
    if nproc is not None and nproc < 1:
        raise ValueError(f"nproc={nproc}: must be at least 1, or null for every device")
    without_cuda = torch_version().endswith("+cpu")
    if device == "cuda" and without_cuda:
        raise ValueError(
            f"runner.device=cuda: the installed torch {torch_version()} is built for CPUs only. "
            "Use runner.device=cpu or auto, or install a CUDA build of torch"
        )
    gpus = [] if device == "cpu" or without_cuda else visible_gpus()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if not gpus:
        if device == "cuda":
            shown = os.environ.get("CUDA_VISIBLE_DEVICES")
            why = "" if shown is None else f" (CUDA_VISIBLE_DEVICES={shown})"
            raise ValueError(
                f"runner.device=cuda: no GPU is visible{why}. Use runner.device=cpu or auto, or "
                "check that nvidia-smi lists one"
            )
        ranks = CPU_RANKS if nproc is None else nproc
        return Hardware("cpu", ranks, environment.nnodes, (), cores or 1)
    ranks = len(gpus) if nproc is None else nproc
    if ranks > len(gpus):
        raise ValueError(
            f"nproc={ranks}: only {len(gpus)} GPUs are visible, and each rank needs its own"
        )
    return Hardware("cuda", ranks, environment.nnodes, tuple(gpus[:ranks]), cores or 1)
