"""Readings of the job's GPUs, each of which may fail by itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from perfsearch.core.hardware import nvml_text
from perfsearch.core.units import KIB, MEGA, MIB
from perfsearch.metrics.reading import Guard

_THROTTLE_REASONS = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}


_HARMLESS = 0x001 | 0x002 | 0x100
"""Being idle, and clocks that somebody chose, are no slow-down."""


class GpuReader:
    """Reads the job's GPUs; nothing is read of other jobs' cards.

    Args:
        uuids: the job's devices; ``None`` goes by ``CUDA_VISIBLE_DEVICES``.
        guard: keeps what could not be read.

    """

    def __init__(self, uuids: Sequence[str] | None, guard: Guard) -> None:
        self.guard = guard
        self.devices: list[Device] = []
        self._turn = 0
        self._nvml: Any = None
        try:
            self.devices, missing = job_devices(uuids)
            self._nvml = open_nvml()
        except NvmlUnavailable as error:
            guard.missing("gpu", str(error))
            return
        for name, why in missing.items():
            guard.missing(name, why)

    def instant(self) -> dict[str, float]:
        """Values of this moment, by ``gpu_<index>_<name>``."""
        values: dict[str, float] = {}
        for device in self.devices:
            for name, value in self._device(device).items():
                values[f"gpu_{device.index}_{name}"] = value
        return values

    def slow(self) -> dict[str, float]:
        """PCIe throughput of one GPU, the next one at each call: a reading blocks for 20 ms."""
        if not self.devices:
            return {}
        device = self.devices[self._turn % len(self.devices)]
        self._turn += 1
        nvml, values = self._nvml, {}
        for word, counter in (
            ("transmit", nvml.NVML_PCIE_UTIL_TX_BYTES),
            ("receive", nvml.NVML_PCIE_UTIL_RX_BYTES),
        ):
            name = f"gpu_{device.index}_pcie_{word}_megabytes_per_s"
            reading = partial(nvml.nvmlDeviceGetPcieThroughput, device.handle, counter)
            rate = self.guard.read(name, reading)
            if rate is not None:
                values[name] = rate * KIB / MEGA
        return values

    def _device(self, device: Device) -> dict[str, float]:
        nvml, handle = self._nvml, device.handle
        prefix = f"gpu_{device.index}_"

        def read(name: str, reading: Any) -> Any:
            return self.guard.read(prefix + name, reading)

        values: dict[str, float | None] = {
            "utilization_percentage": read(
                "utilization_percentage", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu
            ),
            "temperature_celsius": read(
                "temperature_celsius",
                lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            ),
            "sm_clock_mhz": read(
                "sm_clock_mhz", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
            ),
            "memory_clock_mhz": read(
                "memory_clock_mhz", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)
            ),
        }
        memory = read("memory", lambda: _memory(nvml, handle))
        if memory is not None:
            values["memory_free_megabytes"] = memory.free / MEGA
            values["memory_usage_megabytes"] = memory.used / MEGA
        power = read("power_usage_watts", lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        if power is not None:
            values["power_usage_watts"] = power / 1e3
        reasons = read("throttled_percentage", lambda: _throttle_bits(nvml, handle))
        if reasons is not None:
            values["throttled_percentage"] = 100.0 if reasons & ~_HARMLESS else 0.0
        return {name: float(value) for name, value in values.items() if value is not None}


def environment(
    uuids: Sequence[str] | None = None, own_process_ids: Collection[int] = ()
) -> dict[str, Any]:
    """What may disturb a measurement: clocks, throttling, and other processes on the devices.

    Args:
        uuids: the job's devices; ``None`` goes by ``CUDA_VISIBLE_DEVICES``.
        own_process_ids: processes that are the job's. In a container NVML may show a process under
            another number than the container does, so that one of ours looks foreign.

    Returns:
        Plain values: ``devices`` (one mapping a device), ``driver``, ``unsupported``.

    """
    guard = Guard()
    reader = GpuReader(uuids, guard)
    result: dict[str, Any] = {"devices": [], "unsupported": guard.unsupported}
    if not reader.devices:
        return result
    nvml = open_nvml()
    driver = guard.read("driver", lambda: nvml_text(nvml.nvmlSystemGetDriverVersion()))
    if driver is not None:
        result["driver"] = driver
    for device in reader.devices:
        prefix, handle = f"gpu_{device.index}_", device.handle
        entry: dict[str, Any] = {"uuid": device.uuid, "index": device.index, "mig": device.is_mig}
        entry.update(reader._device(device))
        readings: dict[str, Any] = {
            "name": lambda h=handle: nvml_text(nvml.nvmlDeviceGetName(h)),
            "max_sm_clock_mhz": lambda h=handle: nvml.nvmlDeviceGetMaxClockInfo(
                h, nvml.NVML_CLOCK_SM
            ),
            "power_limit_watts": lambda h=handle: nvml.nvmlDeviceGetEnforcedPowerLimit(h) / 1e3,
            "throttle_reasons": lambda h=handle: [
                name for bit, name in _THROTTLE_REASONS.items() if _throttle_bits(nvml, h) & bit
            ],
            "other_processes": lambda h=handle: _processes(nvml, h, own_process_ids),
        }
        for name, reading in readings.items():
            value = guard.read(prefix + name, reading)
            if value is not None:
                entry[name] = value
        result["devices"].append(entry)
    return result


def _memory(nvml: Any, handle: Any) -> Any:
    """Version 2 keeps the driver's own reserve out of ``used``, as ``nvidia-smi`` does."""
    version = getattr(nvml, "nvmlMemory_v2", None)
    if version is not None:
        try:
            return nvml.nvmlDeviceGetMemoryInfo(handle, version=version)
        except nvml.NVMLError:
            pass  # a driver before 510 has version 1 only
    return nvml.nvmlDeviceGetMemoryInfo(handle)


def _throttle_bits(nvml: Any, handle: Any) -> int:
    return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def _processes(nvml: Any, handle: Any, own: Collection[int]) -> list[dict[str, Any]]:
    return [
        {
            "pid": process.pid,
            "used_memory_mib": None
            if process.usedGpuMemory is None
            else process.usedGpuMemory / MIB,
        }
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        if process.pid not in own
    ]


# -----------------------------------------------------------------------------
# Which GPUs are the job's own, seen through NVML.
#
# NVML numbers every card of the host in PCI order and knows nothing of ``CUDA_VISIBLE_DEVICES``,
# so devices are found by UUID. Nothing here imports torch; ``pynvml`` is imported where it is
# used.


_opened_by: set[int] = set()


class NvmlUnavailable(RuntimeError):
    """There is no NVML here: no NVIDIA driver, or no ``nvidia-ml-py``."""


@dataclass(frozen=True)
class Device:
    """One GPU or MIG instance of the job.

    Attributes:
        handle: NVML's handle of it.
        uuid: ``GPU-...`` or ``MIG-...``.
        index: the card's NVML index; for MIG instances their place in the job's list, as several
            may lie on one card.
        is_mig: whether it is a MIG instance.

    """

    handle: Any
    uuid: str
    index: int
    is_mig: bool = False


def open_nvml() -> Any:
    """Return the ``pynvml`` module, initialised in this process.

    Raises:
        NvmlUnavailable: the module or the driver is missing.

    """
    try:
        import pynvml
    except ImportError as error:
        raise NvmlUnavailable(f"pynvml (package nvidia-ml-py) is missing: {error}") from error
    if os.getpid() not in _opened_by:
        # A handle from before a fork is not valid in the child: initialise once a process.
        try:
            pynvml.nvmlInit()
        except Exception as error:
            raise NvmlUnavailable(f"NVML does not start: {error}") from error
        _opened_by.add(os.getpid())
    return pynvml


def job_devices(
    uuids: Sequence[str] | None = None, visible: str | None = None
) -> tuple[list[Device], dict[str, str]]:
    """Find the job's devices.

    Args:
        uuids: their UUIDs, with or without ``GPU-``; ``None`` goes by ``visible``.
        visible: a value of ``CUDA_VISIBLE_DEVICES``; ``None`` reads it from the environment.

    Returns:
        The devices, and for each one that was named but not found the reason.

    Raises:
        NvmlUnavailable: there is no NVML.

    """
    nvml = open_nvml()
    missing: dict[str, str] = {}
    if uuids is not None:
        found = []
        for uuid in uuids:
            device = _by_uuid(nvml, uuid)
            if device is None:
                missing[f"gpu {uuid}"] = "NVML knows no such device"
            else:
                found.append(device)
        return _numbered(found), missing
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
    cards = list(_cards(nvml))
    if visible is None:
        return _numbered([_first_instance(nvml, card) for card in cards]), missing
    found = []
    for token in (part.strip() for part in visible.split(",")):
        chosen = _by_token(nvml, token, cards)
        if chosen is None:
            # CUDA ignores everything from the first invalid entry on; so do we.
            if token not in ("", "-1", "NoDevFiles"):
                missing[f"gpu {token}"] = "CUDA_VISIBLE_DEVICES names no such device"
            break
        found.append(chosen)
    return _numbered(found), missing


def _cards(nvml: Any) -> Iterator[Device]:
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            yield Device(handle, nvml_text(nvml.nvmlDeviceGetUUID(handle)), index)
        except nvml.NVMLError:
            # A card that fell off the bus, or that this container may not open, is not ours.
            continue


def _instances(nvml: Any, card: Device) -> list[Device]:
    """MIG instances of a card; empty where MIG is off or unknown to the driver."""
    try:
        if nvml.nvmlDeviceGetMigMode(card.handle)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return []
        slots = nvml.nvmlDeviceGetMaxMigDeviceCount(card.handle)
    except nvml.NVMLError:
        return []
    found = []
    for slot in range(slots):
        try:
            handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(card.handle, slot)
            found.append(
                Device(handle, nvml_text(nvml.nvmlDeviceGetUUID(handle)), card.index, True)
            )
        except nvml.NVMLError:
            continue  # an empty slot
    return found


def _first_instance(nvml: Any, card: Device) -> Device:
    """What CUDA makes of a card's index: its first MIG instance where MIG is on."""
    instances = _instances(nvml, card)
    return instances[0] if instances else card


def _by_uuid(nvml: Any, uuid: str) -> Device | None:
    names = [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"]
    cards = list(_cards(nvml))
    for card in cards:
        if card.uuid in names:
            return card
    return next((i for card in cards for i in _instances(nvml, card) if i.uuid in names), None)


def _by_token(nvml: Any, token: str, cards: Sequence[Device]) -> Device | None:
    """One entry of ``CUDA_VISIBLE_DEVICES``: an index, or a UUID that may be cut short."""
    if token.isdigit():
        card = next((c for c in cards if c.index == int(token)), None)
        return None if card is None else _first_instance(nvml, card)
    if not token.startswith(("GPU-", "MIG-")):
        return None
    pool = list(cards)
    if token.startswith("MIG-"):
        pool = [i for card in cards for i in _instances(nvml, card)]
    matches = [device for device in pool if device.uuid.startswith(token)]
    return matches[0] if len(matches) == 1 else None


def _numbered(devices: Sequence[Device]) -> list[Device]:
    if not any(device.is_mig for device in devices):
        return list(devices)
    return [Device(d.handle, d.uuid, place, d.is_mig) for place, d in enumerate(devices)]


# -----------------------------------------------------------------------------
# NVLink throughput, from the totals that ``nvidia-smi`` prints.
#
# NVML's own call for them, ``nvmlDeviceGetFieldValues``, broke the calling process's memory
# (seen with driver 580.159.04 on H100), so they are read in a process of their own, now and
# then.


EVERY_S = 15.0
"""Between two readings: each takes a fraction of a second of one core."""


_LONGEST_S = 10.0


_CARD = re.compile(r"^GPU \d+:.*\(UUID: (GPU-[0-9a-fA-F-]+)\)")


_LINK = re.compile(r"Link \d+: Data (Tx|Rx): (\d+) KiB")


Start = Callable[[Sequence[str]], "subprocess.Popen[str]"]


class NvlinkReader:
    """Turns readings into rates; never waits for the process that reads.

    Args:
        devices: the job's GPUs; with fewer than two there is nothing to see.
        guard: keeps why it cannot be read.
        clock: monotonic seconds.
        start: starts a command; for tests.

    """

    def __init__(
        self,
        devices: Sequence[Device],
        guard: Guard,
        clock: Callable[[], float] = time.monotonic,
        start: Start | None = None,
    ) -> None:
        self._devices = {d.uuid: d.index for d in devices if not d.is_mig}
        self._guard = guard
        self._clock = clock
        self._start = start or _start
        self._running: tuple[float, subprocess.Popen[str]] | None = None
        self._last: tuple[float, dict[str, tuple[float, float]]] | None = None
        self._rates: dict[str, float] = {}
        self._usable = len(self._devices) > 1

    def rates(self) -> dict[str, float]:
        """The rates between the latest two readings, by ``gpu_<index>_nvlink_...``."""
        if self._usable:
            self._guard.read("nvlink", self._advance)
            self._usable = "nvlink" not in self._guard.unsupported
        return self._rates if self._usable else {}

    def close(self) -> None:
        """End a reading that is under way."""
        running, self._running = self._running, None
        if running is not None:
            running[1].kill()
            running[1].communicate()

    def _advance(self) -> None:
        now = self._clock()
        if self._running is None:
            if self._last is None or now - self._last[0] >= EVERY_S:
                self._running = (now, self._start(_command(list(self._devices))))
            return
        since, process = self._running
        if process.poll() is None:
            if now - since > _LONGEST_S:
                self.close()
                raise TimeoutError(f"nvidia-smi nvlink took more than {_LONGEST_S:g} s")
            return
        self._running = None
        output = process.communicate()[0]
        totals = totals_kib(output) if process.returncode == 0 else {}
        if not totals:
            words = " ".join(output.split())[:120] or "it shows no links"
            raise OSError(f"nvidia-smi nvlink ended with {process.returncode}: {words}")
        self._take(since, totals)

    def _take(self, time_s: float, totals: dict[str, tuple[float, float]]) -> None:
        if self._last is not None:
            before_s, before = self._last
            for uuid in totals.keys() & before.keys() & self._devices.keys():
                for word, old, new in zip(
                    ("transmit", "receive"), before[uuid], totals[uuid], strict=True
                ):
                    name = f"gpu_{self._devices[uuid]}_nvlink_{word}_megabytes_per_s"
                    self._rates.pop(name, None)
                    if new >= old:
                        self._rates[name] = (new - old) * KIB / MEGA / (time_s - before_s)
        self._last = (time_s, totals)


def totals_kib(text: str) -> dict[str, tuple[float, float]]:
    """Sent and received by card's UUID, summed over its links; cards without links are left out."""
    found: dict[str, tuple[float, float]] = {}
    card = ""
    for line in text.splitlines():
        if named := _CARD.match(line):
            card = named[1]
        elif (link := _LINK.search(line)) and card:
            sent, received = found.get(card, (0.0, 0.0))
            kib = float(link[2])
            found[card] = (sent + kib, received) if link[1] == "Tx" else (sent, received + kib)
    return found


def _command(uuids: Sequence[str]) -> list[str]:
    return ["nvidia-smi", "nvlink", "-gt", "d", "-i", ",".join(uuids)]


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    path = shutil.which(command[0])
    if path is None:
        raise FileNotFoundError(f"{command[0]} is not installed")
    return subprocess.Popen(
        [path, *command[1:]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


# -----------------------------------------------------------------------------
# Memory of cards that are named and not there.


MEMORY_GIB = {
    "T4": 15.0,
    "V100-16": 15.8,
    "V100-32": 31.7,
    "A10": 22.5,
    "A100-40": 39.4,
    "A100-80": 79.2,
    "L4": 22.0,
    "L40S": 44.4,
    "RTX3090": 23.7,
    "RTX4090": 23.6,
    "H100": 79.2,
    "H200": 139.8,
    "B200": 178.4,
}
"""What a process can have of each, as the CUDA runtime tells it; a little less than is printed on
the box."""
