"""Where a job can run: ranks and devices, as the controller sees them without torch."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from perfsearch.core.knob import Numerics
from perfsearch.core.objective import Limits
from perfsearch.core.units import GIB


@dataclass(frozen=True)
class Gpu:
    """One visible GPU.

    Attributes:
        uuid: as the driver and ``CUDA_VISIBLE_DEVICES`` spell it.
        name: model.
        memory_gib: of the whole card.

    """

    uuid: str
    name: str
    memory_gib: float


CPU_RANKS = 2

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_CPUS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Environment:
    """What the user's command says about where to run.

    Attributes:
        run_dir: directory of the search; the list of started groups is kept there.
        nproc: ranks on this node; ``None``: one for every visible GPU, or two on a CPU.
        nnodes: number of nodes.
        launcher: where ranks start, a ``Launcher`` of ``perfsearch.workers.launchers``; ``None``:
            on this node alone.
        seed: of weights, data and random numbers.
        numerics: the most that a searched knob may do to the computation.
        limits: time limits.
        parallel_trials: trials at a time, each on devices of its own.
        variables: environment variables of the ranks beside those of the controller.
        directory: where a script is started; ``None``: the current directory.
        python: the interpreter that runs a script; empty: this one.

    """

    run_dir: Path
    nproc: int | None = None
    nnodes: int = 1
    launcher: object = None
    seed: int = 0
    numerics: Numerics = Numerics.REORDERED
    limits: Limits = field(default_factory=Limits)
    parallel_trials: int = 1
    variables: Mapping[str, str] = field(default_factory=dict)
    directory: Path | None = None
    python: str = ""


@dataclass(frozen=True)
class Lane:
    """The share of a node's devices that one of several trials at a time has.

    Attributes:
        gpus: its GPUs; empty on a CPU.
        cores: numbers of its CPU cores.

    """

    gpus: tuple[Gpu, ...]
    cores: tuple[int, ...]

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that show its processes no other GPUs."""
        return {_VISIBLE: ",".join(gpu.uuid for gpu in self.gpus)} if self.gpus else {}


@dataclass(frozen=True)
class Hardware:
    """What is there for a trial to run on.

    Attributes:
        device: ``cpu`` or ``cuda``.
        nproc: ranks on this node.
        nnodes: number of nodes.
        gpus: the GPUs used on this node; empty on a CPU.
        cores: CPU cores that it may use.
        lanes: shares of trials at a time, the first as above; empty where a trial has it all.

    """

    device: str
    nproc: int
    nnodes: int
    gpus: tuple[Gpu, ...]
    cores: int
    lanes: tuple[Lane, ...] = ()

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
    def all_gpus(self) -> tuple[Gpu, ...]:
        """The GPUs of all trials at a time."""
        return tuple(gpu for lane in self.lanes for gpu in lane.gpus) or self.gpus

    @property
    def device_set(self) -> str:
        """``cpu``, or the UUIDs of the GPUs used."""
        return ",".join(sorted(gpu.uuid for gpu in self.all_gpus)) or "cpu"

    def identity(self) -> dict[str, str]:
        """Ranks, devices and versions: what a result holds for."""
        share = {"cores": f"1/{len(self.lanes)}"} if self.lanes else {}
        return {
            **share,
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


def detect_hardware(device: str, environment: Environment) -> Hardware:
    """Settle where ranks run.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``.
        environment: what the user asked for.

    Raises:
        ValueError: a device or rank count that is not possible here.

    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"runner.device={device}: allowed are auto, cpu, cuda")
    if environment.nnodes < 1:
        raise ValueError(f"nnodes={environment.nnodes}: must be at least 1")
    nproc = environment.nproc
    if nproc is not None and nproc < 1:
        raise ValueError(f"nproc={nproc}: must be at least 1, or null for every device")
    if environment.parallel_trials > 1 and environment.nnodes > 1:
        raise ValueError(
            f"parallel_trials={environment.parallel_trials}: the devices of one node are dealt out "
            f"to trials, and nnodes={environment.nnodes}. Set one of them to 1"
        )
    without_cuda = torch_version().endswith("+cpu")
    if device == "cuda" and without_cuda:
        raise ValueError(
            f"runner.device=cuda: the installed torch {torch_version()} is built for CPUs only. "
            "Use runner.device=cpu or auto, or install a CUDA build of torch"
        )
    gpus = [] if device == "cpu" or without_cuda else visible_gpus()
    if environment.parallel_trials > 1 and (gpus or device != "cuda"):
        return _dealt_out(environment, gpus)
    cores = len(usable_cores())
    if not gpus:
        if device == "cuda":
            shown = os.environ.get("CUDA_VISIBLE_DEVICES")
            why = "" if shown is None else f" (CUDA_VISIBLE_DEVICES={shown})"
            raise ValueError(
                f"runner.device=cuda: no GPU is visible{why}. Use runner.device=cpu or auto, or "
                "check that nvidia-smi lists one"
            )
        ranks = CPU_RANKS if nproc is None else nproc
        return Hardware("cpu", ranks, environment.nnodes, (), cores)
    ranks = len(gpus) if nproc is None else nproc
    if ranks > len(gpus):
        raise ValueError(
            f"nproc={ranks}: only {len(gpus)} GPUs are visible, and each rank needs its own"
        )
    return Hardware("cuda", ranks, environment.nnodes, tuple(gpus[:ranks]), cores)


def _dealt_out(environment: Environment, gpus: Sequence[Gpu]) -> Hardware:
    """The same where several trials run at a time: GPUs in their order, and cores, evenly."""
    count, cores = environment.parallel_trials, usable_cores()
    there, name = (len(gpus), "GPUs") if gpus else (len(cores), "CPU cores")
    ranks = environment.nproc
    if ranks is None:
        ranks = max(1, there // count) if gpus else max(1, min(CPU_RANKS, there // count))
    if ranks * count > there or count > len(cores):
        raise ValueError(
            f"parallel_trials={count}: nproc={ranks} for each needs {ranks * count} {name} and "
            f"{count} CPU cores; there are {there} {name} and {len(cores)} CPU cores. Set fewer "
            "parallel_trials, or a smaller nproc"
        )
    shares = shared_out(cores, count)
    mine = [tuple(gpus[ranks * i : ranks * (i + 1)]) for i in range(count)]
    lanes = tuple(Lane(cards, share) for cards, share in zip(mine, shares, strict=True))
    fewest = min(len(share) for share in shares)
    return Hardware("cuda" if gpus else "cpu", ranks, 1, lanes[0].gpus, fewest, lanes)


def usable_cores() -> list[int]:
    """Numbers of the CPU cores that this thread may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def shared_out(cores: Sequence[int], count: int, topology: Path = _CPUS) -> list[tuple[int, ...]]:
    """The cores in ``count`` equal shares; what is left over stays idle.

    Two threads of one physical core go to the same share where there are enough cores.

    Args:
        cores: numbers of logical cores, at least ``count``.
        count: of shares.
        topology: where the kernel tells which of them are threads of one core.

    """
    together: dict[str, list[int]] = {}
    for core in cores:
        file = topology / f"cpu{core}" / "topology" / "thread_siblings_list"
        try:
            siblings = file.read_text()
        except OSError:
            siblings = str(core)
        together.setdefault(siblings, []).append(core)
    whole = list(together.values()) if len(together) >= count else [[core] for core in cores]
    size = len(whole) // count
    return [
        tuple(core for group in whole[size * i : size * (i + 1)] for core in group)
        for i in range(count)
    ]


@contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Keep this thread, and processes that it starts, on these CPU cores while the block runs.

    Args:
        cores: their numbers; empty: all that it may use.

    """
    if not cores or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass(frozen=True)
class GroupSpec:
    """What a group of ranks is: two groups with equal specs are interchangeable.

    Attributes:
        workload: ``WorkloadSpec`` as plain values, nothing left to be resolved.
        device: ``cpu`` or ``cuda``.
        nproc: ranks on this node.
        nnodes: number of nodes.
        seed: where weights, data and RNG states start.
        env: process-scope environment, set when the processes are started and never later.
        capture_nccl: whether NCCL logs which algorithm and protocol it uses.

    """

    workload: dict[str, Any]
    device: str
    nproc: int
    nnodes: int = 1
    seed: int = 0
    env: dict[str, str] = field(default_factory=dict)
    capture_nccl: bool = False

    @property
    def key(self) -> str:
        """A string that interchangeable groups share."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def world_size(self) -> int:
        """Ranks over all nodes."""
        return self.nproc * self.nnodes


# -----------------------------------------------------------------------------
# What the driver says of GPUs, read through NVML and without torch.


def visible_gpus(nvml: Any = None) -> list[Gpu]:
    """The GPUs that CUDA would show, in its order; ``CUDA_VISIBLE_DEVICES`` is respected.

    Args:
        nvml: stands in for ``pynvml``, initialised; for tests.

    Raises:
        ValueError: ``CUDA_VISIBLE_DEVICES`` names a device that is not there.

    """
    if nvml is not None:
        return _visible(nvml)
    with _nvml() as library:
        return [] if library is None else _visible(library)


def driver_version() -> str:
    """Version of the NVIDIA driver; empty where there is none."""
    with _nvml() as nvml:
        return "" if nvml is None else nvml_text(nvml.nvmlSystemGetDriverVersion())


def conditions(gpus: Sequence[Gpu], own_pids: frozenset[int], nvml: Any = None) -> dict[str, Any]:
    """What could disturb a measurement: clocks, throttling, and other processes, by GPU.

    Readings that a device does not support are left out.

    Args:
        gpus: those used.
        own_pids: processes that are ours.
        nvml: stands in for ``pynvml``, initialised; for tests.

    """
    if not gpus:
        return {}
    if nvml is not None:
        return {f"gpu_{i}": _condition(nvml, gpu, own_pids) for i, gpu in enumerate(gpus)}
    with _nvml() as library:
        if library is None:
            return {}
        return {f"gpu_{i}": _condition(library, gpu, own_pids) for i, gpu in enumerate(gpus)}


def occupants(gpus: Sequence[Gpu], nvml: Any = None) -> str:
    """Which GPUs other processes use now, for people; empty where none is known to.

    Args:
        gpus: those to be used.
        nvml: stands in for ``pynvml``, initialised; for tests.

    """
    found = conditions(gpus, frozenset({os.getpid()}), nvml)
    busy = [
        f"{gpu.uuid} ({gpu.name}) is used by process {', '.join(map(str, state))}"
        for gpu, condition in zip(gpus, found.values(), strict=False)
        if (state := condition.get("foreign_processes"))
    ]
    return "; ".join(busy)


def used_gib(gpus: Sequence[Gpu], nvml: Any = None) -> list[float]:
    """Memory in use on each GPU now, read from the driver anew."""
    if not gpus:
        return []
    if nvml is not None:
        return [_used(nvml, gpu) for gpu in gpus]
    with _nvml() as library:
        return [] if library is None else [_used(library, gpu) for gpu in gpus]


def wait_until_free(
    gpus: Sequence[Gpu],
    before_gib: Sequence[float],
    timeout_s: float,
    tolerance_gib: float = 0.25,
    nvml: Any = None,
) -> bool:
    """Wait until ended processes have given their memory back.

    Args:
        gpus: those they used.
        before_gib: memory in use on each before they were started.
        timeout_s: the longest wait.
        tolerance_gib: what may remain, on each.
        nvml: stands in for ``pynvml``, initialised; for tests.

    Returns:
        Whether it is free.

    """
    deadline = time.monotonic() + timeout_s
    while True:
        now = used_gib(gpus, nvml)
        if all(n <= b + tolerance_gib for n, b in zip(now, before_gib, strict=False)):
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)


@contextmanager
def _nvml() -> Iterator[Any]:
    """The driver's library, initialised; ``None`` where there is none."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _visible(nvml: Any) -> list[Gpu]:
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return [_gpu(nvml, _as_cuda_sees(nvml, handle)) for handle in handles]
    chosen = []
    for entry in (part.strip() for part in wanted.split(",") if part.strip()):
        if entry == "-1":
            break  # CUDA ignores what follows
        chosen.append(_gpu(nvml, _find(nvml, handles, entry)))
    return chosen


def _find(nvml: Any, handles: Sequence[Any], entry: str) -> Any:
    if entry.isdigit():
        if int(entry) < len(handles):
            return _as_cuda_sees(nvml, handles[int(entry)])
    else:
        if entry.startswith("MIG-"):
            return nvml.nvmlDeviceGetHandleByUUID(entry)
        matching = [h for h in handles if nvml_text(nvml.nvmlDeviceGetUUID(h)).startswith(entry)]
        if len(matching) == 1:
            return matching[0]
    raise ValueError(
        f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']}: there is no GPU {entry}; "
        f"the driver knows {len(handles)}"
    )


def _as_cuda_sees(nvml: Any, card: Any) -> Any:
    """The card, or its first instance where it is partitioned: CUDA shows no more of it."""
    try:
        if nvml.nvmlDeviceGetMigMode(card)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return card
    except nvml.NVMLError:
        return card  # a card that knows no partitions
    for slot in range(nvml.nvmlDeviceGetMaxMigDeviceCount(card)):
        try:
            return nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, slot)
        except nvml.NVMLError:
            continue  # an empty slot
    return card


def _gpu(nvml: Any, handle: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle).total / GIB
    return Gpu(
        nvml_text(nvml.nvmlDeviceGetUUID(handle)), nvml_text(nvml.nvmlDeviceGetName(handle)), memory
    )


def nvml_text(value: Any) -> str:
    """NVML's strings as ``str``: older bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _condition(nvml: Any, gpu: Gpu, own_pids: frozenset[int]) -> dict[str, Any]:
    handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)

    def foreign() -> list[int]:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return sorted(p.pid for p in running if p.pid not in own_pids)

    readings = {
        "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        "throttle_reasons": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "foreign_processes": foreign,
    }
    found: dict[str, Any] = {}
    for name, read in readings.items():
        try:
            found[name] = read()
        except nvml.NVMLError:
            continue  # not supported here; absent, never 0
    return found


def _used(nvml: Any, gpu: Gpu) -> float:
    handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
    return float(nvml.nvmlDeviceGetMemoryInfo(handle).used) / GIB


# -----------------------------------------------------------------------------
# What the installed torch can do, found without importing it.


_WRAPPER = "nn/parallel/distributed.py"


def torch_version() -> str:
    """Version of the installed torch; empty where there is none."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def nccl_version() -> str:
    """Version of the NCCL package that torch brought; empty where there is none."""
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"] or ""
        if name.lower().startswith("nvidia-nccl"):
            return distribution.version
    return ""


@functools.cache
def wrapper_parameters() -> frozenset[str]:
    """Parameter names of ``DistributedDataParallel.__init__``, read from its source."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    source = Path(spec.submodule_search_locations[0]) / _WRAPPER
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ClassDef) and node.name == "DistributedDataParallel":
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and member.name == "__init__":
                    arguments = member.args
                    return frozenset(a.arg for a in (*arguments.args, *arguments.kwonlyargs))
    return frozenset()
