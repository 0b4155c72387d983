"""What the controller knows of devices, from the driver and without torch."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any


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


@dataclass(frozen=True)
class GroupSpec:
    """What a group of ranks is: two groups with equal specs are interchangeable.

    Attributes:
        workload: ``WorkloadSpec`` as plain values, nothing left to be resolved.
        device: ``cpu`` or ``cuda``.
        nproc: ranks on this node.
        nnodes: number of nodes.
        rdzv_endpoint: rendezvous ``host:port`` for several nodes; empty on one.
        interface: network interface of stores and gloo on several nodes.
        seed: where weights, data and RNG states start.
        env: process-scope environment, set when the processes are started and never later.
        capture_nccl: whether NCCL logs which algorithm and protocol it uses.

    """

    workload: dict[str, Any]
    device: str
    nproc: int
    nnodes: int = 1
    rdzv_endpoint: str = ""
    interface: str = ""
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
        matching = [h for h in handles if _text(nvml.nvmlDeviceGetUUID(h)).startswith(entry)]
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
    memory = nvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30
    return Gpu(_text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle)), memory)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def driver_version() -> str:
    """Version of the NVIDIA driver; empty where there is none."""
    with _nvml() as nvml:
        return "" if nvml is None else _text(nvml.nvmlSystemGetDriverVersion())


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


def used_gib(gpus: Sequence[Gpu], nvml: Any = None) -> list[float]:
    """Memory in use on each GPU now, read from the driver anew."""
    if not gpus:
        return []
    if nvml is not None:
        return [_used(nvml, gpu) for gpu in gpus]
    with _nvml() as library:
        return [] if library is None else [_used(library, gpu) for gpu in gpus]


def _used(nvml: Any, gpu: Gpu) -> float:
    handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
    return float(nvml.nvmlDeviceGetMemoryInfo(handle).used) / 2**30


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
